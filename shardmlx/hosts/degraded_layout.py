"""A run's layout on the hosts that are left of those it was meant for. No MLX, no MPI.

All by options, none by a new stage map: the command that is printed can be typed again.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from shardmlx.config.specs import (
    DIVIDED_WEIGHTS,
    BatchOptions,
    FineTune,
    LayoutOptions,
    MachineOptions,
    RunSpec,
)
from shardmlx.costmodel.cluster import Cluster, read_profiles
from shardmlx.costmodel.hostfile import Machine, is_unnamed, same_host
from shardmlx.costmodel.memory_limits import limited
from shardmlx.costmodel.workload import Workload
from shardmlx.errors import UserError
from shardmlx.hosts.mpirun import replaced
from shardmlx.modelfiles.model_files import open_model
from shardmlx.partitioners import DoesNotFitError, get_partitioner
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.schedules import get_schedule
from shardmlx.pipeline.stage_map import StageMap, read_stage_map
from shardmlx.planning.layout import divide_batch, settled
from shardmlx.planning.partition_problem import make_problem
from shardmlx.planning.search import ChosenPlan, Limits, TooManyMachinesError, choose


@dataclass(frozen=True, slots=True)
class DegradedLayout:
    """The options of ``train`` for so many ranks, and one line that says what was decided."""

    ranks: int
    options: tuple[str, ...]
    line: str


def plan_again(
    options: Sequence[str],
    run: RunSpec,
    machines: Sequence[Machine],
    file: str | None = None,
) -> DegradedLayout:
    """Return the layout for ``machines``, one a rank: the user's, else the planner's, else train's
    own.

    ``run`` is what ``options`` and the YAML ``file`` say. The batch size stays. Raises
    ``DoesNotFitError`` where the planner knows that the machines are too small, ``UserError`` where
    the user's file settles what has to be changed.
    """
    workload = _workload(run)
    layers = None if workload is None else workload.shape.num_layers
    path = run.layout.stage_map
    stage_map = None if path is None else read_stage_map(path)
    ranks = len(machines)
    if fits(run.layout, run.batch, stage_map, machines, layers):
        return DegradedLayout(
            ranks, tuple(options), f"layout for {ranks} {_ranks(ranks)}: as given"
        )
    cleared = replaced(
        options, stage_map=None, pipeline_stages=None, data_parallel=None, replica_rows=None
    )
    if run.batch.given_rows:
        run = replace(run, batch=replace(run.batch, replica_rows=None))
    if stage_map is not None and cleared == tuple(options):
        raise UserError(
            f"{file}: stage_map does not suit the {ranks} {_ranks(ranks)} left",
            "give it by --stage-map, and launch can plan again without it",
        )
    cluster = _cluster(run.machines, machines)
    if workload is not None and cluster is not None:
        planned = _planned(cleared, run.layout, run.batch, workload, cluster)
        if planned is not None:
            return planned
    return _default(cleared, run, stage_map, machines, layers)


def fits(
    layout: LayoutOptions,
    batch: BatchOptions,
    stage_map: StageMap | None,
    machines: Sequence[Machine],
    layers: int | None,
) -> bool:
    """Tell whether the options can be used as they are on these machines, one a rank."""
    ranks = len(machines)
    schedule = get_schedule(layout.first.schedule)
    try:
        layout = layout.for_ranks(ranks)
        pp = layout.pipeline_stages or ranks if stage_map is None else stage_map.pp
        mesh = Mesh.for_world(ranks, pp)
        rows, size = divide_batch(batch, mesh)
        if stage_map is None:
            virtual = layout.virtual_stages or schedule.default_virtual
            schedule.check(pp, -(-rows // size), virtual)
            return layers is None or pp * virtual <= layers
    except UserError:
        return False
    return all(_runs_on(stage_map.host_of(rank), machines[rank].host) for rank in range(pp))


def _runs_on(wanted: str | None, host: str) -> bool:
    """Compare hosts as ``train`` does, as far as the hostfile names its machines."""
    return wanted is None or is_unnamed(host) or same_host(wanted, host)


def _workload(run: RunSpec) -> Workload | None:
    """Read the model's headers; None where they cannot be read from here."""
    try:
        return Workload.of(open_model(run.model, run.revision), run.fine_tune, run.batch)
    except (UserError, OSError):
        return None


def _cluster(known: MachineOptions, machines: Sequence[Machine]) -> Cluster | None:
    """Return the machines; None where memory or speed of one is not known."""
    if any(machine.memory is None for machine in machines):
        return None
    try:
        profile = None if known.profile is None else read_profiles(known.profile)
        backend = "metal" if sys.platform == "darwin" else "cpu"
        cluster = Cluster(machines=tuple(machines), profile=profile, backend=backend)
        cluster.check_speeds()
    except UserError:
        return None
    return limited(cluster, known.memory_limit)


def _planned(
    options: Sequence[str],
    layout: LayoutOptions,
    batch: BatchOptions,
    workload: Workload,
    cluster: Cluster,
) -> DegradedLayout | None:
    """Return the planner's choice for all machines, or for as many as there is work for."""
    limits = settled(layout, batch, workload.fine_tune)
    for ranks in range(cluster.size, 0, -1):
        some = replace(cluster, machines=cluster.machines[:ranks])
        try:
            choice = choose(workload, some, limits)
        except TooManyMachinesError:
            continue
        except DoesNotFitError:
            raise
        except UserError:
            return None
        new = _changes(layout, choice, workload, some, limits)
        again = _again(batch, workload.fine_tune, choice)
        text = shlex.join(replaced((), **new) + again)
        return DegradedLayout(
            ranks,
            replaced(options, **new) + again,
            f"layout planned again for {ranks} {_ranks(ranks)}{_unused(cluster.size - ranks)}: "
            f"{text}",
        )
    return None


def _changes(
    layout: LayoutOptions, choice: ChosenPlan, workload: Workload, cluster: Cluster, limits: Limits
) -> dict[str, str | int]:
    """Return the options with values that make ``train`` run the choice."""
    way = choice.candidate
    wanted: dict[str, str | int] = {
        "pipeline_stages": way.mesh.pp,
        "schedule": way.schedule,
        "micro_batch_size": way.micro_batch_size,
    }
    if way.virtual != get_schedule(way.schedule).default_virtual:
        wanted["virtual_stages"] = way.virtual
    if layout.data_parallel is not None:
        wanted["data_parallel"] = way.mesh.dp
    if limits.partitioner is None:
        problem = make_problem(way, way.of(workload), cluster, limits.length)
        is_even = get_partitioner("balanced")(problem) == choice.prediction.plan.stage_map
        wanted["partitioner"] = "balanced" if is_even else "memory"
    asked = {**asdict(workload.batch), **asdict(layout), "pipeline_stages": None}
    return {name: value for name, value in wanted.items() if asked[name] != value}


def _again(batch: BatchOptions, fine_tune: FineTune, choice: ChosenPlan) -> tuple[str, ...]:
    """Return the options of what is computed, and gathered, again, where they have to change."""
    wanted = choice.candidate.recompute
    words = [] if wanted == batch.first.recompute else ["--recompute", wanted]
    if choice.candidate.divides_weights and not fine_tune.divides_weights:
        words += ["--zero", str(DIVIDED_WEIGHTS)]
    return tuple(words)


def _default(
    options: Sequence[str],
    run: RunSpec,
    stage_map: StageMap | None,
    machines: Sequence[Machine],
    layers: int | None,
) -> DegradedLayout:
    """Return the layout of one pipeline through as many machines as can be."""
    layout = run.layout
    for ranks in range(len(machines), 0, -1):
        alone = replace(layout, stage_map=None, pipeline_stages=ranks, data_parallel=None)
        if not fits(alone, run.batch, None, machines[:ranks], layers):
            continue
        new = {} if layout.pipeline_stages is None else {"pipeline_stages": ranks}
        given = stage_map or f"--pipeline-stages {layout.pipeline_stages}"
        if layout.data_parallel is not None:
            new = {"pipeline_stages": ranks, "data_parallel": 1}
            given = f"--data-parallel {layout.data_parallel}"
        instead = f", instead of {given}" if stage_map or new else ""
        return DegradedLayout(
            ranks,
            replaced(options, **new),
            f"layout for {ranks} {_ranks(ranks)}{_unused(len(machines) - ranks)}: one pipeline of "
            f"{ranks}{instead}",
        )
    raise UserError(
        f"no layout of {layout.schedule} for the {len(machines)} {_ranks(len(machines))} left",
        "leave --schedule and --virtual-stages out",
    )


def _ranks(count: int) -> str:
    return "rank" if count == 1 else "ranks"


def _unused(count: int) -> str:
    return f", {count} unused" if count else ""
