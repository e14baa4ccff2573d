"""What rank 0 plans, as plain Python: no rank is started, and no model is built."""

from __future__ import annotations

from shardmlx.common.reporter import Reporter
from shardmlx.config.train import TrainConfig
from shardmlx.loading.rank_setup import PlanInputs
from shardmlx.modelfiles.model_files import open_model
from shardmlx.pipeline.stage_map import read_stage_map
from shardmlx.planning.choice import Choice
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.plan_facts import SequenceLengths
from shardmlx.planning.facts.workload import Workload
from shardmlx.planning.memory.limits import budgets_of, within
from shardmlx.training.plan_run import choose_plan, planned_by
from shardmlx.training.planned_run import PlannedRun

QUIET = Reporter(quiet=True)


def inputs_of(config: TrainConfig, cluster: Cluster) -> PlanInputs[Workload]:
    """Return the facts of a run on these machines, each a rank's, whose processes hold nothing."""
    spec = config.spec
    files = open_model(str(config.source.model))
    workload = Workload.of(files, spec.fine_tune, spec.batch, spec.saves)
    budgets = budgets_of(cluster, spec.machines.memory_limit)
    given = config.layout.stage_map
    stage_map = None if given is None else read_stage_map(given)
    return PlanInputs(workload, within(cluster, budgets), budgets, stage_map, cluster)


def chosen_for(config: TrainConfig, cluster: Cluster) -> Choice:
    """Return the way in which a run of full rows trains on these machines. Raises ``UserError``."""
    run = config.spec.for_ranks(cluster.size // config.spec.layout.across)
    lengths = SequenceLengths.full(config.batch.max_seq_length)
    return choose_plan(run, inputs_of(config, cluster), lengths)


def planned_for(config: TrainConfig, cluster: Cluster) -> PlannedRun:
    """Return the run that is planned for these machines, with the memory of each rank. Raises
    ``UserError``."""
    choice = chosen_for(config, cluster)
    return planned_by(choice, choice.plan, config, inputs_of(config, cluster), QUIET)
