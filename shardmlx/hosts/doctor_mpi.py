"""Examines the machines of a job and the links between them: ``shardmlx.doctor`` under mpirun."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path

import mlx.core as mx

from shardmlx.common.environment import INSTALL_OPENBLAS, Blas, tell_launch
from shardmlx.common.formatting import plural
from shardmlx.common.http_listener import source_address
from shardmlx.common.json_output import JsonOutput
from shardmlx.common.reporter import check_writable
from shardmlx.config.doctor import LINE, DoctorConfig
from shardmlx.distributed.crew import Crew, lead, together
from shardmlx.distributed.networks import INCLUDE, is_included
from shardmlx.distributed.transport import Transport
from shardmlx.errors import AgreedFailure
from shardmlx.hosts.doctor_hostfile import hostfile_text, machines_of
from shardmlx.hosts.doctor_report import as_json, progress, text, write
from shardmlx.hosts.findings import (
    BrokenPart,
    Examination,
    Host,
    Link,
    LinkSpeed,
    Route,
    open_routes,
)
from shardmlx.hosts.host_facts import HostFacts, collect
from shardmlx.hosts.library_probes import broken_parts
from shardmlx.hosts.probe_script import connect_errors, listen
from shardmlx.hosts.self_test import differences
from shardmlx.hosts.speed_tests import matmul_flops, measure_link
from shardmlx.loading.rank_setup import gpu_memory, use_device, working_set
from shardmlx.planning.facts.hostfile import Machine, read_hostfile

SECONDS_AT_REST = 0.5
"""Seconds in which a rank does nothing, and its CPU time is measured."""

SECONDS_FOR_FACTS = 120.0
"""Seconds for all tools that ask a machine for its facts."""


@dataclass(frozen=True, slots=True)
class ListeningHost:
    """The facts of the host ``name``, the port it listens on, and the networks that Open MPI may
    use."""

    name: str
    facts: HostFacts
    port: int
    include: str | None


def run(config: DoctorConfig, transport: Transport, blas: Blas) -> None:
    """Examine, show and write, as rank 0's ``config`` says, on all ranks. Raises as ``lead``, and
    ``AgreedFailure`` for ``--strict``."""
    with closing(DoctorWorker(transport, blas)) as worker:
        lead(transport, worker, partial(_examine, config))


def _examine(config: DoctorConfig, crew: Crew[DoctorWorker]) -> None:
    """Examine, show and write. On rank 0."""
    known = _machines(config)
    written = {"--write-hostfile": config.write_hostfile}
    output = JsonOutput(config.json, LINE.command, written)
    crew.all(DoctorWorker.use_device, config.device)
    examination = examine(crew, config.seconds, self_test=config.self_test)
    with output:
        count = _report(config, examination, known, output)
    if any(link.speed is None for link in examination.links):
        # In MPI_Finalize all ranks would connect, and crash if two cannot.
        progress("not all hosts can connect, so that the job ends with MPI_ABORT")
        status = 1 if config.strict else 0
        tell_launch(status)
        crew.all(DoctorWorker.abort, status)
    if config.strict and count:
        raise AgreedFailure(f"{plural(count, 'warning')} (--strict)")


def examine(crew: Crew[DoctorWorker], seconds: float, *, self_test: bool = False) -> Examination:
    """Examine the hosts and their links, each measurement for so many seconds. On rank 0."""
    worker = crew.worker
    progress(f"asking {plural(len(worker.ranks), 'host')}")
    with crew.transport.longer_timeout(SECONDS_FOR_FACTS):
        asked = crew.all(DoctorWorker.listen)
        listeners = {each.name: each for each in asked if each is not None}
        tried = crew.all(DoctorWorker.routes, listeners)
    routes = {host: tried[first] for host, (first, *_) in worker.ranks.items()}
    progress("trying what libraries do not promise")
    crew.all(DoctorWorker.try_libraries)
    if self_test:
        progress("comparing with the CPU")
        crew.all(DoctorWorker.test_itself)
    progress("looking at what a rank takes while it waits")
    at_rest = crew.all(DoctorWorker.rest)
    progress("multiplying matrices")
    # All together, like in a run.
    flops = crew.all(DoctorWorker.multiply, seconds)
    hosts = [
        replace(
            host,
            flops=_sums([flops[rank] for rank in host.ranks]),
            at_rest=max(at_rest[rank] for rank in host.ranks),
        )
        for host in crew.all(DoctorWorker.describe)
        if host is not None
    ]
    return Examination(tuple(hosts), tuple(_links(crew, routes, seconds)))


def _links(
    crew: Crew[DoctorWorker],
    routes: Mapping[str, Mapping[str, tuple[Route, ...]]],
    seconds: float,
) -> Iterator[Link]:
    """Measure one after another, so that none disturbs another."""
    ranks = crew.worker.ranks
    pairs = list(combinations(ranks, 2))
    for number, (a, b) in enumerate(pairs, start=1):
        progress(f"measuring {a} - {b} ({number} of {len(pairs)})")
        there, back = routes[a][b], routes[b][a]
        found: LinkSpeed | str | None = None
        if _may_talk(there) and _may_talk(back):
            first, second = ranks[a][0], ranks[b][0]
            # These two may each wait for a lost message.
            patience = 3 * crew.transport.timeout + 10 * seconds
            with crew.transport.longer_timeout(patience):
                said = crew.all(DoctorWorker.measure, first, second, seconds)
            found = said[first] or said[second]
        problem = found if isinstance(found, str) else None
        speed = found if isinstance(found, LinkSpeed) else None
        yield Link(first=a, second=b, there=there, back=back, speed=speed, problem=problem)


class DoctorWorker:
    """The part of one rank in an examination; the first of each host acts for it. Must be
    closed."""

    def __init__(self, transport: Transport, blas: Blas) -> None:
        hosts = transport.hosts
        self._transport = transport
        self._blas = blas
        self.ranks = {
            host: tuple(rank for rank, other in enumerate(hosts) if other == host) for host in hosts
        }
        """The ranks of each host."""
        self._mine = hosts[transport.rank]
        self._leads = self.ranks[self._mine][0] == transport.rank
        self._listening = ExitStack()
        self._facts: HostFacts | None = None
        self._broken: list[BrokenPart] = []
        self._tested: dict[str, float] = {}

    def use_device(self, name: str) -> None:
        """Compute on a device. Raises ``UserError`` where MLX lacks it."""
        use_device(name, progress if self._transport.rank == 0 else lambda line: None)

    def listen(self) -> ListeningHost | None:
        """Listen for other hosts, and return what this one says of itself, if this rank acts for
        it."""
        if not self._leads:
            return None
        self._facts = collect()
        port = self._listening.enter_context(listen()).getsockname()[1]
        return ListeningHost(self._mine, self._facts, port, os.environ.get(INCLUDE))

    def routes(self, listeners: Mapping[str, ListeningHost]) -> dict[str, tuple[Route, ...]]:
        """Try the addresses of the other hosts; return the routes to each of them, if this rank
        acts for its host."""
        return self._routes(listeners) if self._leads else {}

    def try_libraries(self) -> None:
        """Try what libraries do not promise."""
        self._broken = [*broken_parts()] if self._leads else []

    def test_itself(self) -> None:
        """Compare results of the device with the CPU's."""
        self._tested = differences() if self._leads else {}

    def rest(self) -> float:
        """Do nothing, and return the cores that this rank takes meanwhile, threads of MPI among
        them."""
        began = time.process_time()
        time.sleep(SECONDS_AT_REST)
        return (time.process_time() - began) / SECONDS_AT_REST

    def multiply(self, seconds: float) -> dict[str, float]:
        """Return the FLOP/s by dtype that this rank measures."""
        return _flops(mx.default_device(), seconds)

    def describe(self) -> Host | None:
        """Return this host as it was found, but for what all its ranks measure, if this rank acts
        for it."""
        if self._facts is None:
            return None
        device = mx.default_device()
        library = self._transport.library
        return Host(
            name=self._mine,
            ranks=self.ranks[self._mine],
            facts=self._facts,
            mpi=library and library.removeprefix("Open MPI v"),
            blas=self._blas.name,
            blas_hint=INSTALL_OPENBLAS if self._blas.hint else "",
            device="GPU" if device.type == mx.DeviceType.gpu else "CPU",
            working_set=working_set(),
            gpu_memory=gpu_memory(),
            flops={},
            broken=tuple(self._broken),
            self_test=self._tested,
        )

    @together
    def measure(self, first: int, second: int, seconds: float) -> LinkSpeed | str | None:
        """Measure the link between two ranks, if this is one of them: the speed, or the problem. A
        lost message ends the wait of both."""
        if self._transport.rank not in (first, second):
            return None
        return measure_link(self._transport, first, second, seconds)

    @together
    def abort(self, status: int) -> None:
        """End this process, without MPI_Finalize. Does not return."""
        self._transport.barrier("leaving")
        self._transport.abort(status)

    def close(self) -> None:
        """Listen no more."""
        self._listening.close()

    def _routes(self, listeners: Mapping[str, ListeningHost]) -> dict[str, tuple[Route, ...]]:
        """Return the routes to the addresses of each other host that are not this one's too."""
        own = {each.address: each for each in listeners[self._mine].facts.interfaces}
        targets = [
            (host, each, listener)
            for host, listener in listeners.items()
            if host != self._mine
            for each in listener.facts.interfaces
            if each.address not in own and not each.is_loopback
        ]
        errors = connect_errors([(each.address, listener.port) for _, each, listener in targets])
        found: dict[str, tuple[Route, ...]] = dict.fromkeys(listeners, ())
        for (host, each, listener), error in zip(targets, errors, strict=True):
            through = own.get(source_address(each.address) or "")
            name, medium = (through.name, through.medium) if through else (None, None)
            used = is_included(each.name, each.address, listener.include)
            found[host] += (Route(name, medium, each.address, each.network, error, used),)
        return found


def _may_talk(routes: Sequence[Route]) -> bool:
    """Return whether messages may pass: MPI may know an address that is unknown here."""
    return bool(open_routes(routes)) or not any(route.used for route in routes)


def _sums(flops: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the FLOP/s of several ranks together."""
    dtypes = dict.fromkeys(dtype for each in flops for dtype in each)
    return {dtype: sum(each.get(dtype, 0.0) for each in flops) for dtype in dtypes}


def _flops(device: mx.Device, seconds: float) -> dict[str, float]:
    """Measure FLOP/s by dtype. CPUs compute in half precision far too slowly for a run."""
    dtypes = {"fp32": mx.float32}
    if device.type == mx.DeviceType.gpu:
        dtypes["bf16"] = mx.bfloat16
    return {name: matmul_flops(dtype, seconds) for name, dtype in dtypes.items()}


def _machines(config: DoctorConfig) -> tuple[Machine, ...]:
    """Return the machines of the hostfile, once it is known that one can be written."""
    if config.write_hostfile is not None:
        check_writable(Path(config.write_hostfile), "--write-hostfile")
    return () if config.hostfile is None else read_hostfile(config.hostfile)


def _report(
    config: DoctorConfig, examination: Examination, known: Sequence[Machine], output: JsonOutput
) -> int:
    """Show and write what is found; return the number of warnings."""
    findings = examination.findings()
    print(text(examination, findings), flush=True)
    output.write(as_json(examination, findings))
    if config.write_hostfile is not None:
        hostfile = hostfile_text(machines_of(examination, known), datetime.date.today().isoformat())
        write(config.write_hostfile, hostfile)
    return len(findings)
