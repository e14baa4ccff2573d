"""Lower compute actions to a rank's real actions: add messages, leave out needless gradients.

``lower`` writes a lowered grid; ``validate`` proves that one can run. A SEND never blocks; a RECV
blocks until its SEND was made. 1F1B on two ranks, before and after::

    compute actions      r0  0F0 0F1 0B0 0B1
                         r1  1F0 1B0 1F1 1B1

    all stages trained   r0  0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0W0 0RECV_B1 0W1
                         r1  1RECV_F0 1F0 1I0 1SEND_B0 1W0 1RECV_F1 1F1 1I1 1SEND_B1 1W1

    stage 0 frozen       r0  0F0 0SEND_F0 0F1 0SEND_F1
                         r1  1RECV_F0 1F0 1W0 1RECV_F1 1F1 1W1

B became I and W, and stage 0 has no I: token ids have no gradient. If stage 0 is frozen, no stage
needs the gradient of stage 1's input, so nothing is sent back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise, product
from types import MappingProxyType

from shardmlx.pipeline.actions import COMPUTE, Action, Grid, Kind

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W
SEND_F, RECV_F, SEND_B, RECV_B = Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B

Kinds = Collection[Kind]
"""Kinds of actions of one stage after lowering."""

_RECEIVES = (RECV_F, RECV_B)

_EXPANSION: Mapping[Kind, tuple[Kind, ...]] = MappingProxyType(
    {
        F: (RECV_F, F, SEND_F),
        B: (RECV_B, I, SEND_B, W),
        I: (RECV_B, I, SEND_B),
        W: (RECV_B, W),
    }
)
"""Actions that a compute action becomes, as far as its stage has these kinds."""


class ScheduleError(ValueError):
    """A grid that cannot run, with the faulty action."""


def gradient_kinds(trainable: Sequence[bool]) -> tuple[frozenset[Kind], ...]:
    """Return which of I and W each stage computes, given whether it has trained weights.

    The rule of frozen stages, for engine and cost model: a stage computes the gradient of its input
    (I) only if a stage below it has trained weights, and the gradient of its weights (W) only if it
    has trained weights itself. Stage 0 reads token ids, which have no gradient.
    """
    first = next((stage for stage, trained in enumerate(trainable) if trained), len(trainable))
    return tuple(
        frozenset(({I} if stage > first else set()) | ({W} if trained else set()))
        for stage, trained in enumerate(trainable)
    )


def lower(grid: Grid, placement: Sequence[int], trainable: Sequence[bool] | None = None) -> Grid:
    """Leave out needless gradients, then put in the messages between ranks.

    B becomes I, then W, so that the gradient leaves for the waiting stage below before the weights'
    gradients are computed. A lowered grid has no B.

    ``placement[s]`` is the rank of stage s, ``trainable[s]`` whether it has trained weights (by
    default all have). A SEND stands right after the action that makes its content, a RECV right
    before the first that needs it.
    """
    expansions = [
        {kind: _expand(kind, kinds) for kind in _EXPANSION}
        for kinds in _stage_kinds(placement, trainable)
    ]

    def rank_actions(actions: Sequence[Action]) -> Iterator[Action]:
        received: set[tuple[int, int]] = set()
        for action in actions:
            stage, kind, microbatch = action
            for part in expansions[stage][kind]:
                if part is RECV_B:
                    if (stage, microbatch) in received:  # I has received it before W
                        continue
                    received.add((stage, microbatch))
                yield action if part is kind else Action(stage, part, microbatch)

    return tuple(tuple(rank_actions(actions)) for actions in grid)


def _expand(kind: Kind, kinds: Kinds) -> tuple[Kind, ...]:
    """Return the actions of a stage of these ``kinds`` for a compute action."""
    parts = tuple(part for part in _EXPANSION[kind] if part in kinds)
    return parts if any(part in COMPUTE for part in parts) else ()


def _stage_kinds(placement: Sequence[int], trainable: Sequence[bool] | None) -> list[Kinds]:
    """Return the kinds of actions of each stage: forward, gradients, and messages between ranks."""
    if trainable is None:
        trainable = [True] * len(placement)
    gradients = gradient_kinds(trainable)
    kinds = [{F, *own} for own in gradients]
    for below, above in pairwise(range(len(placement))):
        if placement[below] != placement[above]:
            kinds[below].add(SEND_F)
            kinds[above].add(RECV_F)
            if I in gradients[above]:
                kinds[above].add(SEND_B)
                kinds[below].add(RECV_B)
    return list(kinds)


def validate(grid: Grid, placement: Sequence[int], trainable: Sequence[bool] | None = None) -> None:
    """Prove that a lowered grid does every action once, in order, and never deadlocks.

    Every action that ``placement`` and ``trainable`` require is there once, on its rank, after its
    predecessors; F and W take the micro-batches of a stage in ascending order; every RECV has its
    SEND; the grid runs to its end with sends that never block. Linear in the number of actions. The
    micro-batches are those that the grid names. Raises ``ScheduleError``.
    """
    needs = _needs(_stage_kinds(placement, trainable))
    done = {(stage, kind, -1) for stage in range(len(placement)) for kind in (F, W)}
    waiting: dict[tuple[int, Kind, int], int] = {}  # the rank that waits for a SEND
    reached = [0] * len(grid)

    def run(rank: int) -> Iterator[int]:
        """Go on with a rank until it waits or ends; yield ranks whose RECV it serves."""
        for index in range(reached[rank], len(grid[rank])):
            action = grid[rank][index]
            stage, kind, microbatch = action
            needed = needs.get((stage, kind))
            where = f"rank {rank}, action {index}: {action}"
            if needed is None or placement[stage] != rank:
                raise ScheduleError(f"{where} is not wanted here")
            for other, what, back in needed:
                before = (other, what, microbatch - back)
                if before not in done:
                    if kind in _RECEIVES:
                        waiting[before] = rank
                        return
                    raise ScheduleError(f"{where} comes without {Action(*before)} before it")
            if action in done:
                raise ScheduleError(f"{where} is done a second time")
            done.add(action)
            reached[rank] = index + 1
            if action in waiting:
                yield waiting.pop(action)

    ready = deque(range(len(grid)))
    while ready:
        ready.extend(run(ready.popleft()))
    if waiting:
        stuck = [f"rank {rank} waits for {Action(*send)}" for send, rank in waiting.items()]
        raise ScheduleError(f"deadlock: {', '.join(sorted(stuck))}")
    last = max((action.microbatch for actions in grid for action in actions), default=0)
    wanted = [(*key, microbatch) for key, microbatch in product(needs, range(last + 1))]
    missing = next((Action(*each) for each in wanted if each not in done), None)
    if missing is not None:
        raise ScheduleError(f"rank {placement[missing.stage]}: {missing} is missing")


def _needs(
    kinds: Sequence[Kinds],
) -> Mapping[tuple[int, Kind], Sequence[tuple[int, Kind, int]]]:
    """Return, for the actions of each stage and kind, those that come before: of which stage, of
    which kind, and how many micro-batches earlier."""
    needs: dict[tuple[int, Kind], list[tuple[int, Kind, int]]] = {}
    for stage, own in enumerate(kinds):
        output = (stage, F, 0)
        # Between stages of one rank there is no message.
        activation = (stage, RECV_F, 0) if RECV_F in own else (stage - 1, F, 0)
        gradient = (stage, RECV_B, 0) if RECV_B in own else (stage + 1, I, 0)
        of_kind = {
            RECV_F: [(stage - 1, SEND_F, 0)],
            F: [activation, (stage, F, 1)],
            SEND_F: [output],
            RECV_B: [(stage + 1, SEND_B, 0)],
            I: [output, gradient],
            W: [output, gradient, (stage, I, 0), (stage, W, 1)],
            SEND_B: [(stage, I, 0)],
        }
        needs |= {(stage, kind): before for kind, before in of_kind.items() if kind in own}
    return {key: [each for each in needs[key] if each[:2] in needs] for key in needs}
