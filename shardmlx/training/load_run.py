"""Load a planned run on every rank, up to its first step: rank 0's part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardmlx.checkpoint.search import take_place
from shardmlx.checkpoint.seen_checkpoints import SeenCheckpoints
from shardmlx.common.formatting import gibibytes, numbers_of
from shardmlx.common.reporter import Reporter
from shardmlx.distributed.crew import Crew
from shardmlx.islands.hub_link import join
from shardmlx.islands.shared_weights import Sharing
from shardmlx.loading.rank_setup import ModelWorker, bring_weights, join_groups
from shardmlx.loading.transfer import Needs
from shardmlx.planning.job import Job
from shardmlx.training.plan_run import PlannedRun
from shardmlx.training.worker import TrainWorker


def load_run(
    crew: Crew[TrainWorker], planned: PlannedRun, reporter: Reporter, name: str = ""
) -> None:
    """Load each rank's stages for the run ``name``: empty for a run alone. On rank 0, once all
    ranks have built its model, and looked for its checkpoints. Raises ``UserError``."""
    config = planned.config
    job = planned.job
    worker = crew.worker
    take_place(crew.part(SeenCheckpoints, "checkpoints"), job.trained.resumption)
    crew.all(TrainWorker.cut, config, job)
    if job.trained.way.fine_tune.train:
        worker.lock_output()
    link = join(config, job.model, worker.shapes(), reporter)
    join_groups(crew, job.mesh)
    if job.mesh.tp > 1:
        crew.all(TrainWorker.share_layers)
    if not worker.runs:
        crew.all(ModelWorker.set_limits, job.limits)
        bring_weights(crew, Needs.of(job, worker.opened.shape), reporter)
    sharing = None if link is None else Sharing(link.joined.terms, link.tensors)
    loaded = crew.all(TrainWorker.load)
    crew.all(TrainWorker.get_ready, sharing, name, config.metrics_file)
    worker.runs[-1].lead_with(planned.data, planned.identity, link)
    columns = {
        "weights": [gibibytes(each.nbytes) for each in loaded],
        "trained": [f"{each.trained / 1e6:.3f}M" for each in loaded],
        "loaded in": [f"{each.seconds:.1f} s" for each in loaded],
    }
    if not name or len(worker.runs) == 1:
        show_ranks(job, crew.transport.hosts, reporter, columns)


def show_ranks(
    job: Job,
    hosts: Sequence[str],
    reporter: Reporter,
    others: Mapping[str, Sequence[str]],
) -> None:
    """Print the layers of each rank, other columns by their heads, and its planned memory."""
    columns = {
        "rank": [str(rank) for rank in range(len(hosts))],
        "host": hosts,
        "layers": [
            ", ".join(numbers_of(*ends) for ends in job.layers(rank)) for rank in range(len(hosts))
        ],
        **others,
        "planned peak": [gibibytes(each.planned_process) for each in job.limits],
        "limit": [gibibytes(each.budget.process) for each in job.limits],
        "which is": [each.budget.reason for each in job.limits],
    }
    reporter.table(list(columns), list(zip(*columns.values(), strict=True)))
