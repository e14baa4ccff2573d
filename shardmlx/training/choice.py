"""Choose what the options leave open: the fastest way to train of which every rank has room.

No MLX, no MPI.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from shardmlx.config.common_options import AUTO, FASTEST, SIMPLEST, SMALLEST
from shardmlx.config.specs import COUNTED, DIVIDED_WEIGHTS, NONE, RECOMPUTE, BatchOptions, RunSpec
from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.memory_limits import MemoryBudget, overfull
from shardmlx.costmodel.predict import predict
from shardmlx.costmodel.timing import TYPICAL_LENGTH
from shardmlx.costmodel.workload import Workload
from shardmlx.engine.batches import Sample, padded_width
from shardmlx.errors import UserError
from shardmlx.pipeline.plan import Plan, suits
from shardmlx.pipeline.schedules import SCHEDULES, get_schedule
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.layout import divide_batch, make_mesh, make_stage_map, usual_size
from shardmlx.planning.partition_problem import trainable_stages
from shardmlx.planning.replica_rows import with_replica_rows
from shardmlx.training.predicted import planned_memory

SET_UP_TOKENS = 24
"""Tokens that are computed while a micro-batch is set up, whatever its size: weights are read, and
each operation is started. Counted on an x86 core in float32; by its data sheet an M1 Pro reads
16-bit weights while it computes 26 tokens, an M4 Max 31."""

WORTH_IT = 0.99
"""Seconds of a step, beside those of a simpler way, from which another one is not worth it."""


@dataclass(frozen=True, slots=True)
class SequenceLengths:
    """The lengths of a run's sequences, in tokens of their inputs.

    ``longest`` are those of a step, and of sequences that only pass forward; ``padded`` and
    ``exact`` the means of a row as it is computed, and without its padding; ``counted`` the share
    of the latter that counts in the loss.
    """

    longest: tuple[int, int]
    padded: int
    exact: int
    counted: float = 1.0

    @property
    def are_alike(self) -> bool:
        """True if rows are never padded, and packing has nothing to gain."""
        return self.exact >= WORTH_IT * self.longest[0]

    def counted_share(self, pack: bool) -> float:
        """Return the share of the computed positions at which a token counts."""
        return self.counted if pack else self.counted * self.exact / self.padded


def mean_lengths(
    samples: Sequence[Sample], batch_size: int, max_seq_length: int
) -> tuple[int, int, float]:
    """Return the mean lengths of rows, padded as a micro-batch of one row is, and as they are, and
    the share of the latter that counts in the loss."""
    bounds = np.array([(max(2, len(tokens)), max(1, start)) for tokens, start in samples])
    bounds = bounds[: max(1, len(bounds) // batch_size) * batch_size]
    lengths, starts = bounds.T
    padded, exact = (
        np.minimum(each, max_seq_length) - 1 for each in (padded_width(lengths), lengths)
    )
    counted = np.maximum(exact + 1 - starts, 0)
    means = round(float(padded.mean())), round(float(exact.mean()))
    return *means, float(counted.sum() / exact.sum())


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to train: options that leave nothing open, and its predicted step beside that of the
    first way, which is the simplest. ``lacking`` says why the first does not fit, if so."""

    run: RunSpec
    plan: Plan
    relative_seconds: float
    lacking: str | None

    def __str__(self) -> str:
        parts = [
            self.plan.schedule,
            "packed" if self.plan.pack else "not packed",
            f"micro-batches of {self.plan.micro_batch_size}",
        ]
        if self.run.batch.loss_chunk == COUNTED:
            parts.append("logits only where a token counts")
        if self.run.batch.recompute not in (None, NONE):
            parts.append(f"--recompute {self.run.batch.recompute}")
        if self.plan.mesh.dp > 1 and self.run.fine_tune.divides_weights:
            parts.append("weights divided among replicas (--zero 3)")
        if self.run.layout.partitioner == SMALLEST:
            sizes = " + ".join(map(str, self.plan.stage_map.partition.sizes))
            parts.append(f"layers divided by memory, {sizes}")
        worth = "as the simplest way"
        if self.lacking is not None:
            worth = f"the simplest way does not fit: {self.lacking}"
        elif self.relative_seconds < 1:
            worth = (
                f"predicted {1 / self.relative_seconds:.2f} times as fast as {SIMPLEST} unpacked"
            )
        return f"chosen: {', '.join(parts)}: {worth}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """Facts on which a choice depends beside the options: the model, the machines, the data.

    ``given`` is the user's stage map, if there is one; ``can_pack`` says whether packed rows have
    the same loss.
    """

    sizes: Workload
    given: StageMap | None
    cluster: Cluster
    budgets: tuple[MemoryBudget, ...]
    lengths: SequenceLengths
    can_pack: bool


def choose(run: RunSpec, facts: Circumstances) -> Choice | None:
    """Return the fastest way that fits, None where none does.

    Of ways that are predicted to take about the same time, the simplest wins. Micro-batches of one
    row are the last resort where more are usual.
    """
    found = _fastest(run, facts)
    if found is None and run.batch.micro_batch_size is None:
        found = _fastest(replace(run, batch=replace(run.batch, micro_batch_size=1)), facts)
    return found


def _fastest(run: RunSpec, facts: Circumstances) -> Choice | None:
    cluster, lengths = facts.cluster, facts.lengths
    chosen: tuple[float, RunSpec, Plan] | None = None
    first: float | None = None
    lacking: str | None = None
    fitting: dict[tuple[object, ...], int] = {}
    for way in _ways(run, facts):
        # What needs less memory is slower: in vain where the faster way fits.
        batch, tune = way.batch, way.fine_tune
        alike = way.layout.schedule, batch.pack, batch.micro_batch_size, batch.loss_chunk
        if alike in fitting and not tune.divides_weights:
            continue
        if tune.divides_weights and tune != run.fine_tune:
            is_known = chosen is None or cluster.knows_messages
            if not is_known or fitting.get(alike, math.inf) <= RECOMPUTE.index(batch.recomputed):
                continue
        share = lengths.counted_share(bool(batch.pack))
        workload = replace(facts.sizes, batch=batch, fine_tune=tune, counted=share)
        recompute = batch.recomputed
        length = lengths.exact if batch.pack else lengths.padded
        try:
            # Memory is planned for the sequences that there are.
            longest = replace(batch, max_seq_length=lengths.longest[0])
            plan = lay_out(way, replace(workload, batch=longest), facts.given, cluster)
            if cluster.profile is None:
                length += -(-SET_UP_TOKENS // plan.micro_batch_size)
            seconds = predict(plan, workload, cluster, length, recompute=recompute).step_seconds
            planned = planned_memory(plan, workload, cluster, lengths.longest, recompute)
        except UserError:
            continue  # a schedule for more layers than there are, or no room for any division
        fault = overfull(facts.budgets, planned)
        if first is None:
            first, lacking = seconds, fault
        if fault is None:
            fitting[alike] = RECOMPUTE.index(recompute)
            if chosen is None or seconds < WORTH_IT * chosen[0]:
                chosen = seconds, way, plan
    if chosen is None or first is None:
        return None
    seconds, way, plan = chosen
    return Choice(way, plan, seconds / first, lacking)


def _ways(run: RunSpec, facts: Circumstances) -> Iterator[RunSpec]:
    """Yield all that the options leave open, from the simplest on."""
    layout, batch, given, cluster = run.layout, run.batch, facts.given, facts.cluster
    pp = given.pp if given is not None else layout.pipeline_stages or cluster.size
    divided = given is None and pp > 1
    packs = (False, True) if facts.can_pack and not facts.lengths.are_alike else (False,)
    tunes = [run.fine_tune]
    if run.fine_tune.train and run.fine_tune.zero is None and cluster.size > pp:
        tunes.append(replace(run.fine_tune, zero=DIVIDED_WEIGHTS))
    for tune, loss_chunk, recompute, partitioner, pack, schedule in product(
        tunes,
        (AUTO, COUNTED) if batch.loss_chunk == AUTO else (batch.loss_chunk,),
        RECOMPUTE if batch.recompute is None else (batch.recompute,),
        ((FASTEST, SMALLEST) if divided else (FASTEST,))
        if layout.partitioner == AUTO
        else (layout.partitioner,),
        packs if batch.pack is None else (batch.pack,),
        _schedules(given, cluster, pp) if layout.schedule == AUTO else (layout.schedule,),
    ):
        if loss_chunk != batch.loss_chunk and facts.lengths.counted_share(pack) == 1:
            continue
        way = replace(
            run,
            fine_tune=tune,
            layout=replace(layout, partitioner=partitioner, schedule=schedule),
            batch=replace(batch, loss_chunk=loss_chunk, recompute=recompute, pack=pack),
        )
        yield way
        # Without packing a larger one may be padded, by how much is not known here.
        is_known = pack or facts.lengths.are_alike
        for size in _larger_sizes(batch, cluster.size, pp) if is_known else ():
            yield replace(way, batch=replace(way.batch, micro_batch_size=size))


def _larger_sizes(batch: BatchOptions, ranks: int, pp: int) -> Iterator[int]:
    """Yield sizes of micro-batches above the usual one that leave each of ``pp`` ranks one."""
    dp = max(1, ranks // pp)
    if batch.micro_batch_size is not None or pp == 1 or batch.batch_size % dp:
        return
    rows = batch.batch_size // dp
    size = 2 * usual_size(rows, pp)
    while rows % size == 0 and rows // size >= pp:
        yield size
        size *= 2


def _schedules(given: StageMap | None, cluster: Cluster, pp: int) -> list[str]:
    """Return the schedules between which a prediction can decide, from the simplest on."""
    if pp == 1:
        return [SIMPLEST]
    names = [SIMPLEST, *(name for name in SCHEDULES if name not in (SIMPLEST, "gpipe"))]
    if given is not None:
        return [name for name in names if suits(given, get_schedule(name))] or [SIMPLEST]
    if not cluster.knows_messages:
        return [SIMPLEST]  # the one with the fewest messages, where they cost who knows what
    return names


def lay_out(run: RunSpec, workload: Workload, given: StageMap | None, cluster: Cluster) -> Plan:
    """Return the plan of a run that leaves nothing open; ``given`` is the user's stage map.

    Raises ``UserError`` where it cannot be laid out so.
    """
    stage_map = make_stage_map(run.model, run.layout, given, workload, cluster)
    mesh = make_mesh(stage_map, cluster.size, [machine.host for machine in cluster.machines])
    rows, micro_batch_size = divide_batch(run.batch, mesh)
    plan = Plan(
        mesh=mesh,
        stage_map=stage_map,
        schedule=run.layout.schedule,
        rows=rows,
        micro_batch_size=micro_batch_size,
        trainable=trainable_stages(workload, stage_map),
        pack=bool(run.batch.pack),
    )
    length = min(workload.batch.max_seq_length, TYPICAL_LENGTH)
    return with_replica_rows(plan, workload, cluster, length)
