"""Training runs that are loaded and not begun, on ranks that come together for it."""

from __future__ import annotations

from shardmlx.common.reporter import Reporter
from shardmlx.config.train import TrainConfig
from shardmlx.distributed.crew import Crew, lead
from shardmlx.distributed.transport import Transport
from shardmlx.training.command import prepare_training
from shardmlx.training.setup import TrainingRun
from shardmlx.training.sweep import prepare_sweep
from shardmlx.training.worker import TrainWorker

QUIET = Reporter(quiet=True)


def loaded_runs(
    config: TrainConfig, transport: Transport, reporter: Reporter = QUIET
) -> list[TrainingRun]:
    """Return this rank's runs, loaded: several of a sweep. All ranks must call it. Their
    directories are theirs until they are released."""

    def work(crew: Crew[TrainWorker]) -> None:
        prepare = prepare_training if config.sweep is None else prepare_sweep
        prepare(config, crew, reporter)

    worker = TrainWorker(transport, reporter)
    try:
        lead(transport, worker, work)
    except BaseException:
        worker.close()
        raise
    return worker.runs


def loaded_run(
    config: TrainConfig, transport: Transport, reporter: Reporter = QUIET
) -> TrainingRun:
    """Return this rank's run, loaded. All ranks must call it."""
    (run,) = loaded_runs(config, transport, reporter)
    return run
