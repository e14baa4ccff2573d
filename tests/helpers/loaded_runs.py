"""Training runs that are loaded, on ranks that come together for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from shardmlx.common.reporter import Reporter
from shardmlx.config.train import LINE, TrainConfig
from shardmlx.distributed.crew import Crew, lead
from shardmlx.distributed.transport import Transport
from shardmlx.training.command import prepare_training, train_model
from shardmlx.training.run_worker import RunWorker
from shardmlx.training.setup import TrainingRun
from shardmlx.training.sweep import prepare_sweep
from shardmlx.training.train import train_together
from shardmlx.training.trainer import Trainer
from shardmlx.training.worker import TrainWorker
from tests.helpers.local_transport import alone
from tests.helpers.small_models import limits_kept

T = TypeVar("T")
QUIET = Reporter(quiet=True)


def with_loaded_runs(
    config: TrainConfig,
    transport: Transport,
    work: Callable[[Crew[TrainWorker]], T],
    reporter: Reporter = QUIET,
) -> T | None:
    """Do ``work`` on rank 0, once the runs are loaded on all ranks. All ranks must call it."""

    def load(crew: Crew[TrainWorker]) -> T:
        prepare = prepare_training if config.sweep is None else prepare_sweep
        prepare(config, crew, reporter)
        return work(crew)

    with closing(TrainWorker(transport, reporter)) as worker:
        return lead(transport, worker, load)


def train_alone(*flags: str | Path) -> None:
    """Run ``shardmlx train FLAGS`` as a single rank, in this process."""
    config = LINE.load(list(map(str, flags)))
    with limits_kept():
        alone(lambda rank: train_model(config, rank))


def loaded_runs(config: TrainConfig, transport: Transport) -> list[TrainingRun]:
    """Return this rank's runs, loaded: several of a sweep. All ranks must call it."""
    worker = TrainWorker(transport, QUIET)

    def load(crew: Crew[TrainWorker]) -> None:
        prepare = prepare_training if config.sweep is None else prepare_sweep
        prepare(config, crew, QUIET)

    with closing(worker):
        lead(transport, worker, load)
    return [each.run for each in worker.runs]


def trained_run(
    config: TrainConfig, transport: Transport, reporter: Reporter = QUIET
) -> Trainer | None:
    """Train a run to its end, and test it if it asks for it; return its trainer on rank 0. All
    ranks must call it."""

    def work(crew: Crew[TrainWorker]) -> Trainer:
        crew.worker.report_to(reporter)
        trainer = Trainer(crew.part(RunWorker, "runs", 0))
        train_together(crew, [trainer])
        if config.sets.test:
            trainer.test()
        return trainer

    return with_loaded_runs(config, transport, work, reporter)
