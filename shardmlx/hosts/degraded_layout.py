"""A run's layout on the hosts that are left, in options alone. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardmlx.common.formatting import plural
from shardmlx.config.common_options import AUTO, SIMPLEST
from shardmlx.config.specs import BatchOptions, LayoutOptions, RunSpec
from shardmlx.costmodel.hostfile import Machine, is_unnamed, same_host
from shardmlx.costmodel.workload import Workload
from shardmlx.errors import UserError
from shardmlx.hosts.launch_options import replaced
from shardmlx.modelfiles.model_files import open_model
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.schedules import get_schedule
from shardmlx.pipeline.stage_map import StageMap, read_stage_map
from shardmlx.planning.layout import divide_batch


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
    """Return the layout for ``machines``, one a rank: as given if that suits them, else one
    pipeline through as many as there are layers. Raises ``UserError`` if the user's file
    prevents a necessary change, or no layout suits."""
    layers = _layers(run)
    layout = run.layout
    stage_map = None if layout.stage_map is None else read_stage_map(layout.stage_map)
    here = plural(len(machines), "rank")
    if fits(layout, run.batch, stage_map, machines, layers):
        return DegradedLayout(len(machines), tuple(options), f"layout for {here}: as given")
    cleared = replaced(
        options, stage_map=None, pipeline_stages=None, data_parallel=None, replica_rows=None
    )
    if stage_map is not None and cleared == tuple(options):
        raise UserError(
            f"{file}: stage_map does not suit the {here} left",
            "give it by --stage-map, and launch can plan again without it",
        )
    for ranks in range(len(machines), 0, -1):
        alone = replace(layout, stage_map=None, pipeline_stages=ranks, data_parallel=None)
        if fits(alone, run.batch, None, machines[:ranks], layers):
            break
    else:
        raise UserError(
            f"no layout of {layout.schedule} for the {here} left", "leave --schedule out"
        )
    new, given = {}, str(stage_map)
    if layout.pipeline_stages is not None:
        new, given = {"pipeline_stages": ranks}, f"--pipeline-stages {layout.pipeline_stages}"
    if layout.data_parallel is not None:
        new = {"pipeline_stages": ranks, "data_parallel": 1}
        given = f"--data-parallel {layout.data_parallel}"
    unused = f", {len(machines) - ranks} unused" if ranks < len(machines) else ""
    chosen = f"one pipeline of {ranks}" if new else "the run chooses it"
    instead = f", instead of {given}" if stage_map or new else ""
    line = f"layout for {plural(ranks, 'rank')}{unused}: {chosen}{instead}"
    return DegradedLayout(ranks, replaced(cleared, **new), line)


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
    # Hosts are compared as train does, as far as the hostfile names its machines.
    pairs = ((stage_map.host_of(rank), machines[rank].host) for rank in range(pp))
    return all(not wanted or is_unnamed(host) or same_host(wanted, host) for wanted, host in pairs)


def _layers(run: RunSpec) -> int | None:
    try:
        files = open_model(run.model, run.revision)
        return Workload.of(files, run.fine_tune, run.batch).shape.num_layers
    except (UserError, OSError):
        return None
