"""Choose how a model is trained on given machines: the fastest way that fits. No MLX, no MPI.

The options of a run leave questions open: ``auto`` and None. ``ways`` answers them in every way
that makes sense, ``assess`` says what a way takes, and ``choose`` takes the fastest that fits.
``shardmlx plan``, a run, its dry run, a restart on fewer machines, and the remedies of an error
all ask here, so that they agree.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from shardmlx.common.formatting import gibibytes, plural
from shardmlx.config.common_options import SIMPLEST, SMALLEST
from shardmlx.config.specs import COUNTED, NONE, RECOMPUTE, RunSpec
from shardmlx.costmodel.cluster import pipeline_seconds
from shardmlx.costmodel.memory_limits import PlannedMemory
from shardmlx.costmodel.predict import Prediction, planned_memory, predict
from shardmlx.costmodel.workload import Workload
from shardmlx.errors import UserError
from shardmlx.partitioners import DoesNotFitError
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import Plan
from shardmlx.planning.facts import CLOSE, Facts
from shardmlx.planning.layout import divide_batch, lay_out
from shardmlx.planning.ways import complexity, ways

SET_UP_TOKENS = 24
"""Tokens that could be computed while a micro-batch is set up, at any size: weights are read, and
each operation is started. Counted on an x86 core in float32; going by its data sheet an M1 Pro
reads 16-bit weights while it computes 26 tokens, an M4 Max 31."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """A way that fits: its plan, the seconds of a step for comparison (FLOPs if the speed of the
    machines is unknown), and the memory of each world rank."""

    way: RunSpec
    plan: Plan
    seconds: float
    memory: tuple[PlannedMemory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The chosen way, of ``tried`` ways, to do as ``asked``, by these ``facts``, with a
    ``prediction`` for rows of mean length."""

    asked: RunSpec
    facts: Facts
    assessment: Assessment
    prediction: Prediction
    tried: int

    @property
    def run(self) -> RunSpec:
        """The options, with nothing left open."""
        return self.assessment.way

    @property
    def plan(self) -> Plan:
        return self.assessment.plan

    @property
    def way(self) -> str:
        """The way in words, as ``plan`` and a run print it."""
        plan, run = self.plan, self.run
        ranks, across = plural(plan.mesh.pp, "rank"), run.layout.tensor_parallel
        if across > 1:
            ranks = f"{plural(plan.mesh.pp, 'stage')} of {across} ranks with tensor shares"
        if plan.mesh.dp > 1:
            ranks = f"{plural(plan.mesh.dp, 'replica')} x {ranks}"
        if plan.stage_map.num_stages > plan.mesh.pp:
            ranks += f" with {plan.stage_map.virtual} stages each"
        micro = "1 micro-batch" if plan.microbatches == 1 else f"{plan.microbatches} micro-batches"
        parts = [ranks, plan.schedule, f"{micro} of {plan.micro_batch_size}"]
        if plan.pack:
            parts.append("packed")
        if run.batch.loss_chunk == COUNTED:
            parts.append("logits only where a token counts")
        if plan.replica_rows:
            parts.append(f"rows {' + '.join(map(str, plan.replica_rows))}")
        if run.batch.recomputed != NONE:
            parts.append(f"--recompute {run.batch.recomputed}")
        if plan.mesh.dp > 1 and run.fine_tune.divides_weights:
            parts.append("weights divided among replicas (--zero 3)")
        return ", ".join(parts)

    def __str__(self) -> str:
        return f"chosen: {self.way}"


def assess(way: RunSpec, facts: Facts) -> Assessment:
    """Return a way's time and memory; ``DoesNotFitError`` without room, or ``UserError``."""
    plan, workload, cluster = lay_out(way, facts), facts.work(way), facts.cluster
    memory = planned_memory(plan, workload, cluster, facts.lengths.longest)
    for rank, each in enumerate(memory):
        too_much = each.peak - cluster.capacity(rank)
        if too_much > 0:
            raise DoesNotFitError(
                f"the model does not fit: rank {rank} ({cluster.machines[rank].host}) would hold "
                f"{gibibytes(each.peak)} of its {gibibytes(cluster.capacity(rank))}, "
                f"{gibibytes(too_much)} too much",
                rank,
                too_much,
                "divide the layers otherwise, or use more machines",
            )
    set_up = _set_up(plan.micro_batch_size, facts)
    seconds = _predicted(plan, workload, facts, set_up).step_seconds
    return Assessment(way=way, plan=plan, seconds=seconds, memory=memory)


def _predicted(plan: Plan, workload: Workload, facts: Facts, set_up: int = 0) -> Prediction:
    length = facts.lengths.mean(plan.pack) + set_up
    return predict(plan, workload, facts.cluster, length)


def _set_up(rows: int, facts: Facts) -> int:
    """Return the tokens a row that set-up of ``rows`` costs; measured times have it in them."""
    return 0 if facts.cluster.profile is not None else -(-SET_UP_TOKENS // rows)


def choose(
    run: RunSpec, facts: Facts, advance: Callable[[int, int], None] = lambda done, total: None
) -> Choice:
    """Return the simplest of the fastest ways that fit, then the one with most memory free.

    ``advance`` gets the number of ways examined, and of all. ``DoesNotFitError`` says how far the
    best way fails, another ``UserError`` why none can be divided.
    """
    every = ways(run, facts)
    tightest = _tightest(every)
    room: dict[tuple[int | None, bool], bool] = {}
    found: list[Assessment] = []
    failures: list[UserError] = []
    shortest = math.inf

    def assessed(way: RunSpec) -> Assessment | None:
        try:
            return assess(way, facts)
        except UserError as error:
            failures.append(error)
            return None

    for done, (is_last_resort, bound, way) in enumerate(_most_promising_first(every, facts)):
        advance(done, len(every))
        if bound > shortest * (1 + CLOSE) or (
            is_last_resort and not all(_is_last_resort(each.way, facts) for each in found)
        ):
            break
        if any(
            _alike(each.way) == _alike(way)
            and all(map(operator.le, _thrift(each.way), _thrift(way)))
            for each in found
        ):
            continue  # it would be slower
        group = _group(way)
        if group not in room:
            room[group] = assessed(tightest[group]) is not None
        if room[group] and (each := assessed(way)) is not None:
            found.append(each)
            shortest = min(shortest, each.seconds)
    if not found:
        raise min(failures, key=lambda error: getattr(error, "shortage", math.inf))
    limit = shortest * (1 + CLOSE)

    def preference(each: Assessment) -> tuple[object, ...]:
        fullness = max(of.peak / facts.cluster.capacity(i) for i, of in enumerate(each.memory))
        return complexity(each.way), each.way.layout.schedule != SIMPLEST, fullness

    best = min((each for each in found if each.seconds <= limit), key=preference)
    return Choice(
        asked=run,
        facts=facts,
        assessment=best,
        prediction=_predicted(best.plan, facts.work(best.way), facts),
        tried=len(every),
    )


def fits(run: RunSpec, facts: Facts) -> bool:
    """Return whether a way fits, with the thriftiest answers to its open options."""
    try:
        tightest = _tightest(ways(run, facts))
    except UserError:
        return False
    for way in tightest.values():
        with suppress(UserError):
            assess(way, facts)
            return True
    return False


def _group(way: RunSpec) -> tuple[int | None, bool]:
    return way.layout.pipeline_stages, way.fine_tune.divides_weights


def _tightest(every: Sequence[RunSpec]) -> dict[tuple[int | None, bool], RunSpec]:
    """Return the way of each group that needs the least memory."""
    found: dict[tuple[int | None, bool], RunSpec] = {}
    for way in every:
        best = found.setdefault(_group(way), way)
        if _tightness(way) > _tightness(best):
            found[_group(way)] = way
    return found


def _tightness(way: RunSpec) -> tuple[int, int, bool, bool]:
    again, _, is_by_memory = _thrift(way)
    return again, -(way.batch.micro_batch_size or 1), way.layout.schedule == SIMPLEST, is_by_memory


def _thrift(way: RunSpec) -> tuple[int, bool, bool]:
    """Return a way's costs of holding less: recomputing, gathering, division by memory."""
    again = RECOMPUTE.index(way.batch.recomputed)
    return again, way.fine_tune.divides_weights, way.layout.partitioner == SMALLEST


def _alike(way: RunSpec) -> tuple[object, ...]:
    """Return the common part of ways among which those that hold more are faster."""
    layout, batch = way.layout, way.batch
    of_layout = layout.pipeline_stages, layout.schedule
    return *of_layout, batch.pack, batch.micro_batch_size, batch.loss_chunk


def _is_last_resort(way: RunSpec, facts: Facts) -> bool:
    return way.fine_tune.divides_weights and not facts.cluster.knows_messages


def _most_promising_first(
    every: Sequence[RunSpec], facts: Facts
) -> list[tuple[bool, float, RunSpec]]:
    """Return (is a last resort, least seconds of a step, way) of each way, in this order."""
    least: dict[tuple[object, ...], float] = {}
    found = []
    for way in every:
        key = *_alike(way), way.batch.recompute
        if key not in least:
            least[key] = _least_seconds(way, facts)
        found.append((_is_last_resort(way, facts), least[key], way))
    return sorted(found, key=lambda each: each[:2])


def _least_seconds(way: RunSpec, facts: Facts) -> float:
    """Return the seconds of a step in which all machines are always busy."""
    batch = way.batch
    mesh = Mesh.for_world(facts.cluster.size, way.layout.pipeline_stages or 1)
    rows, size = divide_batch(batch, mesh)
    length = facts.lengths.mean(batch.pack) + _set_up(size, facts)
    models = pipeline_seconds(facts.work(way), facts.cluster, mesh, size, length)
    wholes = [model.stage(0, len(model.layers)).microbatch for model in models]
    return rows / size / sum(1 / whole for whole in wholes)
