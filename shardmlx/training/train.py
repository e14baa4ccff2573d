"""Train the runs that all ranks have loaded, side by side on one set of frozen weights, test them,
and compare several: rank 0's part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from shardmlx.common.reporter import Reporter
from shardmlx.config.sweep import DECIDE_LOSS
from shardmlx.distributed.crew import Crew
from shardmlx.errors import AgreedFailure, Stopped
from shardmlx.training.evaluation import StopRequested
from shardmlx.training.report import StepResult
from shardmlx.training.run_worker import RunWorker, StepOrder
from shardmlx.training.setup import TrainingRun
from shardmlx.training.trainer import Trainer
from shardmlx.training.worker import TrainWorker

T = TypeVar("T")


def train(crew: Crew[TrainWorker]) -> None:
    """Train the runs that all ranks have loaded, side by side, and test them, as their options say.
    On rank 0. Raises ``Stopped`` after a signal, when all is saved, and ``AgreedFailure`` where no
    run could go on."""
    workers = crew.worker.runs
    trainers = [Trainer(crew.part(RunWorker, "runs", i)) for i in range(len(workers))]
    runs = [worker.run for worker in workers]
    failures: list[AgreedFailure | None] = [None] * len(runs)
    if runs[0].config.tune.train:
        try:
            with crew.promptly():
                failures = train_together(crew, trainers)
        finally:
            for trainer in trainers:
                trainer.close()
    if runs[0].name:
        named = {run.name: run for run in runs}
        by_name = dict(zip(named, trainers, strict=True))
        _compare(named, by_name, failures, crew.worker.reporter)
    for trainer, failure in zip(trainers, failures, strict=True):
        if trainer.tests and failure is None:
            trainer.test()


def train_together(
    crew: Crew[TrainWorker], trainers: Sequence[Trainer]
) -> list[AgreedFailure | None]:
    """Train to the end of all runs, whose micro-batches fill each other's bubbles; return why any
    of them failed, which ends no other. Raise the failure if all did; ``Stopped`` after a signal,
    when all have saved what they have."""
    failures: list[AgreedFailure | None] = [None] * len(trainers)
    active = set(range(len(trainers)))

    def attempt(number: int, work: Callable[[], T]) -> T | None:
        """Do ``work`` of a run, which is over if it fails."""
        try:
            return work()
        except AgreedFailure as failure:
            failures[number] = failure
            trainers[number].fail(failure)
            active.discard(number)
            return None

    for number in sorted(active):
        attempt(number, trainers[number].start)
    while active:
        orders: dict[int, list[StepOrder]] = {}
        try:
            for number in sorted(active):
                order = attempt(number, trainers[number].next_order)
                if order is not None:
                    orders[number] = order
                elif number in active:
                    active.discard(number)
                    attempt(number, trainers[number].finish)
        except StopRequested as request:
            stops = [trainers[number].stop(request.number) for number in sorted(active)]
            raise Stopped(request.number, "; ".join(map(str, stops))) from None
        if orders:
            pending = crew.begin_each(TrainWorker.step, _args_of_ranks(list(orders.items())))
            for place, number in enumerate(orders):
                attempt(number, partial(trainers[number].take, StepResult(pending, place)))
    if all(failures):
        raise failures[0] or AssertionError("there is a run")
    return failures


def _args_of_ranks(
    orders: Sequence[tuple[int, Sequence[StepOrder]]],
) -> list[tuple[list[tuple[int, StepOrder]]]]:
    """Return the steps of each rank, by the numbers of their runs; equal ones are one object."""
    numbers = [number for number, _ in orders]
    found: dict[tuple[int, ...], tuple[list[tuple[int, StepOrder]]]] = {}
    of_ranks = []
    for steps in zip(*(of_run for _, of_run in orders), strict=True):
        args = (list(zip(numbers, steps, strict=True)),)
        of_ranks.append(found.setdefault(tuple(map(id, steps)), args))
    return of_ranks


def _compare(
    runs: Mapping[str, TrainingRun],
    trainers: Mapping[str, Trainer],
    failures: Sequence[AgreedFailure | None],
    reporter: Reporter,
) -> None:
    """Show the validation losses of all runs, and name the best of those with one objective and
    the same rows. Not collective."""
    rows = []
    found = {}
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
            options = runs[name].config.flat()
            means = str([options[option] for option in DECIDE_LOSS])
            comparable[means][name] = trainer.best.loss
    winners = []
    for group in comparable.values():
        loss, winner = min((loss, name) for name, loss in group.items())
        winners.append(winner)
        of = "" if len(comparable) == 1 else f" of {', '.join(group)}"
        reporter.say(f"The best{of} is {winner}, with a validation loss of {loss:.4f}")
    reporter.event("sweep", {"runs": found, "best": winners})
