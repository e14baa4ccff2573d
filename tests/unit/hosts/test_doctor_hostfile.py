"""The hostfile that doctor writes: the planner reads what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmlx.hosts.doctor_hostfile import hostfile_text, machines_of
from shardmlx.hosts.findings import Examination
from shardmlx.hosts.host_facts import Interface
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.hostfile import Machine, machine_of_each_rank, read_hostfile
from shardmlx.planning.facts.ring import RDMA_SUM_SECONDS
from tests.helpers.doctor import GB, GIB, host, link, speed

MEASURED = Machine(
    host="studio.local",
    slots=2,
    memory=64 * GIB,
    wired=48 * GIB,
    flops=27.2e12,
    bandwidth=8e11,
    link=2e9,
    latency=30.5e-6,
    rdma=30 * 1e-6,
    kind="apple-m2-ultra",
)


def read(text: str, tmp_path: Path) -> tuple[Machine, ...]:
    path = tmp_path / "hosts"
    path.write_text(text)
    return read_hostfile(path)


def test_the_planner_reads_what_was_written(tmp_path: Path) -> None:
    bare = Machine(host="10.0.0.7")
    text = hostfile_text([MEASURED, bare], date="2026-11-21")
    assert text.splitlines()[-2:] == [
        "studio.local slots=2  # memory=64GiB wired=48GiB flops=27.2T bandwidth=800GB/s "
        "link=16Gbps latency=30.5us rdma=30us kind=apple-m2-ultra",
        "10.0.0.7 slots=1",
    ]
    assert read(text, tmp_path) == (MEASURED, bare)


@settings(deadline=None)
@given(
    memory=st.integers(1 << 30, 1 << 42),
    flops=st.floats(1e6, 1e17),
    link_speed=st.floats(1e3, 1e12),
    latency=st.floats(1e-9, 100),
)
def test_whatever_is_measured_can_be_read(
    memory: int,
    flops: float,
    link_speed: float,
    latency: float,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    machine = Machine(host="a", memory=memory, flops=flops, link=link_speed, latency=latency)
    (again,) = read(hostfile_text([machine]), tmp_path_factory.getbasetemp())
    assert again.memory == pytest.approx(memory, rel=1e-3)
    assert again.flops == pytest.approx(flops, rel=1e-4)
    assert again.link == pytest.approx(link_speed, rel=1e-4)
    assert again.latency == pytest.approx(latency, rel=1e-4)


def test_without_a_hostfile_machines_go_by_the_names_that_mpirun_has(tmp_path: Path) -> None:
    hosts = (
        host("mac1", of={"node": "mac1.local", "has_rdma": True}),
        host("mac2", 1, ranks=(1, 2)),
    )
    first, second = machines_of(Examination(hosts, (link("mac1", "mac2"),)))
    assert (first.host, first.slots, second.host, second.slots) == ("mac1.local", 1, "mac2", 2)
    assert first.memory == 64 * GIB
    assert first.flops == 21e12  # bfloat16, in which GPUs train
    assert (first.link, first.latency) == (2 * GB, 3e-5)
    assert (first.rdma, second.rdma) == (RDMA_SUM_SECONDS, None)
    assert first.kind == "apple-m2-ultra"
    assert [each.host for each in read(hostfile_text((first, second)), tmp_path)] == [
        "mac1.local",
        "mac2",
    ]


def test_what_macos_wires_is_written_and_is_never_more_than_the_memory(tmp_path: Path) -> None:
    mac, small = (
        host("mac", of={"memory": 16 * GIB}, working_set=11 * GIB),
        host("small", 1, of={"memory": 8 * GIB}, working_set=11 * GIB),
    )
    machines = machines_of(Examination((mac, small), ()))
    assert [each.wired for each in machines] == [11 * GIB, 8 * GIB]
    assert [each.wired for each in read(hostfile_text(machines), tmp_path)] == [11 * GIB, 8 * GIB]


def test_a_gpu_with_less_memory_than_its_machine_is_what_counts() -> None:
    pc, spark = (
        host("pc", of={"memory": 64 * GIB}, gpu_memory=24 * GIB),
        host("spark", 1, of={"memory": 119 * GIB}, gpu_memory=120 * GIB),
    )
    assert [each.memory for each in machines_of(Examination((pc, spark), ()))] == [
        24 * GIB,
        119 * GIB,
    ]


def test_the_planner_takes_each_pair_of_a_switch_as_it_was_measured() -> None:
    """Three hosts on a switch, one of them with a slow adapter."""
    speeds = {("a", "b"): 1.2e9, ("a", "c"): 0.1e9, ("b", "c"): 0.1e9}
    links = tuple(link(*pair, speed=speed(each)) for pair, each in speeds.items())
    hosts = tuple(host(name, rank) for rank, name in enumerate("abc"))
    machines = machines_of(Examination(hosts, links))
    cluster = Cluster(machines=machine_of_each_rank(machines))
    for (a, b), each in speeds.items():
        assert cluster.link_seconds("abc".index(a), "abc".index(b), 1e9) == 1e9 / each


HOSTFILE = """\
localhost slots=1
anna@mini.lan slots=3  # memory=8GiB kind=old python=/x/bin/python
10.25.0.3 slots=1
far.away slots=1  # flops=5T
"""


def test_a_hostfile_keeps_its_names_users_slots_and_what_was_not_measured(tmp_path: Path) -> None:
    known = read(HOSTFILE, tmp_path)
    third = (Interface("bridge0", "10.25.0.3", "10.25.0.0/24", "Thunderbolt"),)
    hosts = (
        host("studio", 0),
        host("mini", 1, of={"memory": 16 * GIB}, flops={}),
        host("book", 2, of={"interfaces": third}),
        host("new", 3),
    )
    *machines, new = machines_of(Examination(hosts, ()), known)
    assert new.host == "new"
    assert [each.host for each in machines] == ["localhost", "mini.lan", "10.25.0.3", "far.away"]
    assert [each.slots for each in machines] == [1, 3, 1, 1]
    assert [each.memory for each in machines] == [64 * GIB, 16 * GIB, 64 * GIB, None]
    assert [each.flops for each in machines] == [21e12, None, 21e12, 5e12]
    assert machines[1].kind == "old"
    text = hostfile_text(machines)
    assert "\nanna@mini.lan slots=3  # memory=16GiB kind=old python=/x/bin/python\n" in text
    assert read(text, tmp_path) == tuple(machines)
