"""What rank 0 plans, as plain Python: no rank is started, and no model is built."""

from __future__ import annotations

from dataclasses import replace

from shardmlx.config.train import TrainConfig
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.job_facts import Facts
from shardmlx.planning.job import Job
from shardmlx.planning.memory.limits import budgets_of
from shardmlx.planning.think import JobOptions, think
from shardmlx.planning.training_plan import facts_for


def facts_of(config: TrainConfig, cluster: Cluster) -> Facts:
    """Return the facts of a run of full rows on these machines, each a rank's, whose processes hold
    nothing."""
    budgets = budgets_of(cluster, config.spec.machines.memory_limit)
    known = facts_for(config.spec, cluster.machines, cluster.backend)
    return replace(known, machines=cluster, budgets=budgets)


def planned_for(config: TrainConfig, cluster: Cluster) -> Job:
    """Return the job that trains rows of full length on these machines. Raises ``UserError``."""
    run = config.spec.for_ranks(cluster.size // config.spec.layout.across)
    return think(JobOptions(training=run), facts_of(config, cluster))
