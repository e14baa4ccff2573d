"""Load a planned run on every rank, up to its first step: rank 0's part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from shardmlx.checkpoint.run_identity import identity_of
from shardmlx.common.formatting import gibibytes, numbers_of
from shardmlx.common.reporter import Reporter
from shardmlx.distributed.crew import Crew
from shardmlx.loading.rank_setup import ModelWorker, bring_weights
from shardmlx.loading.transfer import Needs
from shardmlx.models.shares import WHOLE
from shardmlx.training.datasets import DataSets
from shardmlx.training.island import join
from shardmlx.training.planned_run import PlannedRun
from shardmlx.training.worker import TrainWorker


def load_run(
    crew: Crew[TrainWorker],
    planned: PlannedRun,
    data: DataSets,
    reporter: Reporter,
    name: str = "",
) -> None:
    """Find the checkpoint to go on from, and load each rank's stages, for the run ``name``: empty
    for a run alone. On rank 0, once all ranks have built its model. Raises ``UserError``."""
    plan, tune, worker = planned.plan, planned.way.fine_tune, crew.worker
    crew.all(TrainWorker.cut, planned)
    identity = _identity(planned, data, worker)
    if tune.train:
        divides = tune.divides_optimizer or tune.keeps_errors
        owners = plan.mesh.size // (1 if divides else plan.mesh.dp)
        crew.all(TrainWorker.find_resumption, identity, owners)
        worker.lock_output()
    membership = join(planned, worker.shapes(), reporter)
    if plan.mesh.tp > 1:
        crew.all(TrainWorker.join_group, [plan.mesh.sharing(rank) for rank in range(crew.size)])
        crew.all(TrainWorker.share_layers)
    if not worker.runs:
        crew.all(ModelWorker.set_limits, planned.limits)
        bring_weights(crew, _needs(planned, worker), reporter)
    told = membership and replace(membership, hub=None)
    loaded = crew.all(TrainWorker.load, told, name, planned.config.metrics_file)
    worker.runs[-1] = replace(worker.runs[-1], data=data, identity=identity, membership=membership)
    columns = {
        "weights": [gibibytes(each.nbytes) for each in loaded],
        "trained": [f"{each.trained / 1e6:.3f}M" for each in loaded],
        "loaded in": [f"{each.seconds:.1f} s" for each in loaded],
    }
    if not name or len(worker.runs) == 1:
        show_ranks(planned, crew.transport.hosts, reporter, columns)


def _identity(planned: PlannedRun, data: DataSets, worker: TrainWorker) -> dict[str, Any] | None:
    """Return what tells a run from others, if it has checkpoints."""
    config = planned.config
    if not (config.checkpoint_dir or config.named):
        return None
    read = worker.model_files.read
    return identity_of(asdict(config), worker.opened.path, data.train, data.valid, read)


def _needs(planned: PlannedRun, worker: TrainWorker) -> Needs:
    """Return the layers that each rank reads."""
    plan = planned.plan
    ranges = plan.stage_map.partition.ranges
    stages = [[ranges[stage] for stage in plan.stages_of(rank)] for rank in range(plan.mesh.size)]
    # DoRA begins with the norms of whole rows.
    is_dora = planned.workload.fine_tune.fine_tune_type == "dora"
    return Needs(stages, worker.opened.shape, WHOLE if is_dora else planned.shares)


def show_ranks(
    planned: PlannedRun,
    hosts: Sequence[str],
    reporter: Reporter,
    others: Mapping[str, Sequence[str]],
) -> None:
    """Print the layers of each rank, other columns by their heads, and its planned memory."""
    plan, limits = planned.plan, planned.limits
    ranges = plan.stage_map.partition.ranges
    columns = {
        "rank": [str(rank) for rank in range(len(hosts))],
        "host": hosts,
        "layers": [
            ", ".join(numbers_of(*ranges[stage]) for stage in plan.stages_of(rank))
            for rank in range(len(hosts))
        ],
        **others,
        "planned peak": [gibibytes(each.planned_process) for each in limits],
        "limit": [gibibytes(each.budget.process) for each in limits],
        "which is": [each.budget.reason for each in limits],
    }
    reporter.table(list(columns), list(zip(*columns.values(), strict=True)))
