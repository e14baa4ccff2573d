"""Examines the machines of a job and the links between them: ``shardmlx.doctor`` under mpirun."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path

import mlx.core as mx

from shardmlx.common.environment import INSTALL_OPENBLAS, Blas, tell_launch
from shardmlx.common.formatting import plural
from shardmlx.common.http_listener import source_address
from shardmlx.common.reporter import check_writable
from shardmlx.config.doctor import DoctorConfig
from shardmlx.distributed.agreement import from_rank_0, on_all_ranks, on_rank_0
from shardmlx.distributed.networks import INCLUDE, is_included
from shardmlx.distributed.transport import Transport
from shardmlx.errors import AgreedFailure
from shardmlx.hosts.doctor_hostfile import hostfile_text, machines_of
from shardmlx.hosts.doctor_report import as_json, progress, text, write
from shardmlx.hosts.findings import Examination, Host, Link, LinkSpeed, Route, open_routes
from shardmlx.hosts.host_facts import HostFacts, collect
from shardmlx.hosts.library_probes import broken_parts
from shardmlx.hosts.probe_script import connect_errors, listen
from shardmlx.hosts.self_test import differences
from shardmlx.hosts.speed_tests import matmul_flops, measure_link
from shardmlx.loading.rank_setup import use_device, working_set
from shardmlx.planning.facts.hostfile import Machine, read_hostfile

SECONDS_FOR_FACTS = 120.0  # for all tools that ask a machine for its facts


@dataclass(frozen=True, slots=True)
class _Listener:
    """A host's facts, the port it listens on, and the networks that Open MPI may use."""

    facts: HostFacts
    port: int
    include: str | None


def run(config: DoctorConfig, transport: Transport, blas: Blas) -> None:
    """Examine, show and write; ``AgreedFailure`` for ``--strict``. All ranks must call it."""
    known = on_rank_0(transport, "reading the hostfile", lambda: _machines(config))
    say = progress if transport.rank == 0 else lambda line: None
    on_all_ranks(transport, "choosing the device", partial(use_device, config.device, say))
    examination = Examiner(transport, config.seconds, say).examine(blas, self_test=config.self_test)
    count = from_rank_0(transport, "reporting", lambda: _report(config, examination, known or ()))
    if any(link.speed is None for link in examination.links):
        # In MPI_Finalize all ranks would connect, and crash if two cannot.
        say("not all hosts can connect, so that the job ends with MPI_ABORT")
        status = 1 if config.strict else 0
        if transport.rank == 0:
            tell_launch(status)
        transport.barrier("leaving")
        transport.abort(status)
    if config.strict and count:
        raise AgreedFailure(f"{plural(count, 'warning')} (--strict)")


class Examiner:
    """A rank's part in an examination. ``say`` announces each step."""

    def __init__(self, transport: Transport, seconds: float, say: Callable[[str], None]) -> None:
        self._transport = transport
        self._seconds = seconds
        self._say = say
        hosts = transport.hosts
        self._ranks = {
            host: tuple(rank for rank, other in enumerate(hosts) if other == host) for host in hosts
        }
        self._mine = hosts[transport.rank]
        self._leads = self._ranks[self._mine][0] == transport.rank

    def examine(self, blas: Blas, *, self_test: bool = False) -> Examination:
        """Examine the hosts and their links. All ranks must call it, and get the same."""
        transport = self._transport
        facts, routes = self._ask()
        self._say("trying what libraries do not promise")
        broken = tuple(broken_parts()) if self._leads else ()
        tested: dict[str, float] = {}
        if self_test:
            self._say("comparing with the CPU")
            tested = differences() if self._leads else {}
        self._say("multiplying matrices")
        # All together, like in a run.
        transport.barrier("multiplying matrices")
        device = mx.default_device()
        mine = Host(
            name=self._mine,
            ranks=self._ranks[self._mine],
            facts=facts[self._mine],
            mpi=transport.library and transport.library.removeprefix("Open MPI v"),
            blas=blas.name,
            blas_hint=INSTALL_OPENBLAS if blas.hint else "",
            device="GPU" if device.type == mx.DeviceType.gpu else "CPU",
            working_set=working_set(),
            flops=_flops(device, self._seconds),
            broken=broken,
            self_test=tested,
        )
        seen = transport.all_gather(mine, "multiplying matrices")
        hosts = (_as_one([seen[rank] for rank in own]) for own in self._ranks.values())
        return Examination(tuple(hosts), tuple(self._links(routes)))

    def _ask(self) -> tuple[dict[str, HostFacts], dict[str, dict[str, tuple[Route, ...]]]]:
        """Return, by host, its facts, and its routes to each other host."""
        transport = self._transport
        self._say(f"asking {plural(len(self._ranks), 'host')}")
        with contextlib.ExitStack() as stack:
            stack.enter_context(transport.longer_timeout(SECONDS_FOR_FACTS))
            listener = None
            if self._leads:
                port = stack.enter_context(listen()).getsockname()[1]
                listener = _Listener(collect(), port, os.environ.get(INCLUDE))
            everyone = transport.all_gather(listener, "asking the hosts")
            listeners = {host: everyone[first] for host, (first, *_) in self._ranks.items()}
            mine = self._routes(listeners) if self._leads else {}
            routes = transport.all_gather(mine, "trying connections")
        return (
            {host: listener.facts for host, listener in listeners.items()},
            {host: routes[first] for host, (first, *_) in self._ranks.items()},
        )

    def _routes(self, listeners: Mapping[str, _Listener]) -> dict[str, tuple[Route, ...]]:
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

    def _links(self, routes: Mapping[str, Mapping[str, tuple[Route, ...]]]) -> list[Link]:
        """Measure one after another, so that none disturbs another."""
        links = []
        pairs = list(combinations(self._ranks, 2))
        for number, (a, b) in enumerate(pairs, start=1):
            self._say(f"measuring {a} - {b} ({number} of {len(pairs)})")
            there, back = routes[a][b], routes[b][a]
            speed, problem = None, None
            if _may_talk(there) and _may_talk(back):
                speed, problem = self._measure(self._ranks[a][0], self._ranks[b][0])
            link = Link(first=a, second=b, there=there, back=back, speed=speed, problem=problem)
            links.append(link)
        return links

    def _measure(self, first: int, second: int) -> tuple[LinkSpeed | None, str | None]:
        transport = self._transport
        mine = None
        if transport.rank in (first, second):
            mine = measure_link(transport, first, second, self._seconds)
        # The other ranks wait while these two may each wait for a lost message.
        with transport.longer_timeout(3 * transport.timeout + 10 * self._seconds):
            said = transport.all_gather(mine, "measuring links")
        found: LinkSpeed | str | None = said[first] or said[second]
        return (None, found) if isinstance(found, str) else (found, None)


def _may_talk(routes: Sequence[Route]) -> bool:
    """Return whether messages may pass: MPI may know an address that is unknown here."""
    return bool(open_routes(routes)) or not any(route.used for route in routes)


def _as_one(ranks: Sequence[Host]) -> Host:
    dtypes = dict.fromkeys(dtype for rank in ranks for dtype in rank.flops)
    return replace(
        ranks[0],
        flops={dtype: sum(rank.flops.get(dtype, 0.0) for rank in ranks) for dtype in dtypes},
    )


def _flops(device: mx.Device, seconds: float) -> dict[str, float]:
    """Measure FLOP/s by dtype. CPUs compute in half precision far too slowly for a run."""
    dtypes = {"fp32": mx.float32}
    if device.type == mx.DeviceType.gpu:
        dtypes["bf16"] = mx.bfloat16
    return {name: matmul_flops(dtype, seconds) for name, dtype in dtypes.items()}


def _machines(config: DoctorConfig) -> tuple[Machine, ...]:
    """Return the machines of the hostfile, once it is known that all files can be written."""
    for flag, path in (("--json", config.json), ("--write-hostfile", config.write_hostfile)):
        if path is not None:
            check_writable(Path(path), flag)
    return () if config.hostfile is None else read_hostfile(config.hostfile)


def _report(config: DoctorConfig, examination: Examination, known: Sequence[Machine]) -> int:
    findings = examination.findings()
    print(text(examination, findings), flush=True)
    if config.json is not None:
        write(config.json, as_json(examination, findings))
    if config.write_hostfile is not None:
        hostfile = hostfile_text(machines_of(examination, known), datetime.date.today().isoformat())
        write(config.write_hostfile, hostfile)
    return len(findings)
