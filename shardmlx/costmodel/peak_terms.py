"""Compute the peak of a stage alone on its rank, for many stages. No MLX, no MPI.

``rank_peak`` sums multiples of a stage's numbers. The multiples follow from the order of actions
alone, so they are worked out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

from shardmlx.costmodel.memory import StageMemory, TrainingSetup, rank_peak
from shardmlx.engine.buffers import PREPOSTED
from shardmlx.pipeline.actions import Action, Kind

NUMBERS = (
    *("after_forward", "after_input", "during_forward", "during_input", "during_weight"),
    *("gradients", "message"),
)
"""Names of a ``StageMemory``'s numbers in a term."""

Term = tuple[int, ...]
"""Multiple of each number in a sum."""

_UNITS: dict[str, Term] = {name: tuple(int(name == other) for other in NUMBERS) for name in NUMBERS}
_NONE: Term = (0,) * len(NUMBERS)


def peak_terms(
    actions: Sequence[Action], *, has_input_gradient: bool, is_trained: bool, sums_at_input: bool
) -> list[Term]:
    """Return the sums, the largest of which is a stage's peak above its resident bytes.

    ``actions`` are all of one stage; with ``sums_at_input`` its gradients are summed at I already.
    Sums that another one always reaches are left out.
    """
    to_receive = sum(action.kind is Kind.RECV_F for action in actions)
    held: dict[int, Term] = {}
    total = sums = _NONE
    sent = False
    found: set[Term] = set()
    for action in actions:
        own = held.get(action.microbatch, _NONE)
        before = left = own
        passing, summed = _NONE, sums
        match action.kind:
            case Kind.F:
                before = left = _UNITS["after_forward"]
                passing = _UNITS["during_forward"]
            case Kind.I if has_input_gradient:
                passing, left = _UNITS["during_input"], _NONE
                if is_trained:
                    left = _UNITS["after_input"]
            case Kind.W:
                passing, left = _UNITS["during_weight"], _NONE
            case Kind.RECV_F:
                to_receive -= 1
            case Kind.SEND_F | Kind.SEND_B:
                sent = True
        if action.kind is Kind.W or (action.kind is Kind.I and sums_at_input):
            sums = _UNITS["gradients"]
        total = _sum(total, own, -1)
        others = _sum(_sum(total, passing), _UNITS["message"], min(PREPOSTED, to_receive) + sent)
        found |= {_sum(others, _sum(summed, before)), _sum(others, _sum(sums, left))}
        total = _sum(total, left)
        held[action.microbatch] = left
    return [term for term in found if not any(_passes(other, term) for other in found)]


def peak_of(terms: Sequence[Term], stage: StageMemory, setup: TrainingSetup) -> int:
    """Return the peak that ``rank_peak`` gives a stage whose actions have these ``terms``."""
    numbers = [getattr(stage, name) for name in NUMBERS]
    most = max((sum(map(mul, term, numbers)) for term in terms), default=0)
    updating = stage.gradients + stage.during_update
    return rank_peak((), {0: stage}, setup) - updating + max(most, updating)


def _sum(term: Term, other: Term, times: int = 1) -> Term:
    return tuple(a + times * b for a, b in zip(term, other, strict=True))


def _passes(term: Term, other: Term) -> bool:
    """Return whether a term is at least another one, and not the same."""
    return term != other and all(a >= b for a, b in zip(term, other, strict=True))
