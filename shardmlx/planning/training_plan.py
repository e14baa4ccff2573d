"""Plan the training of a model on given machines: from options and a hostfile to a prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardmlx.config.specs import RunSpec
from shardmlx.costmodel.cluster import EFFICIENCY, MEMORY_FRACTION, Cluster, read_profiles
from shardmlx.costmodel.hostfile import Machine, machine_of_each_rank
from shardmlx.costmodel.memory_limits import limited
from shardmlx.costmodel.predict import Prediction
from shardmlx.costmodel.training_setup import BACKENDS
from shardmlx.costmodel.workload import Workload
from shardmlx.errors import UserError
from shardmlx.modelfiles.model_files import open_model
from shardmlx.partitioners import DoesNotFitError
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.stage_map import read_stage_map
from shardmlx.planning.layout import settled
from shardmlx.planning.search import ChosenPlan, Limits, TooManyMachinesError, choose
from shardmlx.planning.suggestions import remedies

if TYPE_CHECKING:
    from shardmlx.config.train import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """The plan that was chosen, for which machines, and within which limits.

    ``prediction`` has the plan with its stage map, the seconds of a step, and of each rank its
    hosts, layers, peak bytes and capacity.
    """

    choice: ChosenPlan
    cluster: Cluster
    limits: Limits
    workload: Workload

    @property
    def prediction(self) -> Prediction:
        """Prediction of a step."""
        return self.choice.prediction


def plan_training(
    config: TrainConfig | RunSpec,
    machines: Sequence[Machine],
    *,
    data_parallel: int | None = None,
    memory_fraction: float = MEMORY_FRACTION,
    efficiency: float = EFFICIENCY,
    backend: str = BACKENDS[0],
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> TrainingPlan:
    """Choose stages, schedule, micro-batches and gradient checkpointing for ``machines``.

    The fastest plan that fits is chosen, from the model's headers alone, among those that
    ``config`` leaves open: "auto" and None leave a choice. MLX may use ``memory_fraction`` of a
    machine's memory, and training reaches ``efficiency`` of its FLOPs, unless the machines or a
    profile say more. ``advance`` is
    told how many plans of how many were looked at. Raises ``UserError``: where nothing fits, its
    remedy says what would.
    """
    run = config if isinstance(config, RunSpec) else RunSpec.of(config)
    for what, value in (("--memory-fraction", memory_fraction), ("--efficiency", efficiency)):
        if not 0 < value <= 1:
            raise UserError(f"{what} is {value:g}", "give more than 0, and at most 1")
    profile = run.machines.profile
    cluster = Cluster(
        machines=machine_of_each_rank(machines),
        profile=None if profile is None else read_profiles(profile),
        memory_fraction=memory_fraction,
        efficiency=efficiency,
        backend=backend,
    )
    cluster = limited(cluster, run.machines.memory_limit)
    cluster.check_speeds()
    workload = Workload.of(open_model(run.model, run.revision), run.fine_tune, run.batch)
    limits = _limits(run, data_parallel, cluster.size)
    if limits.stage_map is not None:
        limits.stage_map.check_layers(workload.shape.num_layers)
    choice = _choose(workload, cluster, limits, advance)
    workload = choice.candidate.of(workload)
    return TrainingPlan(choice=choice, cluster=cluster, limits=limits, workload=workload)


def _limits(run: RunSpec, data_parallel: int | None, ranks: int) -> Limits:
    layout = run.layout
    if data_parallel is not None:
        layout = replace(layout, data_parallel=data_parallel)
    layout = layout.for_ranks(ranks)
    stage_map = None if layout.stage_map is None else read_stage_map(layout.stage_map)
    if stage_map is not None:
        stage_map.check_pipeline(layout.pipeline_stages, layout.virtual_stages)
    pp = layout.pipeline_stages if stage_map is None else stage_map.pp
    replicas = None if pp is None else Mesh.for_world(ranks, pp).dp
    limits = settled(layout, run.batch, run.fine_tune)
    return replace(limits, data_parallel=replicas, stage_map=stage_map)


def _choose(
    workload: Workload, cluster: Cluster, limits: Limits, advance: Callable[[int, int], None]
) -> ChosenPlan:
    try:
        return choose(workload, cluster, limits, advance)
    except TooManyMachinesError as error:
        first = cluster.machines[min(workload.shape.num_layers, cluster.size - 1)]
        raise UserError(f"{first.where}: {error.problem}", error.remedy) from None
    except DoesNotFitError as error:
        found = remedies(workload, cluster, limits)
        remedy = "; ".join(found) or "more machines, or machines with more memory"
        where = cluster.machines[error.rank].where
        raise UserError(f"{where}: {error.fact}; it would fit with", remedy) from None
