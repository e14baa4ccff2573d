"""Compare a plan with the same training on each of its machines alone. No MLX, no MPI."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardmlx.common.formatting import duration, gibibytes
from shardmlx.config.specs import LayoutOptions, RunSpec
from shardmlx.errors import UserError
from shardmlx.partitioners import DoesNotFitError
from shardmlx.planning.choice import CLEARLY, Choice, choose
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.training_plan import facts_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A machine that trains alone: the best way, or None and the bytes that it lacks."""

    host: str
    choice: Choice | None = None
    lacks: float = 0.0


def each_alone(run: RunSpec, machines: Sequence[Machine], backend: str) -> tuple[Alone, ...]:
    """Return what becomes of a run on each machine alone, equal ones once, whatever its options say
    of how several ranks divide the work; none for one machine."""
    if len(machines) == 1:
        return ()
    own = replace(
        run,
        layout=LayoutOptions(tensor_parallel=1),
        fine_tune=replace(run.fine_tune, zero=None),
        batch=replace(run.batch, replica_rows=None),
    )
    kinds = {replace(each, host="", slots=1): each for each in reversed(machines)}
    found = []
    for machine in reversed(list(kinds.values())):
        try:
            facts = facts_for(own, [replace(machine, slots=1)], backend)
            found.append(Alone(host=machine.host, choice=choose(own, facts.of_training)))
        except DoesNotFitError as error:
            found.append(Alone(host=machine.host, lacks=error.shortage))
        except UserError:
            continue  # for instance, times were measured for all machines together
    return tuple(found)


def compared(choice: Choice, alone: Sequence[Alone]) -> list[str]:
    """Return in words what the machines gain together, or that none holds the run alone."""
    fitting = [each for each in alone if each.choice is not None]
    if not alone:
        return []
    if not fitting:
        nearest = min(alone, key=lambda each: each.lacks)
        return [f"no machine holds it alone: {nearest.host} lacks {gibibytes(nearest.lacks)}"]
    has_times = choice.facts.cluster.unit == "seconds"
    best = min(fitting, key=lambda each: _seconds(each) if has_times else _peak(each))
    together = max(rank.peak for rank in choice.prediction.ranks)
    memory = f"{gibibytes(_peak(best))} alone, {gibibytes(together)} on the fullest rank together"
    if not has_times:
        return [f"{best.host} holds it alone: {memory}"]
    seconds = _seconds(best)
    ratio = seconds / choice.prediction.step_seconds
    worth = f"{ratio:.2f} times as long" if ratio >= 1 else f"{1 / ratio:.2f} times as fast"
    lines = [f"{best.host} alone: step {duration(seconds)}, {worth}"]
    if ratio < CLEARLY:
        reason = "the reason left is memory" if together < _peak(best) else "no memory either"
        lines.append(f"the other machines gain little time, and {reason}: {memory}")
    return lines


def _seconds(alone: Alone) -> float:
    return math.inf if alone.choice is None else alone.choice.prediction.step_seconds


def _peak(alone: Alone) -> float:
    return 0.0 if alone.choice is None else alone.choice.prediction.ranks[0].peak
