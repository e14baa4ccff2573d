"""Load a planned run on every rank, up to its first step: rank 0's part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardmlx.checkpoint.resume import Resumption, prepare_resumption
from shardmlx.checkpoint.run_identity import RunFacts, identity_of
from shardmlx.checkpoint.seen_checkpoints import SeenCheckpoints
from shardmlx.checkpoint.store import Store, step_of
from shardmlx.common.digests import file_digest
from shardmlx.common.formatting import gibibytes, numbers_of
from shardmlx.common.reporter import Reporter
from shardmlx.config.train import CheckpointOptions
from shardmlx.distributed.crew import Crew
from shardmlx.engine.optimizer import usual_settings
from shardmlx.errors import UserError, file_access
from shardmlx.islands.hub_link import join
from shardmlx.islands.shared_weights import Sharing
from shardmlx.loading.peft import start_file
from shardmlx.loading.rank_setup import (
    ModelWorker,
    OpenedModel,
    bring_weights,
    join_groups,
)
from shardmlx.loading.transfer import Needs
from shardmlx.modelfiles.model_files import open_model
from shardmlx.planning.facts.workload import only_dtype
from shardmlx.planning.job import Job
from shardmlx.training.plan_run import PlannedRun
from shardmlx.training.worker import TrainWorker


def load_run(
    crew: Crew[TrainWorker], planned: PlannedRun, reporter: Reporter, name: str = ""
) -> None:
    """Find the checkpoint to go on from, and load each rank's stages, for the run ``name``: empty
    for a run alone. On rank 0, once all ranks have built its model. Raises ``UserError``."""
    config = planned.config
    job = planned.job
    worker = crew.worker
    tune = job.trained.way.fine_tune
    identity = _identity(planned, worker)
    resumption = Resumption()
    if tune.train:
        divides = tune.divides_optimizer or tune.keeps_errors
        owners = job.mesh.size // (1 if divides else job.mesh.dp)
        checkpoints = crew.part(SeenCheckpoints, "checkpoints")
        resumption = prepare_resumption(
            checkpoints, config.checkpoints, config.iters, reporter, identity, owners
        )
    crew.all(TrainWorker.cut, config, job.resuming(resumption))
    if tune.train:
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
    worker.runs[-1].lead_with(planned.data, identity, link)
    columns = {
        "weights": [gibibytes(each.nbytes) for each in loaded],
        "trained": [f"{each.trained / 1e6:.3f}M" for each in loaded],
        "loaded in": [f"{each.seconds:.1f} s" for each in loaded],
    }
    if not name or len(worker.runs) == 1:
        show_ranks(job, crew.transport.hosts, reporter, columns)


def _identity(planned: PlannedRun, worker: TrainWorker) -> dict[str, Any] | None:
    """Return what tells a run from others, if it has checkpoints."""
    config = planned.config
    data = planned.data
    if not (config.checkpoints.checkpoint_dir or config.checkpoints.named):
        return None
    read = worker.model_files.read
    facts = _facts_of(planned, worker.opened)
    then = _sets_of_checkpoint(config.checkpoints)
    train = data.train.facts(then.get("train"))
    valid = data.valid.facts(then.get("valid"))
    return identity_of(config.flat(), worker.opened.path, train, valid, read, facts)


def _sets_of_checkpoint(options: CheckpointOptions) -> Mapping[str, Any]:
    """Return the facts of the sets of the checkpoint that the run may go on from, by name; none
    where there is no sound one, or on another disk alone."""
    named = options.named
    directory = options.checkpoint_dir
    if named is None and (directory is None or options.resume == "never"):
        return {}
    store = Store(Path(directory or "") if named is None else named.parent)
    steps = store.steps() if named is None else [step_of(named.name)]
    for step in reversed(steps):
        with suppress(UserError, KeyError):
            if step is not None:
                sets: Mapping[str, Any] = store.manifest(step).identity["data"]
                return sets
    return {}


def _facts_of(planned: PlannedRun, opened: OpenedModel) -> RunFacts:
    """Return what the run's options do not say of it. Raises ``UserError``."""
    config = planned.config
    start = config.resume_adapter_file
    with file_access("read", f"--resume-adapter-file {start}"):
        digest = None if start is None else file_digest(start_file(Path(start)))
    return RunFacts(
        layers=opened.shape.num_layers,
        stored_dtype=only_dtype(open_model(str(opened.path))),
        start=digest,
        objective=_module_digest(config.loss.objective),
        usual_settings=usual_settings(config.tune.optimizer),
        open_schedule=config.open_lr_schedule,
    )


def _module_digest(objective: str) -> str | None:
    """Return a digest of the source of an own objective, MODULE:NAME; None for others."""
    name, colon, _ = objective.partition(":")
    spec = find_spec(name) if colon else None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    with file_access("read", spec.origin):
        return file_digest(Path(spec.origin))


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
