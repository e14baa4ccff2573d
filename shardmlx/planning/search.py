"""Choose how a model is trained on given machines: the fastest plan that fits.

No MLX, no MPI.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shardmlx.common.formatting import gibibytes
from shardmlx.config.common_options import AUTO
from shardmlx.config.specs import RECOMPUTE
from shardmlx.costmodel.cluster import Cluster, pipeline_seconds
from shardmlx.costmodel.predict import Prediction, RankPrediction, predict
from shardmlx.costmodel.workload import Workload
from shardmlx.errors import UserError
from shardmlx.partitioners import DoesNotFitError, Problem, get_partitioner
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import suits
from shardmlx.pipeline.schedules import SCHEDULES, get_schedule
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.partition_problem import Candidate, make_problem, plan_of
from shardmlx.planning.replica_rows import with_replica_rows

CLOSE = 0.01
"""Relative difference of steps below which the plan with less memory is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Choices that the user has settled; None leaves one to the planner."""

    batch_size: int
    length: int
    data_parallel: int | None = None
    schedule: str | None = None
    virtual: int | None = None
    micro_batch_size: int | None = None
    recompute: str | None = None
    partitioner: str | None = None
    stage_map: StageMap | None = None
    replica_rows: str | None = None
    divides_weights: bool | None = None

    def divides_among(self, replicas: int) -> bool:
        """Tell whether the batch can be divided among so many."""
        if self.replica_rows is None or replicas == 1:
            return not self.batch_size % replicas
        if self.replica_rows == AUTO:
            return self.batch_size >= replicas
        return self.replica_rows.count(",") + 1 == replicas

    def __post_init__(self) -> None:
        for what, value in (("batch size", self.batch_size), ("sequence length", self.length)):
            if value < 1:
                raise UserError(f"a {what} of {value}", "give 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPlan:
    """A chosen plan, and the fastest without limits of memory, None if it is no faster."""

    candidate: Candidate
    prediction: Prediction
    tried: int
    unlimited: Prediction | None


class TooManyMachinesError(UserError):
    """Error: more machines, or stages, than layers."""


def candidates(limits: Limits, ranks: int, num_layers: int) -> list[Candidate]:
    """Return all ways that the limits leave open; ``UserError`` when they leave none."""
    if limits.data_parallel is not None and limits.data_parallel < 1:
        raise UserError(f"--data-parallel {limits.data_parallel}", "give 1 or more")
    if limits.data_parallel is not None and ranks % limits.data_parallel:
        raise UserError(
            f"--data-parallel {limits.data_parallel} does not divide {ranks} ranks",
            f"use one of {', '.join(map(str, _divisors(ranks)))}",
        )
    replicas = _divisors(ranks) if limits.data_parallel is None else [limits.data_parallel]
    fitting = [dp for dp in replicas if limits.divides_among(dp)]
    if not fitting:
        raise UserError(
            f"--batch-size {limits.batch_size} cannot be divided among {replicas[0]} replicas",
            f"use a multiple of {replicas[0]}",
        )
    found = [each for dp in fitting for each in _of_mesh(limits, Mesh(dp, ranks // dp))]
    if limits.stage_map is not None and not found:
        raise UserError(
            f"{limits.stage_map} suits no schedule"
            + (f" {limits.schedule}" if limits.schedule else "")
            + f" on {ranks} ranks: number its ranks as the schedule does, or leave the map out"
        )
    possible = [each for each in found if len(each.placement) <= num_layers]
    if not possible:
        stages = f"{ranks} machines"
        if found and min(len(each.placement) for each in found) > ranks:
            stages = f"{min(len(each.placement) for each in found)} stages"
        raise TooManyMachinesError(
            f"{stages}, but the model has {num_layers} layers",
            f"use at most {num_layers}, or replicas: --data-parallel",
        )
    return possible


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if not number % each]


def _of_mesh(limits: Limits, mesh: Mesh) -> Iterator[Candidate]:
    rows = -(-limits.batch_size // mesh.dp)
    if limits.micro_batch_size is not None:
        sizes = [min(rows, limits.micro_batch_size)]
    else:
        sizes = _powers_of_two(rows)
    if limits.stage_map is not None and limits.stage_map.pp != mesh.pp:
        return
    # 1F1B takes as long as GPipe, and never more memory.
    chosen = [name for name in SCHEDULES if name != "gpipe"]
    names = chosen if limits.schedule is None else [limits.schedule]
    for name in names:
        schedule = get_schedule(name)
        if mesh.pp == 1 and limits.schedule is None and name != "1f1b":
            continue  # one rank has nothing to order
        virtual = limits.virtual or schedule.default_virtual
        if limits.stage_map is not None:
            virtual = limits.stage_map.virtual
            if not suits(limits.stage_map, schedule):
                continue
        for size in sizes:
            try:
                schedule.check(mesh.pp, -(-rows // size), virtual)
            except UserError:
                if limits.schedule is not None and limits.micro_batch_size is not None:
                    raise
                continue
            for recompute in RECOMPUTE if limits.recompute is None else (limits.recompute,):
                way = Candidate(mesh, name, virtual, rows, size, recompute)
                if not limits.divides_weights or mesh.dp == 1:
                    yield way
                if limits.divides_weights is not False and mesh.dp > 1:
                    yield replace(way, divides_weights=True)


def _powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4 ... and the limit itself."""
    return sorted({limit, *(2**k for k in range(limit.bit_length()) if 2**k <= limit)})


def choose(
    workload: Workload,
    cluster: Cluster,
    limits: Limits,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> ChosenPlan:
    """Return the plan with the shortest predicted step among those that fit.

    ``advance`` is told how many plans of how many were looked at. ``DoesNotFitError`` says by how
    much the best of them fails, another ``UserError`` what keeps all of them from being divided.
    """
    choice = fastest(workload, cluster, limits, advance)
    if all(math.isinf(cluster.capacity(rank)) for rank in range(cluster.size)):
        return choice
    roomy = replace(
        cluster,
        machines=tuple(replace(each, memory=None, wired=None) for each in cluster.machines),
    )
    try:
        unlimited = fastest(workload, roomy, limits, advance).prediction
    except UserError:
        return choice  # the partitioner goes by memory
    is_slower = choice.prediction.step_seconds > unlimited.step_seconds * (1 + CLOSE)
    return replace(choice, unlimited=unlimited if is_slower else None)


def fastest(
    workload: Workload,
    cluster: Cluster,
    limits: Limits,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> ChosenPlan:
    """Return the plan that ``choose`` returns, without a look at what more memory would bring."""
    if limits.divides_weights is None and not cluster.knows_messages:
        # Nobody knows what gathering takes: only where nothing else fits.
        try:
            return fastest(workload, cluster, replace(limits, divides_weights=False), advance)
        except DoesNotFitError:
            limits = replace(limits, divides_weights=True)
    ways = candidates(limits, cluster.size, workload.shape.num_layers)
    found: list[tuple[Candidate, Prediction]] = []
    failures: list[UserError] = []
    fitting: set[Candidate] = set()
    shortest = math.inf
    # The most promising first: what cannot be faster than the best so far is not worked out.
    bounds = sorted(((_least(way, workload, cluster, limits), way) for way in ways), key=_first)
    for done, (least, way) in enumerate(bounds):
        advance(done, len(bounds))
        if least > shortest * (1 + CLOSE):
            break
        if way.divides_weights and replace(way, divides_weights=False) in fitting:
            continue  # it takes longer
        try:
            prediction = predict_candidate(way, workload, cluster, limits)
        except UserError as error:
            failures.append(error)
            continue
        found.append((way, prediction))
        fitting.add(way)
        shortest = min(shortest, prediction.step_seconds)
    if not found:
        raise min(failures, key=_shortage)
    close = [each for each in found if each[1].step_seconds <= shortest * (1 + CLOSE)]
    # As little as possible is computed, or sent, again; what that costs is predicted roughly.
    candidate, prediction = min(
        close,
        key=lambda each: (
            RECOMPUTE.index(each[0].recompute),
            each[0].divides_weights,
            _fullness(each[1]),
        ),
    )
    return ChosenPlan(candidate=candidate, prediction=prediction, tried=len(bounds), unlimited=None)


def _shortage(error: UserError) -> float:
    """Return the bytes that are lacking, as a sort key; other faults come last."""
    return error.shortage if isinstance(error, DoesNotFitError) else math.inf


def _first(pair: tuple[float, Candidate]) -> float:
    return pair[0]


def _least(way: Candidate, workload: Workload, cluster: Cluster, limits: Limits) -> float:
    """Return the seconds that no such step beats: all machines are busy all the time."""
    models = pipeline_seconds(
        workload,
        cluster,
        way.mesh,
        way.micro_batch_size,
        limits.length,
        recompute=way.recompute,
    )
    wholes = [model.stage(0, len(model.layers)).microbatch for model in models]
    return way.microbatches / sum(1 / whole for whole in wholes)


def _fullness(prediction: Prediction) -> tuple[float, float]:
    """Return how full the fullest machine is, and how much the largest holds, as a sort key."""
    shares = max(each.peak / each.capacity for each in prediction.ranks)
    return shares, max(each.peak for each in prediction.ranks)


def predict_candidate(
    way: Candidate, workload: Workload, cluster: Cluster, limits: Limits
) -> Prediction:
    """Divide the layers for one way of training, and predict it.

    ``DoesNotFitError`` when no division fits, or the user's does not.
    """
    workload = way.of(workload)
    problem = make_problem(way, workload, cluster, limits.length)
    stage_map = limits.stage_map or _divide(problem, limits.partitioner)
    prediction = _predict(way, stage_map, workload, cluster, limits)
    if all(rank.fits for rank in prediction.ranks):
        return prediction
    if problem.pp < problem.num_stages and limits.partitioner is None and not limits.stage_map:
        # balanced knows nothing of memory.
        prediction = _predict(way, get_partitioner("memory")(problem), workload, cluster, limits)
    for rank, each in enumerate(prediction.ranks):
        if not each.fits:
            raise _does_not_fit(problem.name_of(rank), rank, each)
    return prediction


def _predict(
    way: Candidate, stage_map: StageMap, workload: Workload, cluster: Cluster, limits: Limits
) -> Prediction:
    plan = with_replica_rows(plan_of(way, stage_map, workload), workload, cluster, limits.length)
    return predict(plan, workload, cluster, limits.length, recompute=way.recompute)


def _does_not_fit(name: str, number: int, rank: RankPrediction) -> DoesNotFitError:
    shortage = rank.peak - rank.capacity
    return DoesNotFitError(
        f"the model does not fit: {name} would hold {gibibytes(rank.peak)} of its "
        f"{gibibytes(rank.capacity)}, {gibibytes(shortage)} too much",
        number,
        shortage,
        "divide the layers otherwise, or use more machines",
    )


def _divide(problem: Problem, partitioner: str | None) -> StageMap:
    """Divide by the user's partitioner, or by the one that knows most."""
    if partitioner is not None:
        return get_partitioner(partitioner)(problem)
    return get_partitioner("hetero" if problem.pp == problem.num_stages else "balanced")(problem)
