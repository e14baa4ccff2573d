"""Compute what islands wait for on their lines, beside replicas and a pipeline. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardmlx.islands.encodings import ENCODINGS
from shardmlx.islands.protocol import SharedTensor, Terms, body_bytes
from shardmlx.planning.choice import Choice
from shardmlx.planning.memory.stages import trained_shapes
from shardmlx.planning.memory.training_setup import TrainingSetup

TERMS = Terms()
"""The usual ones of a hub."""

OVERLAP = TERMS.inner_steps - 1


class HubTraffic(NamedTuple):
    """A way to train together: what an island sends and gets at a time, ``nbytes`` each, in
    ``seconds`` each, and the shares of the time that it waits, alone and with all the overlap."""

    way: str
    nbytes: int
    seconds: float
    waiting: float
    overlapped: float


def exchanges(choice: Choice, lines: Sequence[float]) -> list[HubTraffic]:
    """Return the ways for islands that are each as planned, on ``lines`` of so many bit/s upwards:
    by encoding of islands, then with messages in each step."""
    run = choice.run
    step = choice.prediction.step_seconds
    count = len(lines)
    setup = TrainingSetup(workload=choice.facts.work(run), rows=1, length=1)
    tensors = [SharedTensor("", shape) for shape in trained_shapes(setup)]
    slowest = min(lines)
    sums = setup.workload.sum_bytes(body_bytes(tensors, "float32")) * 2 * (count - 1) / count
    # A step has the rows of all islands; one between two others sends gradients too.
    batch = run.batch.batch_size * choice.facts.lengths.longest[0]
    hidden_states = setup.message * batch * count * min(2, count - 1)
    return [
        *(
            # The hub's answer is as long, and comes when the report is there.
            _traffic(
                name,
                body_bytes(tensors, name),
                slowest,
                turns=2,
                work=TERMS.inner_steps * step,
                hidden=OVERLAP * step,
            )
            for name in ENCODINGS
        ),
        _traffic("data parallel, each step", sums, slowest, turns=1, work=step, hidden=0.0),
        _traffic("pipeline, each step", hidden_states, slowest, turns=1, work=step, hidden=step),
    ]


def _traffic(
    way: str, nbytes: float, line: float, *, turns: int, work: float, hidden: float
) -> HubTraffic:
    """Return the wait for ``turns`` of so many bytes on a line of so many bit/s, between ``work``,
    in seconds; some of it may be ``hidden`` behind other work."""
    seconds = 8 * nbytes / line
    waiting = turns * seconds
    exposed = max(0.0, waiting - hidden)
    return HubTraffic(
        way, round(nbytes), seconds, waiting / (waiting + work), exposed / (exposed + work)
    )
