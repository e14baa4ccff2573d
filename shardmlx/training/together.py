"""Train runs side by side, on one set of frozen weights: micro-batches of one fill the bubble of
another.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import suppress

from shardmlx.distributed.agreement import AgreedError
from shardmlx.engine.engine import Results, Step
from shardmlx.engine.trace import Span
from shardmlx.errors import AgreedFailure, Stopped
from shardmlx.training.batch_feed import StopRequested

Run = Generator[Step, Results | None, None]
"""A run up to its end: it yields each step of its engine, and is sent the results."""


def train_together(runs: Sequence[Run]) -> list[AgreedFailure | None]:
    """Train to the end of all runs, and return why any of them failed, which ends no other; raise
    the failure if all did. All ranks must call it.

    Between two steps the runs take turns, each alone with the transport. If a signal stops one,
    all save what they have.
    """
    failures: list[AgreedFailure | None] = [None] * len(runs)
    given: dict[int, Results | None] = dict.fromkeys(range(len(runs)))
    while given:
        steps: dict[int, Step] = {}
        stopped: list[Stopped] = []
        for number, results in given.items():
            try:
                steps[number] = runs[number].send(results)
            except StopIteration:
                continue
            except AgreedFailure as failure:
                failures[number] = failure
            except Stopped as stop:
                stopped.append(stop)
            except AgreedError as error:
                # The messages of the other runs that are under way are received then.
                for run in runs:
                    with suppress(AgreedError):
                        run.throw(error)
                raise
        if stopped:
            raise _all_stopped([runs[number] for number in steps], stopped)
        given = dict(zip(steps, _make(list(steps.values())), strict=True))
    if all(failures):
        raise failures[0] or AssertionError("there is a run")
    return failures


def _make(steps: Sequence[Step]) -> list[Results]:
    """Make the steps in one schedule; every run's recorder gets the events of all."""
    if not steps:
        return []
    engine, others = steps[0].engine, [step.engine for step in steps[1:]]
    begin = len(engine.recorder.events)
    with engine.recorder.span(Span.STEP, str(engine.transport.activity)):
        results = engine.train_steps(steps)
    for other in others:
        other.recorder.events += engine.recorder.events[begin:]
    return results


def _all_stopped(others: Sequence[Run], stopped: list[Stopped]) -> Stopped:
    """Stop the runs that have heard of no signal yet; return what all of them say."""
    for run in others:
        try:
            run.throw(StopRequested(stopped[0].signal))
        except Stopped as stop:
            stopped.append(stop)
    return Stopped(stopped[0].signal, "; ".join(map(str, stopped)))
