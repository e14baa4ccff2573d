"""Whether what was trained is worth keeping."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from shardmlx.training.soundness import Best, Fault, Soundness
from tests.helpers.local_transport import LocalNetwork, LocalTransport

OF_RANK = ("mine.0", "mine.1")


@pytest.mark.parametrize("broken", OF_RANK)
def test_each_rank_looks_at_its_own_weights(broken: str) -> None:
    """In the place of what others own a rank has a room, in which another weight may be."""

    def work(transport: LocalTransport) -> Fault | None:
        mine = OF_RANK[transport.rank]
        value = math.nan if broken == mine else 1.0
        part = dict.fromkeys(OF_RANK, mx.array(value))
        stage: Any = SimpleNamespace(index=0, names=OF_RANK, part=part)
        return Soundness(transport, [stage], mine.__eq__, lambda: True).fault()

    faults = LocalNetwork(2).run(work)
    assert len(set(faults)) == 1
    assert faults[0] is not None
    assert faults[0].problem.startswith(f"the weight {broken} is not finite on ")
    assert "--learning-rate" in faults[0].remedy


@pytest.mark.parametrize("mover", [0, 1, None])
def test_a_weight_that_one_rank_has_moved_is_enough_for_all(mover: int | None) -> None:
    def work(transport: LocalTransport) -> bool:
        sound = Soundness(transport, [], bool, lambda: transport.rank == mover)
        assert sound.unmoved() == (
            None if mover is not None else Fault("no update was made yet", "train for more steps")
        )
        sound.count(made=True)
        return sound.unmoved() is None

    assert LocalNetwork(2).run(work) == [mover is not None] * 2


def test_a_loss_that_is_no_number_is_never_the_best() -> None:
    best, misses = Best(), []
    for step, loss in enumerate([math.nan, 3.0, math.nan, 2.0, None, math.inf], 1):
        best = best.after(step, loss)
        misses.append(best.misses)
    assert (best.loss, best.step) == (2.0, 4)
    assert misses == [1, 0, 1, 0, 1, 2]
