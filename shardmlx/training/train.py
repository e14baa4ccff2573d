"""Train the runs that a rank has loaded, test them, and compare several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from shardmlx.common.reporter import Reporter
from shardmlx.config.sweep import DECIDE_LOSS
from shardmlx.errors import AgreedFailure
from shardmlx.training.setup import TrainingRun
from shardmlx.training.together import train_together
from shardmlx.training.trainer import Trainer


def train(runs: Sequence[TrainingRun], reporter: Reporter) -> None:
    """Train the runs side by side, and test them, as their options say. All ranks must call it."""
    trainers = [Trainer(run) for run in runs]
    failures: list[AgreedFailure | None] = [None] * len(runs)
    if runs[0].planned.config.train:
        try:
            failures = train_together([trainer.steps() for trainer in trainers])
        finally:
            for run in runs:
                run.release()
    if runs[0].name:
        named = {run.name: run for run in runs}
        _compare(named, dict(zip(named, trainers, strict=True)), failures, reporter)
    for trainer, failure in zip(trainers, failures, strict=True):
        if trainer.tests and failure is None:
            trainer.test()


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
