"""Chooses how a model is trained on given machines: the fastest plan that fits. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shardmlx.cluster import Cluster
from shardmlx.errors import UserError
from shardmlx.mesh import Mesh
from shardmlx.partitioners import Problem, get_partitioner
from shardmlx.partitioners.memory import evenly_full, fullest, gib
from shardmlx.predict import Prediction, predict
from shardmlx.problems import Candidate, make_problem, plan_of, rank_costs
from shardmlx.run_plan import suits
from shardmlx.schedules import SCHEDULES, get_schedule
from shardmlx.stage_map import StageMap
from shardmlx.workload import Workload

CLOSE = 0.01
"""Plans whose steps differ by less are as fast: then the one with less memory is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the user has settled; None leaves it to the planner.

    ``checkpoint`` False: only where that makes the step faster, for the memory that it frees.
    """

    batch_size: int
    length: int
    data_parallel: int | None = None
    schedule: str | None = None
    virtual: int | None = None
    micro_batch_size: int | None = None
    checkpoint: bool = False
    partitioner: str | None = None
    stage_map: StageMap | None = None

    def __post_init__(self) -> None:
        for what, value in (("batch size", self.batch_size), ("sequence length", self.length)):
            if value < 1:
                raise UserError(f"a {what} of {value}: give 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The chosen plan, and what it would be without limits of memory (None: the same)."""

    candidate: Candidate
    prediction: Prediction
    tried: int
    unlimited: Prediction | None


class DoesNotFitError(UserError):
    """No plan fits; ``shortage`` is the bytes that are lacking where it is nearest."""

    def __init__(self, message: str, shortage: float) -> None:
        super().__init__(message)
        self.shortage = shortage


def candidates(limits: Limits, ranks: int, num_layers: int) -> list[Candidate]:
    """All ways that the limits leave open; ``UserError`` when they leave none."""
    if limits.data_parallel is not None and ranks % limits.data_parallel:
        raise UserError(
            f"--data-parallel {limits.data_parallel} does not divide {ranks} ranks: "
            f"use one of {', '.join(map(str, _divisors(ranks)))}"
        )
    replicas = _divisors(ranks) if limits.data_parallel is None else [limits.data_parallel]
    fitting = [dp for dp in replicas if not limits.batch_size % dp]
    if not fitting:
        raise UserError(
            f"--batch-size {limits.batch_size} cannot be divided among {replicas[0]} replicas: "
            f"use a multiple of {replicas[0]}"
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
        raise UserError(
            f"{ranks} machines, but the model has {num_layers} layers: use at most {num_layers}, "
            "or replicas: --data-parallel"
        )
    return possible


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if not number % each]


def _of_mesh(limits: Limits, mesh: Mesh) -> Iterator[Candidate]:
    rows = limits.batch_size // mesh.dp
    if limits.micro_batch_size is not None:
        sizes = [min(rows, limits.micro_batch_size)]
    else:
        sizes = [size for size in _powers_of_two(rows) if mesh.pp > 1 or size == rows]
    if limits.stage_map is not None and limits.stage_map.pp != mesh.pp:
        return
    names = SCHEDULES if limits.schedule is None else [limits.schedule]
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
            for checkpoint in sorted({limits.checkpoint, True}):
                yield Candidate(mesh, name, virtual, rows, size, checkpoint)


def _powers_of_two(limit: int) -> list[int]:
    """1, 2, 4 ... and the limit itself."""
    return sorted({limit, *(2**k for k in range(limit.bit_length()) if 2**k <= limit)})


def choose(
    workload: Workload,
    cluster: Cluster,
    limits: Limits,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Choice:
    """The plan with the shortest predicted step among those that fit.

    ``advance`` is told how many plans of how many were looked at. ``DoesNotFitError`` says by how
    much the best of them fails.
    """
    ways = candidates(limits, cluster.size, workload.shape.num_layers)
    found: list[tuple[Candidate, Prediction]] = []
    failures: list[DoesNotFitError] = []
    fastest = math.inf
    # The most promising first: what cannot be faster than the best so far is not worked out.
    bounds = sorted(((_least(way, workload, cluster, limits), way) for way in ways), key=_first)
    for done, (least, way) in enumerate(bounds):
        advance(done, len(bounds))
        if least > fastest * (1 + CLOSE):
            break
        try:
            prediction = predict_candidate(way, workload, cluster, limits)
        except DoesNotFitError as error:
            failures.append(error)
            continue
        found.append((way, prediction))
        fastest = min(fastest, prediction.step_seconds)
    if not found:
        raise min(failures, key=lambda error: error.shortage)
    close = [each for each in found if each[1].step_seconds <= fastest * (1 + CLOSE)]
    candidate, prediction = min(close, key=lambda each: _fullness(each[1]))
    roomy = replace(
        cluster, machines=tuple(replace(each, memory=None) for each in cluster.machines)
    )
    free = replace(candidate, checkpoint=limits.checkpoint)
    unlimited = predict_candidate(free, workload, roomy, limits)
    is_slower = prediction.step_seconds > unlimited.step_seconds * (1 + CLOSE)
    return Choice(
        candidate=candidate,
        prediction=prediction,
        tried=len(bounds),
        unlimited=unlimited if is_slower else None,
    )


def _first(pair: tuple[float, Candidate]) -> float:
    return pair[0]


def _least(way: Candidate, workload: Workload, cluster: Cluster, limits: Limits) -> float:
    """Seconds that no step of this kind beats: all machines of a pipeline busy all the time."""
    wholes = [
        sum(costs.layers) + costs.head
        for costs in rank_costs(way, workload, cluster, limits.length)
    ]
    return way.microbatches / sum(1 / whole for whole in wholes)


def _fullness(prediction: Prediction) -> tuple[float, float]:
    """How full the fullest machine is; without known memory, how much the largest holds."""
    shares = max(each.peak / each.capacity for each in prediction.ranks)
    return shares, max(each.peak for each in prediction.ranks)


def predict_candidate(
    way: Candidate, workload: Workload, cluster: Cluster, limits: Limits
) -> Prediction:
    """Divide the layers for one way of training, and predict it; ``DoesNotFitError``."""
    problem = make_problem(way, workload, cluster, limits.length)
    stage_map = limits.stage_map or _divide(problem, limits.partitioner)
    prediction = predict(
        plan_of(way, stage_map, workload), workload, cluster, limits.length,
        checkpoint=way.checkpoint,
    )  # fmt: skip
    for rank, each in enumerate(prediction.ranks):
        if not each.fits:
            raise _shortage(problem.name_of(rank), each.peak, each.capacity)
    return prediction


def _divide(problem: Problem, partitioner: str | None) -> StageMap:
    """By the user's partitioner, or by the one that knows most."""
    if partitioner is not None:
        return get_partitioner(partitioner)(problem)
    if problem.pp < problem.num_stages:
        return get_partitioner("balanced")(problem)
    try:
        return get_partitioner("hetero")(problem)
    except UserError:
        rank, held = fullest(problem, evenly_full(problem))
        if held <= problem.capacity[rank]:
            raise
        raise _shortage(problem.name_of(rank), held, problem.capacity[rank]) from None


def _shortage(name: str, peak: float, capacity: float) -> DoesNotFitError:
    missing = peak - capacity
    return DoesNotFitError(
        f"it does not fit: at best {name} needs {gib(peak)} of the {gib(capacity)} that it may "
        f"use, {gib(missing)} too much",
        missing,
    )
