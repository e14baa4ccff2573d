"""Prepare a training run, on every rank, up to its first step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlx.optimizers import Optimizer

from shardmlx.checkpoint.resume import Resumption, prepare_resumption
from shardmlx.checkpoint.run_identity import RunOptions, identity_of
from shardmlx.common.formatting import gibibytes
from shardmlx.common.reporter import Reporter
from shardmlx.config.specs import CheckpointOptions, FineTune, Savings
from shardmlx.config.train import TrainConfig
from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.memory_limits import MemoryLimits
from shardmlx.costmodel.workload import Workload
from shardmlx.distributed.agreement import on_all_ranks
from shardmlx.distributed.transport import Transport
from shardmlx.engine.divided_weights import DividedWeights
from shardmlx.engine.engine import Engine
from shardmlx.engine.gathered_stage import build_stages
from shardmlx.engine.stage import Stage
from shardmlx.loading.rank_setup import SETUP_SECONDS, OpenedModel
from shardmlx.models.slice import Slice
from shardmlx.pipeline.plan import Plan
from shardmlx.training.datasets import DataSets
from shardmlx.training.plan import PLANNED, layers_of, planned_columns
from shardmlx.training.planned_run import PlannedRun, open_for_training, plan_run


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A run that is ready to start: its options in ``config``, and those ``chosen`` where it leaves
    them open. ``data`` is on rank 0 only, ``sizes`` of its sets on all.

    ``identity``, on rank 0 of a run that saves checkpoints, says in them which run it is;
    ``limits`` are those of the memory of each world rank, and ``mean_length`` that of the training
    sequences, in tokens, as the plan counts them: with padding unless they are packed.
    """

    config: TrainConfig
    chosen: Mapping[str, Any]
    transport: Transport
    reporter: Reporter
    model_path: Path
    workload: Workload
    cluster: Cluster
    plan: Plan
    engine: Engine
    optimizer: Optimizer
    data: DataSets | None
    sizes: Mapping[str, int]
    resumption: Resumption
    identity: Mapping[str, Any] | None
    limits: tuple[MemoryLimits, ...]
    mean_length: int

    @property
    def stages(self) -> list[Stage]:
        """The stages of this rank."""
        return list(self.engine.stages.values())


def prepare_training(config: TrainConfig, transport: Transport, reporter: Reporter) -> TrainingRun:
    """Check everything, then load. All ranks must call it.

    No weight is read before model, plan and data are known to be good on all ranks. Raises the
    same ``AgreedError`` on all of them.
    """
    with open_for_training(config, transport, reporter) as opened:
        return _load_run(plan_run(config, transport, reporter, opened), transport, reporter, opened)


def _load_run(
    planned: PlannedRun, transport: Transport, reporter: Reporter, opened: OpenedModel
) -> TrainingRun:
    """Find the checkpoint to go on from, and load this rank's stages. Collective."""
    config, plan, sizes = planned.config, planned.plan, planned.inputs.sizes
    tune = sizes.fine_tune
    with transport.longer_timeout(SETUP_SECONDS):
        identity, resumption = _find_checkpoint(
            config, transport, reporter, opened, planned.data, plan
        )
        weights, stages = _load(
            transport,
            reporter,
            plan,
            planned.slices,
            opened,
            planned.limits,
            sizes.savings(sizes.batch.recomputed, planned.inputs.cluster.backend),
            divides_weights=tune.divides_weights,
        )
    return TrainingRun(
        config=config,
        chosen=planned.chosen,
        transport=transport,
        reporter=reporter,
        model_path=opened.path,
        workload=planned.inputs.sizes,
        cluster=planned.inputs.cluster,
        plan=plan,
        engine=Engine(
            plan,
            transport,
            stages,
            divides_optimizer=tune.divides_optimizer,
            links=planned.inputs.cluster.links,
            sum_dtype=tune.sum_dtype,
            weights=weights,
        ),
        optimizer=planned.optimizer,
        data=planned.data,
        sizes=planned.sizes,
        resumption=resumption,
        identity=identity,
        limits=planned.limits,
        mean_length=planned.mean_length,
    )


def _find_checkpoint(
    config: TrainConfig,
    transport: Transport,
    reporter: Reporter,
    opened: OpenedModel,
    data: DataSets | None,
    plan: Plan,
) -> tuple[Mapping[str, Any] | None, Resumption]:
    """Return the run's identity, on rank 0 if it has checkpoints, and its starting point."""
    checkpoints = CheckpointOptions.of(config)
    identity = on_all_ranks(
        transport,
        "reading which model it is",
        partial(_identity, config, checkpoints, opened, data),
    )
    if not config.train:
        return identity, Resumption()
    mesh, tune = plan.mesh, FineTune.of(config)
    owners = mesh.size if tune.divides_optimizer or tune.keeps_errors else mesh.pp
    return identity, prepare_resumption(checkpoints, transport, reporter, identity, owners)


def _identity(
    config: TrainConfig, checkpoints: CheckpointOptions, opened: OpenedModel, data: DataSets | None
) -> dict[str, Any] | None:
    if data is None or not (checkpoints.checkpoint_dir or checkpoints.named):
        return None
    return identity_of(
        RunOptions.of(config), opened.path, data.train, data.valid, opened.weights.read
    )


def _load(
    transport: Transport,
    reporter: Reporter,
    plan: Plan,
    slices: list[Slice],
    opened: OpenedModel,
    limits: Sequence[MemoryLimits],
    savings: Savings,
    *,
    divides_weights: bool,
) -> tuple[DividedWeights | None, list[Stage]]:
    """Load this rank's stages, or its part of them, and show each rank's share. Collective."""
    start = time.monotonic()
    own = plan.stages_of(transport.rank)
    parts = [slices[index] for index in own]
    weights = None
    if divides_weights and plan.mesh.dp > 1:
        _, pipeline_rank = plan.mesh.coordinates(transport.rank)
        weights = DividedWeights(transport.rank, plan.mesh.replicas_of(pipeline_rank), parts)
    opened.weights.load(parts, opened.shape, reporter)
    stages = build_stages(slices, own, savings=savings, weights=weights)
    nbytes = sum(part.nbytes for part in parts) if weights is None else weights.nbytes(parts)
    trained = sum(stage.part[name].size for stage in stages for name in stage.names)
    gathered = transport.gather((nbytes, trained, time.monotonic() - start), what="loading")
    if gathered is not None:
        reporter.table(
            ("rank", "host", "stages", "weights", "trained", "loaded in", *PLANNED),
            [
                (
                    str(rank),
                    transport.hosts[rank],
                    layers_of(plan, rank),
                    gibibytes(nbytes),
                    f"{trained / 1e6:.3f}M",
                    f"{seconds:.1f} s",
                    *planned_columns(limits[rank]),
                )
                for rank, (nbytes, trained, seconds) in enumerate(gathered)
            ],
        )
    return weights, stages
