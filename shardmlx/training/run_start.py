"""Find what decides where a run begins, or goes on, before rank 0 plans its job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardmlx.checkpoint.resume import CheckpointFacts, RunStart
from shardmlx.checkpoint.run_identity import RunFacts, identity_of
from shardmlx.checkpoint.search import see_checkpoints
from shardmlx.checkpoint.seen_checkpoints import SeenCheckpoints
from shardmlx.common.digests import file_digest
from shardmlx.config.train import TrainConfig
from shardmlx.distributed.crew import Crew
from shardmlx.engine.optimizer import usual_settings
from shardmlx.errors import file_access
from shardmlx.loading.peft import start_file
from shardmlx.loading.rank_setup import OpenedModel
from shardmlx.modelfiles.model_files import open_model
from shardmlx.planning.facts.workload import only_dtype
from shardmlx.training.datasets import DataSets
from shardmlx.training.worker import TrainWorker


def find_start(
    config: TrainConfig, data: DataSets, crew: Crew[TrainWorker]
) -> tuple[RunStart, CheckpointFacts]:
    """Return how a run begins that trains, and the checkpoints that the ranks see. On rank 0.
    Raises ``UserError``."""
    seen = see_checkpoints(crew.part(SeenCheckpoints, "checkpoints"), config.checkpoints)
    start = RunStart(options=config.checkpoints, iters=config.iters)
    if not (config.checkpoints.checkpoint_dir or config.checkpoints.named):
        return start, seen
    then = _sets_then(start, seen)
    worker = crew.worker
    identity = identity_of(
        config.flat(),
        worker.opened.path,
        data.train.facts(then.get("train")),
        data.valid.facts(then.get("valid")),
        worker.model_files.read,
        _facts_of(config, worker.opened),
    )
    return replace(start, identity=identity), seen


def _sets_then(start: RunStart, seen: CheckpointFacts) -> Mapping[str, Any]:
    """Return the facts of the sets of the checkpoint that the run may go on from, by name; none
    where there is no sound one."""
    found = None if seen.source is None else seen.source.choose(start.step)[0]
    sets = None if found is None else found.manifest.identity.get("data")
    return sets if isinstance(sets, Mapping) else {}


def _facts_of(config: TrainConfig, opened: OpenedModel) -> RunFacts:
    """Return what the run's options do not say of it. Raises ``UserError``."""
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
    origin = None if spec is None else Path(spec.origin or "")
    if origin is None or not origin.is_file():
        return None
    with file_access("read", origin):
        return file_digest(origin)
