"""A run's layout on the hosts that are left. No MLX, no MPI.

The layout uses options alone, without a new stage map, so that the printed command can be typed
again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardmlx.config.common_options import AUTO, SIMPLEST
from shardmlx.config.specs import BatchOptions, LayoutOptions, MachineOptions, RunSpec
from shardmlx.costmodel.cluster import Cluster, read_profiles
from shardmlx.costmodel.hostfile import Machine, is_unnamed, same_host
from shardmlx.costmodel.memory_limits import limited
from shardmlx.costmodel.workload import Workload
from shardmlx.errors import UserError
from shardmlx.hosts.mpirun import replaced
from shardmlx.modelfiles.model_files import open_model
from shardmlx.partitioners import DoesNotFitError
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.schedules import get_schedule
from shardmlx.pipeline.stage_map import StageMap, read_stage_map
from shardmlx.planning.choice import choose
from shardmlx.planning.facts import Facts, SequenceLengths
from shardmlx.planning.layout import divide_batch
from shardmlx.planning.ways import TooManyMachinesError


@dataclass(frozen=True, slots=True)
class DegradedLayout:
    """The options of ``train`` for so many ranks, and one line about the decision."""

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

    ``run`` has the ``options`` and the YAML ``file``. The batch size stays. Raises
    ``DoesNotFitError`` if the planner knows that the machines are too small, ``UserError`` if the
    user's file prevents a necessary change.
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
        planned = _planned(cleared, run, workload, cluster)
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
    schedule = get_schedule(SIMPLEST if layout.schedule == AUTO else layout.schedule)
    try:
        layout = layout.for_ranks(ranks)
        pp = layout.pipeline_stages or ranks if stage_map is None else stage_map.pp
        mesh = Mesh.for_world(ranks, pp)
        rows, size = divide_batch(batch, mesh)
        if stage_map is None:
            virtual = schedule.default_virtual
            schedule.check(pp, -(-rows // size), virtual)
            return layers is None or pp * virtual <= layers
    except UserError:
        return False
    return all(_runs_on(stage_map.host_of(rank), machines[rank].host) for rank in range(pp))


def _runs_on(wanted: str | None, host: str) -> bool:
    """Compare hosts as ``train`` does, as far as the hostfile names its machines."""
    return wanted is None or is_unnamed(host) or same_host(wanted, host)


def _workload(run: RunSpec) -> Workload | None:
    """Read the model's headers; None if they cannot be read from here."""
    try:
        return Workload.of(open_model(run.model, run.revision), run.fine_tune, run.batch)
    except (UserError, OSError):
        return None


def _cluster(known: MachineOptions, machines: Sequence[Machine]) -> Cluster | None:
    """Return the machines; None if memory or speed of one is unknown."""
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
    options: Sequence[str], run: RunSpec, workload: Workload, cluster: Cluster
) -> DegradedLayout | None:
    """Return the planner's choice for all machines, or for as many as there is work for; the run
    chooses the rest again. None if nothing can be planned."""
    open_layout = replace(run.layout, stage_map=None, pipeline_stages=None, data_parallel=None)
    lengths = SequenceLengths.full(run.batch.max_seq_length)
    for ranks in range(cluster.size, 0, -1):
        some = replace(cluster, machines=cluster.machines[:ranks])
        facts = Facts(workload=workload, cluster=some, lengths=lengths)
        try:
            choice = choose(replace(run, layout=open_layout), facts)
        except TooManyMachinesError:
            continue
        except DoesNotFitError:
            raise
        except UserError:
            return None
        mesh = choice.plan.mesh
        new = {"pipeline_stages": mesh.pp}
        if run.layout.data_parallel is not None:
            new["data_parallel"] = mesh.dp
        return DegradedLayout(
            ranks,
            replaced(options, **new),
            f"layout planned again for {ranks} {_ranks(ranks)}{_unused(cluster.size - ranks)}: "
            f"{choice.way}",
        )
    return None


def _default(
    options: Sequence[str],
    run: RunSpec,
    stage_map: StageMap | None,
    machines: Sequence[Machine],
    layers: int | None,
) -> DegradedLayout:
    """Return the layout of one pipeline through as many machines as possible."""
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
        "leave --schedule out",
    )


def _ranks(count: int) -> str:
    return "rank" if count == 1 else "ranks"


def _unused(count: int) -> str:
    return f", {count} unused" if count else ""
