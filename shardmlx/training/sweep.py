"""Carry out ``--sweep``: plan and load adapters that train side by side on one base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardmlx.common.formatting import plural
from shardmlx.common.reporter import Reporter
from shardmlx.config.data import WantedData
from shardmlx.config.sweep import check_replicas, in_one, read_sweep
from shardmlx.config.train import TrainConfig
from shardmlx.distributed.crew import Crew
from shardmlx.engine.optimizer import build_optimizer
from shardmlx.loading.rank_setup import OpenedModel
from shardmlx.planning.job import Job
from shardmlx.planning.think import begin
from shardmlx.training.datasets import DataSets
from shardmlx.training.datasets import in_one as rows_in_one
from shardmlx.training.load_run import load_run
from shardmlx.training.plan_run import (
    PlannedRun,
    check_output,
    check_valid,
    open_for_training,
    plan_run,
    read_sets,
)
from shardmlx.training.run_start import find_start
from shardmlx.training.run_warnings import warn_of
from shardmlx.training.worker import TrainWorker


@dataclass(frozen=True, slots=True)
class PlannedSweep:
    """The runs of a sweep, by name: the plan of the ``whole``, and of each."""

    whole: PlannedRun
    runs: Mapping[str, PlannedRun]


def plan_sweep(config: TrainConfig, crew: Crew[TrainWorker], reporter: Reporter) -> PlannedSweep:
    """Plan the runs of ``config.sweep`` together. On rank 0, once all have opened the model. Raises
    ``UserError``."""
    runs = read_sweep(config)
    whole = in_one(config, runs, crew.size)
    data: dict[str, DataSets] = {}

    def read_all() -> DataSets:
        data.update(_read_data(runs, crew.worker.opened, reporter))
        distinct = {id(each): each for each in data.values()}
        return rows_in_one(list(distinct.values()))

    planned = plan_run(whole.changed(epochs=None), crew, reporter, len(runs), read_all)
    if config.epochs is not None:
        runs = {
            name: each.with_iters(each.steps_of(data[name].sizes()["train"]))
            for name, each in runs.items()
        }
        steps = [f"{plural(each.iters, 'step')} of {name}" for name, each in runs.items()]
        reporter.say(f"--epochs {config.epochs:g}: {', '.join(steps)}")
        planned = replace(planned, config=max(runs.values(), key=lambda each: each.iters))
    check_replicas(config, planned.job.mesh)
    of_runs = {name: _of_run(each, planned.job, data[name]) for name, each in runs.items()}
    return PlannedSweep(planned, of_runs)


def _read_data(
    runs: Mapping[str, TrainConfig], opened: OpenedModel, reporter: Reporter
) -> dict[str, DataSets]:
    """Return the data of each run, read once for those that ask for the same."""
    distinct: list[tuple[WantedData, DataSets]] = []
    data: dict[str, DataSets] = {}
    for name, each in runs.items():
        wanted = each.wanted_data
        found = next((read for asked, read in distinct if asked == wanted), None)
        if found is None:
            found = read_sets(each, opened, reporter)
            distinct.append((wanted, found))
        data[name] = found
    return data


def prepare_sweep(config: TrainConfig, crew: Crew[TrainWorker], reporter: Reporter) -> None:
    """Plan all runs together, and load them on all ranks. On rank 0. Raises ``UserError``."""
    opened = open_for_training(config, crew, reporter)
    sweep = plan_sweep(config, crew, reporter)
    for each in sweep.runs.values():
        check_valid(each.config, each.data.sizes())
        check_output(each.config, opened.path)
        tune = each.job.trained.way.fine_tune
        build_optimizer(tune)
        crew.all(TrainWorker.build, tune, each.config.seed)
    for name, each in sweep.runs.items():
        warn_of(each.config, each.job.mesh.dp, reporter.of_run(name, None))
        crew.all(TrainWorker.build, each.job.trained.way.fine_tune, each.config.seed)
        load_run(crew, _begun(each, crew, reporter), reporter, name)


def _begun(planned: PlannedRun, crew: Crew[TrainWorker], reporter: Reporter) -> PlannedRun:
    """Return a planned run that goes on from its own checkpoints. Raises ``UserError``."""
    if not planned.config.tune.train:
        return planned
    start, seen = find_start(planned.config, planned.data, crew)
    job = begin(planned.job, start, seen)
    for text in job.trained.resumption.warnings:
        reporter.warn(text)
    return replace(planned, job=job, identity=start.identity)


def _of_run(config: TrainConfig, whole: Job, data: DataSets) -> PlannedRun:
    """Return a run's own part of what was planned for all of them."""
    training = whole.trained
    tune = replace(config.tune, zero=training.way.fine_tune.zero)
    own = replace(
        training,
        way=replace(training.way, fine_tune=tune, loss=config.loss),
        plan=replace(training.plan, together=config.loss.together),
    )
    return PlannedRun(config, replace(whole, training=own), _own(data))


def _own(data: DataSets) -> DataSets:
    """Return the same sets, for a run to note what its own start knows of them."""
    return replace(
        data,
        train=data.train.with_own_known(),
        valid=data.valid.with_own_known(),
        test=data.test.with_own_known(),
    )
