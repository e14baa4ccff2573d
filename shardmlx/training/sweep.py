"""Carry out ``--sweep``: train adapters side by side on one base, and compare them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from shardmlx.common.formatting import plural
from shardmlx.common.reporter import Reporter
from shardmlx.config.data import DataOptions
from shardmlx.config.objective import ObjectiveOptions
from shardmlx.config.specs import FineTune
from shardmlx.config.sweep import DECIDE_LOSS, in_one, read_sweep
from shardmlx.config.train import TrainConfig
from shardmlx.distributed.agreement import AgreedError, from_rank_0, on_all_ranks, on_rank_0
from shardmlx.distributed.messages import MOST_RUNS
from shardmlx.distributed.transport import Transport
from shardmlx.engine.batches import Samples
from shardmlx.engine.objectives import Objective
from shardmlx.engine.optimizer import build_optimizer
from shardmlx.errors import AgreedFailure, UserError
from shardmlx.loading.build import build_model, cut
from shardmlx.loading.rank_setup import OpenedModel
from shardmlx.training.datasets import DataSets
from shardmlx.training.datasets import in_one as rows_in_one
from shardmlx.training.planned_run import (
    PlannedRun,
    check_output,
    check_valid,
    open_for_training,
    plan_run,
    read_sets,
)
from shardmlx.training.setup import TrainingRun, load_run
from shardmlx.training.together import train_together
from shardmlx.training.trainer import Trainer


def train_sweep(config: TrainConfig, transport: Transport, reporter: Reporter) -> None:
    """Train the runs of ``config.sweep``, and test them if asked. Collective."""
    jobs = prepare_sweep(config, transport, reporter)
    trainers = {name: Trainer(job) for name, job in jobs.items()}
    failures = train_together([trainer.steps() for trainer in trainers.values()])
    _compare(jobs, trainers, failures, reporter)
    for trainer, failure in zip(trainers.values(), failures, strict=True):
        if config.test and failure is None:
            trainer.test()


def plan_sweep(
    config: TrainConfig, transport: Transport, reporter: Reporter, opened: OpenedModel
) -> tuple[PlannedRun, dict[str, TrainConfig], dict[str, DataSets], dict[str, Mapping[str, int]]]:
    """Return the plan of all runs together, the options of each, on rank 0 the data of each, and
    the sizes of these. Collective."""

    def read() -> dict[str, TrainConfig]:
        runs = read_sweep(config)
        if len(runs) > MOST_RUNS:
            raise UserError(
                f"{config.sweep} has {len(runs)} runs", f"train at most {MOST_RUNS} at once"
            )
        return runs

    runs = from_rank_0(transport, "reading the sweep", read)
    most = transport.size // config.tensor_parallel
    whole = in_one(config, runs)
    if whole.stage_map is None and whole.data_parallel is None and whole.pipeline_stages is None:
        whole = replace(whole, pipeline_stages=most, lr_schedule=whole.asked_lr_schedule)
    sets: dict[str, DataSets] = {}

    def read_data() -> DataSets:
        distinct: list[tuple[DataOptions, DataSets]] = []
        for name, each in runs.items():
            options = DataOptions.of(each)
            data = next((read for asked, read in distinct if asked == options), None)
            if data is None:
                data = read_sets(each, opened, reporter)
                distinct.append((options, data))
            sets[name] = data
        return rows_in_one([data for _, data in distinct])

    whole = replace(whole, epochs=None)
    planned = plan_run(whole, transport, reporter, opened, len(runs), read_data)
    sizes = transport.broadcast({name: each.sizes() for name, each in sets.items()}, "data")
    if config.epochs is not None:

        def count_steps() -> dict[str, TrainConfig]:
            steps = {name: each.steps_of(sizes[name]["train"]) for name, each in runs.items()}
            return {name: each.with_iters(steps[name]) for name, each in runs.items()}

        runs = on_all_ranks(transport, "counting the steps", count_steps)
        steps = [f"{plural(each.iters, 'step')} of {name}" for name, each in runs.items()]
        reporter.say(f"--epochs {config.epochs:g}: {', '.join(steps)}")
        planned = replace(planned, config=max(runs.values(), key=lambda each: each.iters))
    if (replicas := planned.plan.mesh.dp) > 1:
        raise AgreedError(
            f"--sweep {config.sweep}: adapters train side by side in one pipeline, and there are "
            f"{replicas} replicas",
            f"give --pipeline-stages {most}",
        )
    return planned, runs, sets, sizes


def prepare_sweep(
    config: TrainConfig, transport: Transport, reporter: Reporter
) -> dict[str, TrainingRun]:
    """Plan all runs together, and load them. Collective."""
    jobs: dict[str, TrainingRun] = {}
    with open_for_training(config, transport, reporter) as opened:
        whole, runs, sets, sizes = plan_sweep(config, transport, reporter, opened)
        planned: dict[str, PlannedRun] = {}
        for name, options in runs.items():
            check_valid(options, sizes[name])
            plan = partial(_of_run, options, whole, opened, sets.get(name), sizes[name])
            planned[name] = on_all_ranks(transport, f"planning {name}", plan)
            check = partial(check_output, options, opened.path)
            on_rank_0(transport, "checking the output", check)
        for name, each in planned.items():
            file = each.config.metrics_file
            metrics = Path(file) if file else None
            own = reporter.of_run(name, metrics)
            before = list(jobs.values())
            job = load_run(each, transport, own if before else reporter, opened, before)
            jobs[name] = replace(job, reporter=own)
    return jobs


def _of_run(
    config: TrainConfig,
    whole: PlannedRun,
    opened: OpenedModel,
    data: DataSets | None,
    sizes: Mapping[str, int],
) -> PlannedRun:
    """Return a run's own part of what was planned for all of them. Raises ``UserError``."""
    tune = replace(FineTune.of(config), zero=whole.way.fine_tune.zero)
    build_optimizer(tune)
    model, _ = build_model(opened.path, tune, config.seed, opened.adapters)
    return replace(
        whole,
        config=config,
        way=replace(
            whole.way, fine_tune=tune, batch=replace(whole.way.batch, objective=config.objective)
        ),
        objective=Objective.of(ObjectiveOptions.of(config)),
        plan=replace(whole.plan, together=config.together),
        slices=cut(model, whole.plan.stage_map.partition.ranges),
        data=None if data is None else _own(data),
        sizes=sizes,
    )


def _own(data: DataSets) -> DataSets:
    """Return the same sets, for a run to note what its own start knows of them."""

    def copy(samples: Samples) -> Samples:
        known = None if samples.known is None else samples.known.copy()
        return Samples(samples.tokens, samples.bounds, known)

    return replace(data, train=copy(data.train), valid=copy(data.valid), test=copy(data.test))


def _compare(
    jobs: Mapping[str, TrainingRun],
    trainers: Mapping[str, Trainer],
    failures: Sequence[AgreedFailure | None],
    reporter: Reporter,
) -> None:
    """Show the validation losses of all runs, and name the best of those with one objective and
    the same rows. Not collective."""
    rows, found = [], {}
    for (name, trainer), failure in zip(trainers.items(), failures, strict=True):
        best = trainer.best
        losses = {"last": None if failure else best.last, "best": best.loss}
        shown = ["-" if loss is None else f"{loss:.4f}" for loss in losses.values()]
        rows.append((name, *shown, str(best.step or "-"), str(failure or trainer.place)))
        found[name] = {**losses, "step": best.step, "failure": failure and str(failure)}
    reporter.table(("run", "last val loss", "best val loss", "before step", ""), rows)
    comparable: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for name, trainer in trainers.items():
        if trainer.best.loss is not None:
            means = str([getattr(jobs[name].planned.config, option) for option in DECIDE_LOSS])
            comparable[means][name] = trainer.best.loss
    winners = []
    for group in comparable.values():
        loss, winner = min((loss, name) for name, loss in group.items())
        winners.append(winner)
        of = "" if len(comparable) == 1 else f" of {', '.join(group)}"
        reporter.say(f"The best{of} is {winner}, with a validation loss of {loss:.4f}")
    reporter.event("sweep", {"runs": found, "best": winners})
