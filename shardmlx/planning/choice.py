"""Choose how a model is trained on given machines: the fastest way that fits. No MLX, no MPI.

The options of a run leave questions open: ``auto`` and None. ``ways`` answers them in every way
that makes sense, ``assess`` says what a way takes, and ``choose`` takes the fastest that fits.
``decide`` sets tensor shares beside them. ``shardmlx plan``, a run, its dry run, a restart on fewer
machines, and the remedies of an error all ask here, so that they agree.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from shardmlx.common.formatting import gibibytes, plural
from shardmlx.config.common_options import SIMPLEST, SMALLEST
from shardmlx.config.specs import COUNTED, NONE, RECOMPUTE, RunSpec
from shardmlx.errors import UserError
from shardmlx.partitioners import DoesNotFitError, NoOrderFitsError
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import Plan
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.plan_facts import CLOSE, PlanFacts
from shardmlx.planning.facts.workload import Workload
from shardmlx.planning.groups import in_shares
from shardmlx.planning.layout import lay_out
from shardmlx.planning.least_seconds import bounded_alike, least_seconds, set_up_tokens
from shardmlx.planning.memory.limits import PlannedMemory
from shardmlx.planning.time.predict import Prediction, planned_memory, predict, predict_seconds
from shardmlx.planning.ways import complexity, size_of, ways

CLEARLY = 1.1
"""Times as fast that a step must be for other machines, or estimated sums, to be worth it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A way that fits: its plan, and the memory of each world rank."""

    way: RunSpec
    plan: Plan
    memory: tuple[PlannedMemory, ...]

    def costs(self, cluster: Cluster) -> tuple[object, ...]:
        """Return a sort key among ways that are as fast: simple ones first, then those that leave
        most memory free."""
        fullness = max(each.peak / cluster.capacity(i) for i, each in enumerate(self.memory))
        return complexity(self.way), self.way.layout.schedule != SIMPLEST, fullness


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment(Fit):
    """A way that fits, with the seconds of a step for comparison: FLOPs if the speed of the
    machines is unknown."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The chosen way, of ``tried`` ways, to do as ``asked``, by these ``facts``, with a
    ``prediction`` for rows of mean length."""

    asked: RunSpec
    facts: PlanFacts
    assessment: Assessment
    prediction: Prediction
    tried: int
    beside: tuple[Choice, ...] = ()
    """The choices for the same run with other tensor shares, where these were compared."""

    @property
    def run(self) -> RunSpec:
        """The options, with nothing left open."""
        return self.assessment.way

    @property
    def plan(self) -> Plan:
        """The lowered, proved plan of the chosen way."""
        return self.assessment.plan

    @property
    def way(self) -> str:
        """The way in words, as ``plan`` and a run print it."""
        plan = self.plan
        run = self.run
        ranks = plural(plan.mesh.pp, "rank")
        across = run.layout.across
        if across > 1:
            ranks = f"{plural(plan.mesh.pp, 'stage')} of {across} ranks with tensor shares"
        if plan.mesh.dp > 1:
            ranks = f"{plural(plan.mesh.dp, 'replica')} x {ranks}"
        if plan.stage_map.num_stages > plan.mesh.pp:
            ranks += f" with {plan.stage_map.virtual} stages each"
        micro = "1 micro-batch" if plan.microbatches == 1 else f"{plan.microbatches} micro-batches"
        parts = [ranks, plan.schedule, f"{micro} of {plan.micro_batch_rows}"]
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


def assess(way: RunSpec, facts: PlanFacts) -> Assessment:
    """Return a way's time and memory; ``DoesNotFitError`` without room, or ``UserError``."""
    return _timed(fit(way, facts), facts)


def fit(way: RunSpec, facts: PlanFacts) -> Fit:
    """Return a way's plan and memory; raises as ``assess``."""
    plan = lay_out(way, facts)
    cluster = facts.cluster
    memory = _memory(plan, facts.work(way), facts)
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
    return Fit(way=way, plan=plan, memory=memory)


def _timed(fitting: Fit, facts: PlanFacts) -> Assessment:
    plan = fitting.plan
    length = facts.lengths.mean(plan.pack) + set_up_tokens(plan.micro_batch_rows, facts)
    seconds = predict_seconds(plan, facts.work(fitting.way), facts.cluster, length)
    return Assessment(way=fitting.way, plan=plan, memory=fitting.memory, seconds=seconds)


def _memory(plan: Plan, workload: Workload, facts: PlanFacts) -> tuple[PlannedMemory, ...]:
    """Return the memory of each rank, with what those of the first replica hold beside training."""
    memory = planned_memory(plan, workload, facts.cluster, facts.lengths.longest)
    if facts.beside is None:
        return memory
    ranges = plan.stage_map.partition.ranges
    found = []
    for rank, each in enumerate(memory):
        replica, _ = plan.mesh.coordinates(rank)
        beside = sum(facts.nbytes_beside(*ranges[stage]) for stage in plan.stages_of(rank))
        found.append(each if replica else each + PlannedMemory(beside, beside))
    return tuple(found)


Advance = Callable[[int, int], None]
"""Function that gets the number of ways examined, and of all."""


def decide(run: RunSpec, facts: PlanFacts, advance: Advance = lambda done, total: None) -> Choice:
    """Return how a run is trained, by the ``facts`` of single ranks: the one place that all ask.

    Nobody has measured tensor shares and divided weights on Macs. So tensor shares are chosen where
    a step promises to be clearly faster by them, where stages alone do not fit, or where they are
    asked for, and divided weights where no other way fits. Raises as ``choose``.
    """
    asked = run.layout.tensor_parallel
    try:
        alone = choose(*in_shares(run, facts, run.layout.across), advance)
    except DoesNotFitError:
        others = _all_shares(run, facts) if asked is None else ()
        if not others:
            raise
        best = min(others, key=lambda each: each.prediction.step_seconds)
        return replace(best, beside=tuple(each for each in others if each is not best))
    others = with_shares(run, facts) if asked is None else ()
    best = min(others, key=lambda each: each.prediction.step_seconds, default=alone)
    if best.prediction.step_seconds * CLEARLY > alone.prediction.step_seconds:
        return replace(alone, beside=others)
    return replace(best, beside=(alone, *(each for each in others if each is not best)))


def with_shares(run: RunSpec, facts: PlanFacts) -> tuple[Choice, ...]:
    """Return the choices for a run with tensor shares, for each number of ranks that can have some;
    none if the times of messages are unknown, or nothing is trained."""
    return _all_shares(run, facts) if facts.is_timed and run.fine_tune.train else ()


def _all_shares(run: RunSpec, facts: PlanFacts) -> tuple[Choice, ...]:
    """Return the choices for a run with tensor shares that fit, one for each number of ranks."""
    found: list[Choice] = []
    for across in range(2, facts.cluster.size + 1):
        with suppress(UserError):
            found.append(choose(*in_shares(run, facts, across)))
    return tuple(found)


def choose(run: RunSpec, facts: PlanFacts, advance: Advance = lambda done, total: None) -> Choice:
    """Return the simplest of the fastest ways that fit, then the one with most memory free; with as
    many ranks for each layer as the facts are for.

    ``advance`` gets the number of ways examined, and of all. ``DoesNotFitError`` says how far the
    best way fails, another ``UserError`` why none can be divided.
    """
    search = _Search(ways(run, facts), facts)
    for done, (bound, place) in enumerate(search.most_promising_first()):
        advance(done, len(search.ways))
        if bound > search.shortest * (1 + CLOSE):
            break
        search.look(place)
    if not search.found:
        raise search.nearest_failure()
    limit = search.shortest * (1 + CLOSE)
    fast = (each for each in search.found.values() if each.seconds <= limit)
    best = min(fast, key=lambda each: each.costs(facts.cluster))
    best.plan.prove()
    mean = facts.lengths.mean(best.plan.pack)
    return Choice(
        asked=run,
        facts=facts,
        assessment=best,
        prediction=predict(best.plan, facts.work(best.way), facts.cluster, mean),
        tried=len(search.ways),
    )


def fits(run: RunSpec, facts: PlanFacts) -> bool:
    """Return whether a way fits, with the thriftiest answers to its open options."""
    try:
        search = _Search(ways(run, facts), facts)
    except UserError:
        return False
    return any(map(search.has_room, search.tightest))


def _is_last_resort(way: RunSpec) -> bool:
    """Return whether a way is only for where no other fits: what gathers of divided weights take
    has not been measured on any Mac."""
    return way.fine_tune.divides_weights


def _group(way: RunSpec) -> tuple[int | None, bool]:
    return way.layout.pipeline_stages, way.fine_tune.divides_weights


class _Search:
    """The examined ``ways``: those that fit, by their place, and why others do not.

    ``tightest`` is the way of each group that needs the least memory.
    """

    def __init__(self, ways: Sequence[RunSpec], facts: PlanFacts) -> None:
        self.ways, self._facts = ways, facts
        self.found: dict[int, Assessment] = {}
        self.failures: list[UserError] = []
        self.tightest: dict[tuple[int | None, bool], RunSpec] = {}
        self._sizes: dict[tuple[object, ...], list[int]] = {}
        self._fitted: dict[int, Fit | UserError] = {}
        self._fitting: list[RunSpec] = []
        for place, way in enumerate(ways):
            best = self.tightest.setdefault(_group(way), way)
            if _tightness(way) > _tightness(best):
                self.tightest[_group(way)] = way
            self._sizes.setdefault(_but_for_size(way), []).append(place)
        self._too_large = math.inf
        for places in self._sizes.values():
            places.sort(key=self._size)
        self._room = {
            group: False for group, way in self.tightest.items() if self._weights_lack(way) > 0
        }

    @property
    def shortest(self) -> float:
        """Seconds of the fastest way so far."""
        return min((each.seconds for each in self.found.values()), default=math.inf)

    def most_promising_first(self) -> list[tuple[float, int]]:
        """Return (lower bound of a step's seconds, place) of each way, last resorts last."""
        bounds: dict[tuple[object, ...], float] = {}
        so_far: dict[tuple[object, ...], float] = {}
        pairs = []
        for place, way in enumerate(self.ways):
            key = bounded_alike(way, self._facts)
            if key not in bounds:
                bounds[key] = least_seconds(way, self._facts)
            # A way that computes more again is not faster: ways alike stay in their order.
            group = (*_alike(way), _is_last_resort(way))
            so_far[group] = max(so_far.get(group, 0.0), bounds[key])
            pairs.append((so_far[group], place))
        return sorted(pairs, key=lambda pair: (_is_last_resort(self.ways[pair[1]]), *pair))

    def look(self, place: int) -> None:
        """Assess a way, unless a faster one like it already fits, or it is known to have no room:
        its mesh has none, or one with smaller micro-batches."""
        way = self.ways[place]
        if self._is_in_vain(way) or not self._room.get(_group(way), True):
            return
        of_sizes = self._sizes[_but_for_size(way)]
        if self._too_large <= self._size(place) < math.inf and self.has_room(_group(way)):
            self._leave_out_too_large(of_sizes)
        if place not in of_sizes:
            return
        found = self._result(place)
        if isinstance(found, Fit):
            self.found[place] = _timed(found, self._facts)
        elif isinstance(found, DoesNotFitError) and self.has_room(_group(way)):
            self._leave_out_too_large(of_sizes)

    def _leave_out_too_large(self, of_sizes: list[int]) -> None:
        """Take the ways that lack memory out of ways that differ in size alone, the smallest first.

        Others mostly lack it from the size on that was too large for those before.
        """
        low, high = 0, len(of_sizes)
        expected = bisect_left(of_sizes, self._too_large, key=self._size)
        for guess in (expected, expected - 1):
            if low <= guess < high:
                if self._lacks_memory(of_sizes[guess]):
                    high = guess
                else:
                    low = guess + 1
        first = bisect_left(of_sizes, True, low, high, key=self._lacks_memory)
        if first < len(of_sizes):
            self._too_large = self._size(of_sizes[first])
        del of_sizes[first:]

    def _size(self, place: int) -> float:
        return size_of(self.ways[place]) or math.inf

    def has_room(self, group: tuple[int | None, bool]) -> bool:
        """Return whether the tightest way of a group fits."""
        if group not in self._room:
            tightest = self._result(self.ways.index(self.tightest[group]))
            self._room[group] = isinstance(tightest, Fit)
        return self._room[group]

    def _lacks_memory(self, place: int) -> bool:
        """Return whether a way lacks memory. One has enough if one like it that holds more has."""
        if place not in self._fitted and _holds_less(self.ways[place], self._fitting):
            return False
        return isinstance(self._result(place), DoesNotFitError)

    def _result(self, place: int) -> Fit | UserError:
        """Return how a way fits, or why it does not."""
        if place not in self._fitted:
            try:
                self._fitted[place] = fit(self.ways[place], self._facts)
                self._fitting.append(self.ways[place])
            except UserError as error:
                self._fitted[place] = error
                self.failures.append(error)
        return self._fitted[place]

    def nearest_failure(self) -> UserError:
        """Return the error of the way that lacks least."""
        if not self.failures:
            self._result(self.ways.index(min(self.tightest.values(), key=self._weights_lack)))
        known = [
            error.nearest() if isinstance(error, NoOrderFitsError) else error
            for error in self.failures
        ]
        return min(known, key=lambda error: getattr(error, "shortage", math.inf))

    def _weights_lack(self, way: RunSpec) -> float:
        """Return the bytes that machines lack for the weights alone; 0 or less with room."""
        cluster = self._facts.cluster
        mesh = Mesh.for_world(cluster.size, way.layout.pipeline_stages or 1)
        rooms = [min(map(cluster.capacity, mesh.replicas_of(rank))) for rank in range(mesh.pp)]
        sizes = self._facts.workload.weight_sizes
        copies = mesh.dp if way.fine_tune.divides_weights else 1
        return sizes.total(0, len(sizes.layers)) - copies * sum(rooms)

    def _is_in_vain(self, way: RunSpec) -> bool:
        """Skip slower low-memory variants once a faster variant fits."""
        fitting = [each.way for each in self.found.values()]
        if _is_last_resort(way) and not all(map(_is_last_resort, fitting)):
            return True
        return _holds_less(way, fitting)


def _tightness(way: RunSpec) -> tuple[int, int, bool, bool]:
    again, _, is_by_memory = _thrift(way)
    return again, -(size_of(way) or 1), way.layout.schedule == SIMPLEST, is_by_memory


def _but_for_size(way: RunSpec) -> tuple[object, ...]:
    """Return all answers of a way but for the size of its micro-batches."""
    layout = way.layout
    batch = way.batch
    return (
        *(layout.pipeline_stages, layout.schedule, layout.partitioner, way.fine_tune.zero),
        *(batch.pack, batch.recompute, batch.loss_chunk),
    )


def _alike(way: RunSpec) -> tuple[object, ...]:
    """Return the common part of ways among which those that hold more are faster."""
    layout = way.layout
    batch = way.batch
    return (
        *(layout.pipeline_stages, layout.schedule),
        *(batch.pack, size_of(way), batch.loss_chunk),
    )


def _holds_less(way: RunSpec, others: Iterable[RunSpec]) -> bool:
    """Return whether one of the others is like a way, and holds as much or more."""
    return any(
        all(theirs <= ours for theirs, ours in zip(_thrift(other), _thrift(way), strict=True))
        for other in others
        if _alike(other) == _alike(way)
    )


def _thrift(way: RunSpec) -> tuple[int, bool, bool]:
    """Return a way's costs of holding less: recomputing, gathering, division by memory."""
    again = RECOMPUTE.index(way.batch.recomputed)
    return again, way.fine_tune.divides_weights, way.layout.partitioner == SMALLEST
