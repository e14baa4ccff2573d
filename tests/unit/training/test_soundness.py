"""Whether what was trained is worth keeping."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import mlx.core as mx
import pytest

from shardmlx.distributed.crew import Crew, lead
from shardmlx.training.nonfinite import nonfinite_weight
from shardmlx.training.soundness import Best, Fault, Soundness
from tests.helpers.local_transport import LocalNetwork, LocalTransport

T = TypeVar("T")

OF_RANK = ("mine.0", "mine.1")


class Rank:
    """The part of a rank in a run, as far as its weights are asked for."""

    def __init__(self, transport: LocalTransport, *, broken: str = "", moves: bool = True) -> None:
        self._transport = transport
        part = {name: mx.array(math.nan if name == broken else 1.0) for name in OF_RANK}
        self._stage: Any = SimpleNamespace(index=0, names=OF_RANK, part=part)
        self._moves = moves

    def nonfinite_weight(self) -> str | None:
        mine = OF_RANK[self._transport.rank]
        return nonfinite_weight([self._stage], mine.__eq__, self._transport)

    def has_moved(self) -> bool:
        return self._moves


def asked(work: Callable[[Soundness], T], ranks: Callable[[LocalTransport], Rank]) -> T:
    """Return what rank 0 finds, which asks two ranks."""

    def run(transport: LocalTransport) -> T | None:
        def on_rank_0(crew: Crew[Any]) -> T:
            return work(Soundness(crew))

        return lead(transport, ranks(transport), on_rank_0)

    found: T
    found, _ = LocalNetwork(2).run(run)
    return found


@pytest.mark.parametrize("broken", OF_RANK)
def test_each_rank_looks_at_its_own_weights(broken: str) -> None:
    """In the place of what others own a rank has a room, in which another weight may be."""
    fault = asked(Soundness.fault, lambda transport: Rank(transport, broken=broken))
    assert fault is not None
    assert fault.problem.startswith(f"the weight {broken} is not finite on ")
    assert "--learning-rate" in fault.remedy


@pytest.mark.parametrize("mover", [0, 1, None])
def test_a_weight_that_one_rank_has_moved_is_enough_for_all(mover: int | None) -> None:
    def work(sound: Soundness) -> tuple[Fault | None, Fault | None]:
        before = sound.unmoved()
        sound.count(made=True)
        return before, sound.unmoved()

    before, after = asked(work, lambda each: Rank(each, moves=each.rank == mover))
    if mover is None:
        assert before == Fault("no update was made yet", "train for more steps")
        assert after is not None
    else:
        assert (before, after) == (None, None)


def test_a_loss_that_is_no_number_is_never_the_best() -> None:
    best, misses = Best(), []
    for step, loss in enumerate([math.nan, 3.0, math.nan, 2.0, None, math.inf], 1):
        best = best.after(step, loss)
        misses.append(best.misses)
    assert (best.loss, best.step) == (2.0, 4)
    assert misses == [1, 0, 1, 0, 1, 2]
