"""The measurements of links, arrays and matrices, with ranks as threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import closing

import mlx.core as mx
import pytest

from shardmlx.common.environment import Blas
from shardmlx.config.doctor import DoctorConfig
from shardmlx.distributed.crew import lead
from shardmlx.distributed.messages import Array, Handle
from shardmlx.distributed.transport import Transport
from shardmlx.errors import AgreedFailure
from shardmlx.hosts import doctor_mpi, speed_tests
from shardmlx.hosts.doctor_mpi import DoctorWorker
from shardmlx.hosts.findings import Examination, LinkSpeed
from shardmlx.hosts.speed_tests import bandwidth, measure_link
from tests.helpers.local_transport import LocalNetwork, LocalTransport

BLAS = Blas("OpenBLAS 0.3.21, 1 thread a rank")


class Slow(LocalTransport):
    """A rank whose messages over 1 kB take a second for each ``RATE`` bytes."""

    RATE = 10e6

    def send(self, array: Array, peer: int, tag: int) -> Handle:
        if array.nbytes > 1000:
            time.sleep(array.nbytes / self.RATE)
        return super().send(array, peer, tag)


def test_a_link_is_measured_from_its_first_rank() -> None:
    """What the second sends is slow."""

    def work(transport: LocalTransport) -> LinkSpeed | str | None:
        end: Transport = transport
        if transport.rank == 1:
            end = Slow(transport._network, 1)
        return measure_link(end, 0, 1, 0.2)

    first, second = LocalNetwork(2, 30.0).run(work)
    assert second is None
    assert isinstance(first, LinkSpeed)
    assert first.latency > 0
    assert 0 < first.back < first.there


def test_a_round_trip_that_another_moment_made_long_makes_no_link_fast() -> None:
    assert bandwidth(1_000_000, 0.1, 0.02) == pytest.approx(12.5e6)
    assert bandwidth(1_000_000, 0.1, 0.2) == pytest.approx(20e6)


def test_a_link_whose_other_end_is_silent_is_named_and_nobody_waits_for_ever() -> None:
    def work(transport: LocalTransport) -> LinkSpeed | str | None:
        return measure_link(transport, 0, 1, 0.1) if transport.rank == 0 else None

    said, _ = LocalNetwork(2, 0.2).run(work)
    assert said.startswith("rank 0 on localhost, testing the link, ")
    assert "rank 1 on localhost: nothing came for 0.2 s" in said


def examine(hosts: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> Examination:
    """On ranks with these hosts; no other machine is there to connect to."""
    monkeypatch.setattr(speed_tests, "SECONDS_OF_PINGS", 0.01)

    def work(transport: LocalTransport) -> Examination | None:
        transport.hosts = tuple(hosts)
        with closing(DoctorWorker(transport, BLAS)) as worker:
            return lead(transport, worker, lambda crew: doctor_mpi.examine(crew, 0.02))

    found, *others = LocalNetwork(len(hosts), 30.0).run(work)
    assert others == [None] * (len(hosts) - 1)
    assert isinstance(found, Examination)
    return found


def test_several_ranks_of_one_machine_are_one_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = examine(["a", "b", "b", "c"], monkeypatch)
    assert [(host.name, host.ranks) for host in found.hosts] == [
        ("a", (0,)),
        ("b", (1, 2)),
        ("c", (3,)),
    ]
    assert [link.name for link in found.links] == ["a - b", "a - c", "b - c"]
    assert all(link.speed is not None for link in found.links)
    assert all(host.flops["fp32"] > 0 for host in found.hosts)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "doctor: asking 3 hosts"
    assert [line for line in lines if "measuring" in line] == [
        f"doctor: measuring {pair} ({i} of 3)"
        for i, pair in enumerate(("a - b", "a - c", "b - c"), 1)
    ]


def test_a_machine_s_own_addresses_are_no_ways_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert examine(["a", "b"], monkeypatch).links[0].there == ()


def test_strict_makes_warnings_a_failure_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shardmlx.hosts.findings.LITTLE_DISK", float("inf"))
    monkeypatch.setattr("shardmlx.hosts.findings.LITTLE_MEMORY", 0.0)  # others may have it now
    failures: list[str] = []
    lock = threading.Lock()

    def work(transport: LocalTransport) -> None:
        config = DoctorConfig.from_flat(seconds=0.02, strict=True)
        try:
            doctor_mpi.run(config, transport, BLAS)
        except AgreedFailure as failure:
            with lock:
                failures.append(str(failure))

    LocalNetwork(2, 30.0).run(work)
    assert failures == ["1 warning (--strict)"] * 2
    assert "warning: localhost: only " in capsys.readouterr().out


def test_gpus_multiply_in_half_precision_too() -> None:
    assert set(doctor_mpi._flops(mx.Device(mx.cpu), 0.01)) == {"fp32"}
    assert set(doctor_mpi._flops(mx.Device(mx.gpu), 0.01)) == {"fp32", "bf16"}
