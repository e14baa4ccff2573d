"""What doctor shows: what is known as it is, what is not as unknown."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from shardmlx.common.json_output import plain
from shardmlx.hosts.doctor_report import as_json, bandwidth, latency, text
from shardmlx.hosts.findings import Examination, Host
from tests.helpers.doctor import GIB, host, link, route, speed


def rows(*hosts: Host) -> dict[str, str]:
    table = text(Examination(hosts, ()), []).split("\n\n")[0].splitlines()
    width = len("matrix library  ")
    return {line[:width].strip(): line[width:].strip() for line in table}


def test_a_mac() -> None:
    shown = rows(host("studio", working_set=11 * GIB))
    wanted = {
        "ranks": "0",
        "Python": "3.11.7",
        "Open MPI": "5.0.11",
        "chip": "Apple M2 Ultra",
        "computes on": "GPU",
        "matmul bf16": "21.00 TFLOP/s",
        "free memory": "50.00 GiB",
        "memory limit": "the machine's",
        "wired limit": "left to macOS: 11.00 GiB",
    }
    assert wanted.items() <= shown.items()


def test_what_is_not_known_is_shown_as_unknown() -> None:
    known = ["chip", "cores", "memory", "memory_free", "wired_limit", "disk_free"]
    nobody: dict[str, Any] = {**dict.fromkeys(known), "interfaces": (), "versions": {"mlx": None}}
    shown = rows(host("a"), host("b", 1, of=nobody, mpi=None, flops={}))
    for label in (
        *("Python", "mlx", "Open MPI", "chip", "cores", "matmul fp32", "memory", "free memory"),
        *("wired limit", "free disk"),
    ):
        assert shown[label].split()[-1] == "unknown", label
    linux = rows(host("a", of={"is_mac": False, "wired_limit": None}))
    assert linux["wired limit"] == "not applicable"


def test_the_memory_of_a_gpu_is_shown_where_one_has_its_own() -> None:
    assert "GPU memory" not in rows(host("mac"))
    both = rows(host("mac"), host("pc", 1, gpu_memory=24 * GIB))
    assert re.split(" {2,}", both["GPU memory"]) == ["the machine's", "24.00 GiB"]


@pytest.mark.parametrize(("gib", "mib"), [(64, 57344), (16, 12288), (8, None)])
def test_the_command_that_raises_the_wired_limit(gib: int, mib: int | None) -> None:
    """Something is left to the system; small machines have nothing to give."""
    shown = text(Examination((host("a", of={"memory": gib * GIB}),), ()), [])
    assert ("wired_limit_mb" in shown) == (mib is not None)
    assert mib is None or f"sudo sysctl iogpu.wired_limit_mb={mib}" in shown
    chosen = host("a", of={"wired_limit": 56 * GIB})
    assert "wired_limit_mb" not in text(Examination((chosen,), ()), [])


def test_a_line_for_each_link() -> None:
    links = (
        link("a", "b", speed=speed(2e9, 1.5e9)),
        link("a", "c", there=(route("Wi-Fi"), route(None)), speed=speed(1e7, latency=0.004)),
        link("b", "c", there=(), back=(), speed=None),
    )
    hosts = (host("a"), host("b", 1), host("c", 2))
    table = text(Examination(hosts, links), []).split("\n\n")[1].splitlines()
    assert [" ".join(line.split()) for line in table] == [
        "link over latency there back",
        "a - b bridge0 (Thunderbolt) 30 us 16.00 Gbit/s 12.00 Gbit/s",
        "a - c en0 (Wi-Fi), utun0 (unknown) 4.0 ms 80.0 Mbit/s 80.0 Mbit/s",
        "b - c unknown unknown unknown unknown",
    ]
    assert (latency(31.4e-6), bandwidth(11.8e6)) == ("31 us", "94.4 Mbit/s")


def test_json_has_everything() -> None:
    examination = Examination((host("a"), host("b", 1, mpi=None)), (link("a", "b"),))
    found = json.loads(json.dumps(plain(as_json(examination, examination.findings()))))
    first, second = found["hosts"]
    assert first["facts"]["interfaces"][0]["medium"] == "Thunderbolt"
    assert first["flops"] == {"fp32": 20e12, "bf16": 21e12}
    assert second["versions"]["Open MPI"] is None
    assert found["links"][0]["speed"]["latency"] == 3e-5
    assert found["links"][0]["there"][0]["problem"] is None
    assert found["warnings"][0]["problem"] == "Open MPI differs: 5.0.11 on a, none on b"
