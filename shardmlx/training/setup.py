"""Load a planned run on every rank, up to its first step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx.optimizers import Optimizer

from shardmlx.checkpoint.resume import Resumption, prepare_resumption
from shardmlx.checkpoint.run_identity import identity_of
from shardmlx.common.formatting import gibibytes, numbers_of
from shardmlx.common.reporter import Reporter
from shardmlx.distributed.agreement import on_all_ranks
from shardmlx.distributed.mlx_group import join_group
from shardmlx.distributed.transport import Transport
from shardmlx.engine.divided_weights import DividedWeights
from shardmlx.engine.engine import Engine
from shardmlx.engine.gathered_stage import build_stages
from shardmlx.engine.optimizer import build_optimizer
from shardmlx.engine.stage import Stage
from shardmlx.loading.rank_setup import SETUP_SECONDS, OpenedModel
from shardmlx.models.divided_layers import take_share
from shardmlx.models.shares import WHOLE
from shardmlx.training.island import Membership, join
from shardmlx.training.planned_run import PlannedRun


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A run that is ready to start; ``identity``, on rank 0, tells it from others. ``number`` is
    its place among runs that train side by side."""

    planned: PlannedRun
    transport: Transport
    reporter: Reporter
    model_path: Path
    engine: Engine
    optimizer: Optimizer
    resumption: Resumption
    membership: Membership | None
    identity: Mapping[str, Any] | None
    number: int = 0

    @property
    def shares_prompts(self) -> bool:
        """True if the answers of a pair are evaluated with their prompt once."""
        plan, shape = self.planned.plan, self.planned.workload.shape
        takes_pieces = shape.takes_packed and shape.family.takes_pieces
        return plan.together > 1 and takes_pieces and self.stages[0].part.takes_shared_prefixes

    @property
    def stages(self) -> list[Stage]:
        return list(self.engine.stages.values())


def load_run(
    planned: PlannedRun,
    transport: Transport,
    reporter: Reporter,
    opened: OpenedModel,
    beside: Sequence[TrainingRun] = (),
) -> TrainingRun:
    """Find the checkpoint to go on from, and load this rank's stages. All ranks must call it.
    Frozen weights are those of the runs ``beside``, which have read them."""
    plan, tune = planned.plan, planned.way.fine_tune

    def identify() -> dict[str, Any] | None:
        data, config = planned.data, planned.config
        if data is None or not (config.checkpoint_dir or config.named):
            return None
        read = opened.weights.read
        return identity_of(asdict(config), opened.path, data.train, data.valid, read)

    with transport.longer_timeout(SETUP_SECONDS):
        identity = on_all_ranks(transport, "reading which model it is", identify)
        resumption = Resumption()
        if tune.train:
            divides = tune.divides_optimizer or tune.keeps_errors
            owners = plan.mesh.size // (1 if divides else plan.mesh.dp)
            resumption = prepare_resumption(planned.config, transport, reporter, identity, owners)
        membership = join(planned, transport, reporter)
        weights, stages = _load(planned, transport, reporter, opened, beside)
    engine = Engine(
        plan,
        transport,
        stages,
        divides_optimizer=tune.divides_optimizer,
        sum_dtype=tune.sum_dtype,
        weights=weights,
    )
    return TrainingRun(
        planned=planned,
        transport=transport,
        reporter=reporter,
        model_path=opened.path,
        engine=engine,
        optimizer=build_optimizer(tune),
        resumption=resumption,
        membership=membership,
        identity=identity,
        number=len(beside),
    )


def _load(
    planned: PlannedRun,
    transport: Transport,
    reporter: Reporter,
    opened: OpenedModel,
    beside: Sequence[TrainingRun],
) -> tuple[DividedWeights | None, list[Stage]]:
    """Load this rank's stages, or its part of them, and show each rank's share. Collective."""
    start = time.monotonic()
    plan, work = planned.plan, planned.workload
    own = plan.stages_of(transport.rank)
    parts = [planned.slices[index] for index in own]
    weights = None
    if work.fine_tune.divides_weights and plan.mesh.dp > 1:
        _, pipeline_rank = plan.mesh.coordinates(transport.rank)
        weights = DividedWeights(transport.rank, plan.mesh.replicas_of(pipeline_rank), parts)
    savings = work.savings(planned.cluster.backend)
    if (mesh := plan.mesh).tp > 1:
        joined = beside[0].stages[0].part.all_sum if beside else None
        all_sum = joined or join_group(transport, mesh.sharing(transport.rank), reporter)

        def take() -> None:
            for part in parts:
                share = mesh.share(transport.rank)
                take_share(part, opened.shape, planned.shares, share, all_sum)

        on_all_ranks(transport, "sharing layers", take)
    if beside:
        for part, stage in zip(parts, beside[0].stages, strict=True):
            part.share_frozen(stage.part)
            part.load()
    else:
        # DoRA begins with the norms of whole rows.
        shares = WHOLE if work.fine_tune.fine_tune_type == "dora" else planned.shares
        opened.weights.load(parts, opened.shape, reporter, shares=shares)
    stages = build_stages(
        planned.slices, own, savings=savings, weights=weights, objective=planned.objective
    )
    nbytes = sum(part.nbytes for part in parts) if weights is None else weights.nbytes(parts)
    trained = sum(stage.part[name].size for stage in stages for name in stage.names)
    gathered = transport.gather((nbytes, trained, time.monotonic() - start), what="loading")
    if gathered is not None:
        of_ranks, trained_of, seconds_of = zip(*gathered, strict=True)
        columns = {
            "weights": [gibibytes(each) for each in of_ranks],
            "trained": [f"{each / 1e6:.3f}M" for each in trained_of],
            "loaded in": [f"{each:.1f} s" for each in seconds_of],
        }
        show_ranks(planned, transport.hosts, reporter, columns)
    return weights, stages


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
