"""Describe the machines of a run to the planner: memory, speed, links. No MLX, no MPI."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardmlx.engine.buffers import compiled_length
from shardmlx.errors import UserError
from shardmlx.pipeline.mesh import Mesh
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.facts.kernels import token_seconds
from shardmlx.planning.facts.profile_file import MachineProfile, Profile
from shardmlx.planning.facts.ring import Ring
from shardmlx.planning.facts.workload import Workload
from shardmlx.planning.memory.measured import with_measurements
from shardmlx.planning.memory.training_setup import BACKENDS, TrainingSetup
from shardmlx.planning.time.parts import ModelSeconds, Speed

MEMORY_FRACTION = 0.75
"""Share of a machine's memory for a run on its CPU: the system and other programs have the rest."""

EFFICIENCY = 0.6
"""Share of peak FLOP/s reached in training: an estimate, replaced by ``--profile``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A machine, or its share of one, for each world rank; times of ``profile`` come before
    ``flops``. Raises ``UserError`` for a missing number."""

    machines: tuple[Machine, ...]
    profile: Profile | None = None
    memory_fraction: float = MEMORY_FRACTION
    efficiency: float = EFFICIENCY
    backend: str = BACKENDS[0]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.machines)

    @property
    def unit(self) -> str:
        """Unit of times: ``seconds``, or ``FLOPs`` if a machine's speed is unknown."""
        known = self.profile is not None or all(each.flops for each in self.machines)
        return "seconds" if known else "FLOPs"

    def check_speeds(self) -> None:
        """Raise ``UserError`` for the first machine whose speed is unknown."""
        for machine in self.machines:
            if self.profile is None and machine.flops is None:
                raise UserError(
                    f"it is not known how fast {machine.host} is",
                    "write memory=16GiB and flops=27T, or what it has, into its line of the "
                    "hostfile, or let shardmlx doctor --write-hostfile measure both",
                )

    def capacity(self, rank: int) -> float:
        """Return the bytes that a rank may use, wired or a share of memory; ``inf`` if unknown."""
        memory = self.machines[rank].memory
        wired = self.machines[rank].wired
        if wired is not None:
            return wired
        return math.inf if memory is None else memory * self.memory_fraction

    def clock(self, rank: int, workload: Workload) -> Speed | MachineProfile:
        """Return what times a rank, in ``unit``; ``UserError`` if a profile has not measured it."""
        machine = self.machines[rank]
        if self.profile is not None:
            return self.profile.measured(workload, machine.host, machine.kind)
        if self.unit == "FLOPs" or machine.flops is None:
            return Speed(1.0)
        token = 0.0 if self.backend == "cpu" else token_seconds(machine)
        return Speed(machine.flops * self.efficiency, token)

    def with_sums(self, alone: ModelSeconds, rank: int, hidden: int) -> ModelSeconds:
        """Return the times of a rank that sums ``hidden`` bytes with its group, if it has one and
        times are known."""
        ring = self.machines[rank].ring
        if ring is None or self.unit == "FLOPs":
            return alone
        return alone.with_sums(ring.sum_seconds(hidden))

    def setup(self, workload: Workload, rows: int, length: int, dp: int) -> TrainingSetup:
        """Return what decides the memory of ``rows`` x ``length``, with measurements if any."""
        rows, length = workload.micro_batch(rows, length)
        if workload.batch.pack and self.backend != "cpu":
            length = compiled_length(length)
        setup = TrainingSetup(
            workload=workload,
            rows=rows,
            length=length,
            dp=dp,
            backend=self.backend,
            savings=workload.savings(self.backend),
        )
        if self.profile is None:
            return setup
        return with_measurements(setup, [machine.memory for machine in self.profile.machines])

    @property
    def knows_messages(self) -> bool:
        """True if message times between hosts are known relative to computing."""
        if len({each.host for each in self.machines}) == 1:
            return True
        return self.unit == "seconds" and all(each.link is not None for each in self.machines)

    def link_seconds(self, a: int, b: int, nbytes: float) -> float:
        """Return how long a message occupies the link between two ranks; 0 within a machine."""
        if self.is_same_host(a, b):
            return 0.0
        known = [each.link for each in (self.machines[a], self.machines[b]) if each.link]
        return nbytes / min(known) if known else 0.0

    def latency(self, a: int, b: int) -> float:
        """Return the latency of a message, beside its time on the link."""
        if self.is_same_host(a, b):
            return 0.0
        return max(self.machines[a].latency or 0.0, self.machines[b].latency or 0.0)

    def ring(self, ranks: Sequence[int]) -> Ring:
        """Return the links of ranks that share layers, from each to the next."""
        links = [(a, b) for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True)]
        rdma = [self.machines[rank].rdma for rank in ranks]
        return Ring(
            members=len(ranks),
            latency=max(self.latency(*each) for each in links),
            byte_seconds=max(self.link_seconds(*each, 1.0) for each in links),
            rdma=None if None in rdma else max(filter(None, rdma)),
        )

    @property
    def has_rdma(self) -> bool:
        """True if the machines sum over RDMA."""
        return None not in (each.rdma for each in self.machines)

    def with_rings(self, across: int) -> Cluster:
        """Return the cluster whose groups of ``across`` ranks, neighbours, share layers."""
        if across == 1:
            return self
        firsts = (rank - rank % across for rank in range(self.size))
        rings = [self.ring(range(first, first + across)) for first in firsts]
        machines = zip(self.machines, rings, strict=True)
        return replace(self, machines=tuple(replace(each, ring=ring) for each, ring in machines))

    def is_same_host(self, a: int, b: int) -> bool:
        """Return whether two ranks are on one machine."""
        return self.machines[a].host == self.machines[b].host


def pipeline_seconds(
    workload: Workload,
    cluster: Cluster,
    mesh: Mesh,
    rows: int,
    length: int,
    replica: int | None = None,
) -> list[ModelSeconds]:
    """Return a micro-batch's times on each pipeline rank, of its slowest or the given replica."""
    hidden = rows * length * workload.shape.hidden_size * workload.dtype_bytes
    times = {}  # Machines alike have one entry.
    wholes = {}
    kinds = []
    for rank in range(mesh.size):
        clock = cluster.clock(rank, workload)
        kind = (clock, cluster.machines[rank].ring)
        kinds.append(kind)
        if kind not in times:
            own = cluster.with_sums(clock.seconds(workload, rows, length), rank, hidden)
            times[kind] = own
            wholes[kind] = own.stage(0, len(own.layers)).microbatch
    members = [_counted(mesh, rank, replica) for rank in range(mesh.pp)]
    return [times[max((kinds[each] for each in own), key=wholes.__getitem__)] for own in members]


def between_ranks(
    mesh: Mesh, time: Callable[[int, int], float], replica: int | None = None
) -> tuple[tuple[float, ...], ...]:
    """Return ``[a][b]``: the longest ``time`` from rank a to b over all replicas, or in one."""
    members = [_counted(mesh, rank, replica) for rank in range(mesh.pp)]
    return tuple(tuple(max(map(time, a, b)) for b in members) for a in members)


def _counted(mesh: Mesh, rank: int, replica: int | None) -> tuple[int, ...]:
    members = mesh.replicas_of(rank)
    return members if replica is None else (members[replica],)
