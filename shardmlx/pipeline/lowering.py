"""From compute actions to what a rank really runs: messages added, needless gradients left out.

``lower`` and ``forward_only`` write lowered grids; ``validate`` proves that one can run. A SEND
never blocks; a RECV blocks until its SEND was made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

from shardmlx.pipeline.actions import Action, Grid, Kind, collector_paused

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W
SEND_F, RECV_F, SEND_B, RECV_B = Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B


class ScheduleError(ValueError):
    """A grid that cannot run: one line that says why, then the grid with a caret at the cell."""


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


@collector_paused()
def lower(grid: Grid, placement: Sequence[int], trainable: Sequence[bool] | None = None) -> Grid:
    """Leave out the gradients nobody needs, then put in the messages between ranks.

    B becomes I, then W: so the gradient leaves for the stage below, which waits for it, before
    the weights are turned to. A lowered grid has no B.

    ``placement[s]`` is the rank of stage s, ``trainable[s]`` whether it has trained weights (by
    default all have). A SEND stands right after the action that makes its content, a RECV right
    before the first that needs it. Raises ``ValueError`` for a grid that has messages already.
    """
    parts = [stage.parts() for stage in _stages(grid, placement, trainable)]

    def rank_actions(actions: Sequence[Action]) -> Iterator[Action]:
        received: set[tuple[int, int]] = set()
        for action in actions:
            stage, kind, microbatch = action.stage, action.kind, action.microbatch
            if stage >= len(parts):
                raise ValueError(f"{action} is of no stage: the placement has {len(parts)}")
            if kind not in parts[stage]:
                raise ValueError(f"{action} is a message: the grid is lowered already")
            for part in parts[stage][kind]:
                if part is RECV_B:
                    if (stage, microbatch) in received:
                        continue
                    received.add((stage, microbatch))
                yield action if part is kind else Action(stage, part, microbatch)

    return tuple(tuple(rank_actions(actions)) for actions in grid)


def forward_only(placement: Sequence[int], pp: int, microbatches: int) -> Grid:
    """Lowered grid of forwards alone, for evaluation.

    Each micro-batch in turn takes, stage after stage, the first slot that its rank has free. The
    slots are a valid timetable, so keeping their order on each rank can never deadlock.
    """
    timetable: list[dict[int, Action]] = [{} for _ in range(pp)]
    last = [-1] * len(placement)  # the slot of the micro-batch before, at each stage
    for microbatch in range(microbatches):
        arrival = 0
        for stage, rank in enumerate(placement):
            earliest = max(arrival, last[stage] + 1)
            slot = next(slot for slot in count(earliest) if slot not in timetable[rank])
            timetable[rank][slot] = Action(stage, F, microbatch)
            last[stage], arrival = slot, slot + 1
    grid = tuple(tuple(slots[slot] for slot in sorted(slots)) for slots in timetable)
    return lower(grid, placement, [False] * len(placement))


@dataclass(frozen=True, slots=True)
class _Stage:
    """What one stage computes backward, and which messages pass to and from it."""

    gradients: frozenset[Kind]
    from_below: bool
    to_above: bool
    gradient_from_above: bool
    gradient_to_below: bool

    def parts(self) -> dict[Kind, tuple[Kind, ...]]:
        """What becomes of each compute action: itself or its parts among their messages."""
        forward = {RECV_F: self.from_below, F: True, SEND_F: self.to_above}
        input_gradient = {I: I in self.gradients, SEND_B: self.gradient_to_below}
        weight_gradient = {W: W in self.gradients}

        def expected(kinds: dict[Kind, bool]) -> tuple[Kind, ...]:
            return tuple(kind for kind, wanted in kinds.items() if wanted)

        def backward(kinds: dict[Kind, bool]) -> tuple[Kind, ...]:
            received = {RECV_B: self.gradient_from_above and any(kinds.values())}
            return expected(received | kinds)

        return {
            F: expected(forward),
            B: backward(input_gradient | weight_gradient),
            I: backward(input_gradient),
            W: backward(weight_gradient),
        }


def _stages(
    grid: Grid, placement: Sequence[int], trainable: Sequence[bool] | None
) -> tuple[_Stage, ...]:
    if trainable is None:
        trainable = [True] * len(placement)
    if len(trainable) != len(placement):
        raise ValueError(f"trainable has {len(trainable)} stages, the placement {len(placement)}")
    for stage, rank in enumerate(placement):
        if not 0 <= rank < len(grid):
            raise ValueError(f"stage {stage} is placed on rank {rank} of {len(grid)} ranks")
    gradients = gradient_kinds(trainable)
    crosses = [below != above for below, above in pairwise(placement)]
    below = [False, *crosses]
    above = [*crosses, False]
    return tuple(
        _Stage(
            gradients[stage],
            from_below=below[stage],
            to_above=above[stage],
            gradient_from_above=above[stage] and I in gradients[stage + 1],
            gradient_to_below=below[stage] and I in gradients[stage],
        )
        for stage in range(len(placement))
    )


@dataclass(slots=True)
class _Track:
    """One kind of action of one stage, on its way through the micro-batches."""

    stage: int
    kind: Kind
    done: bytearray
    after: tuple[_Track, ...] = ()  # must be done before, on the same rank
    awaits: _Track | None = None  # the SEND that a RECV waits for, on another rank
    in_order: bool = False  # where the order of the micro-batches is part of the contract
    due: int = 0  # the next micro-batch in that order
    waiting: dict[int, int] = field(default_factory=dict)  # rank that waits for a micro-batch

    def name(self, microbatch: int) -> str:
        return str(Action(self.stage, self.kind, microbatch))


def _tracks(stages: Sequence[_Stage], microbatches: int) -> list[dict[Kind, _Track]]:
    """The actions that each stage must do, with what has to come before them."""
    tracks: list[dict[Kind, _Track]] = []
    for number, stage in enumerate(stages):
        kinds = {
            RECV_F: stage.from_below,
            F: True,
            SEND_F: stage.to_above,
            RECV_B: stage.gradient_from_above,
            I: I in stage.gradients,
            W: W in stage.gradients,
            SEND_B: stage.gradient_to_below,
        }
        tracks.append(
            {
                kind: _Track(number, kind, bytearray(microbatches))
                for kind, expected in kinds.items()
                if expected
            }
        )
    for number, own in enumerate(tracks):
        below = tracks[number - 1] if number else {}
        above = tracks[number + 1] if number + 1 < len(tracks) else {}
        activation = own.get(RECV_F) or below.get(F)
        gradient = own.get(RECV_B) or above.get(I)

        def existing(*tracks: _Track | None) -> tuple[_Track, ...]:
            return tuple(track for track in tracks if track is not None)

        for kind, track in own.items():
            if kind is F:
                track.after, track.in_order = existing(activation), True
            elif kind is SEND_F:
                track.after = (own[F],)
            elif kind is SEND_B:
                track.after = (own[I],)
            elif kind is RECV_F:
                track.awaits = below[SEND_F]
            elif kind is RECV_B:
                track.awaits = above[SEND_B]
            elif kind is I:
                track.after = existing(own[F], gradient)
            else:
                track.after, track.in_order = existing(own[F], gradient, own.get(I)), True
    return tracks


def validate(grid: Grid, placement: Sequence[int], trainable: Sequence[bool] | None = None) -> None:
    """Prove that a lowered grid does every action once, in order, and never deadlocks.

    Every action that ``placement`` and ``trainable`` ask for is there once, on its rank, after
    what it needs; F and W take the micro-batches of a stage in ascending order; every RECV
    has its SEND; the grid runs to its end with sends that never block. Linear in the number of
    actions. The micro-batches are those that the grid names. Raises ``ScheduleError``.
    """
    stages = _stages(grid, placement, trainable)
    microbatches = _count_microbatches(grid)
    tracks = _tracks(stages, microbatches)
    of_rank: list[dict[tuple[int, Kind], _Track]] = [{} for _ in grid]
    for rank, own in zip(placement, tracks, strict=True):
        of_rank[rank].update({(track.stage, kind): track for kind, track in own.items()})

    reached = [0] * len(grid)
    ready = deque(range(len(grid)))
    while ready:
        rank = ready.popleft()
        own_tracks, actions = of_rank[rank], grid[rank]
        for index in range(reached[rank], len(actions)):
            action = actions[index]
            microbatch = action.microbatch
            track = own_tracks.get((action.stage, action.kind))
            if track is None:
                raise _fault(grid, rank, index, _why_unexpected(action, placement, stages))
            awaited = track.awaits
            if awaited is not None and not awaited.done[microbatch]:
                awaited.waiting[microbatch] = rank
                reached[rank] = index
                break
            if track.done[microbatch]:
                raise _fault(grid, rank, index, f"{action} is done a second time")
            for needed in track.after:
                if not needed.done[microbatch]:
                    reason = f"{action} comes without {needed.name(microbatch)} before it"
                    raise _fault(grid, rank, index, reason)
            if track.in_order:
                if track.due != microbatch:
                    due = track.name(track.due)
                    raise _fault(grid, rank, index, f"{action} comes where {due} is due")
                track.due += 1
            track.done[microbatch] = 1
            if track.waiting:
                waiting = track.waiting.pop(microbatch, None)
                if waiting is not None:
                    ready.append(waiting)
        else:
            reached[rank] = len(actions)
    _check_all_ended(grid, placement, reached)
    _check_nothing_missing(grid, placement, tracks)


def _count_microbatches(grid: Grid) -> int:
    size = sum(map(len, grid))
    if not size:
        raise ScheduleError("the grid has no actions")
    named = {action.microbatch for actions in grid for action in actions}
    if min(named) < 0 or max(named) >= size:
        rank, index, action = next(
            (rank, index, action)
            for rank, actions in enumerate(grid)
            for index, action in enumerate(actions)
            if not 0 <= action.microbatch < size
        )
        reason = f"{action} is no micro-batch of a grid of {size} actions"
        raise _fault(grid, rank, index, reason)
    return 1 + max(named)


def _why_unexpected(action: Action, placement: Sequence[int], stages: Sequence[_Stage]) -> str:
    if not 0 <= action.stage < len(stages):
        return f"{action} is of no stage: there are {len(stages)}"
    computes = ", ".join([F, *sorted(stages[action.stage].gradients)])
    return (
        f"{action} is not wanted here: stage {action.stage} runs on rank "
        f"{placement[action.stage]} and computes {computes}"
    )


def _check_all_ended(grid: Grid, placement: Sequence[int], reached: Sequence[int]) -> None:
    """Follow the waiting ranks from one to the next until one repeats or waits in vain."""
    stuck = [rank for rank, index in enumerate(reached) if index < len(grid[rank])]
    if not stuck:
        return
    path: list[int] = []
    rank = stuck[0]
    while rank not in path:
        path.append(rank)
        index = reached[rank]
        action = grid[rank][index]
        stage, kind = (
            (action.stage - 1, SEND_F) if action.kind is RECV_F else (action.stage + 1, SEND_B)
        )
        awaited = Action(stage, kind, action.microbatch)
        sender = placement[stage]
        if awaited not in grid[sender][reached[sender] :]:
            reason = f"{action} waits for {awaited}, which rank {sender} never sends"
            raise _fault(grid, rank, index, reason)
        rank = sender
    cycle = path[path.index(rank) :]
    waits = ", ".join(
        f"rank {waiting} in {grid[waiting][reached[waiting]]} waits for rank {sender}"
        for waiting, sender in zip(cycle, [*cycle[1:], rank], strict=True)
    )
    raise _fault(grid, rank, reached[rank], f"deadlock: {waits}")


def _check_nothing_missing(
    grid: Grid, placement: Sequence[int], tracks: Sequence[dict[Kind, _Track]]
) -> None:
    for rank, own in zip(placement, tracks, strict=True):
        for track in own.values():
            microbatch = track.done.find(0)
            if microbatch >= 0:
                reason = f"{track.name(microbatch)} is missing"
                raise _fault(grid, rank, len(grid[rank]), reason)


def _fault(grid: Grid, rank: int, index: int, reason: str) -> ScheduleError:
    return ScheduleError(f"rank {rank}, action {index}: {reason}\n{_draw(grid, rank, index)}")


def _draw(grid: Grid, rank: int, index: int, around: int = 8) -> str:
    """The grid, one rank a row, as far as ``around`` cells from the caret under one of them."""
    first, last = max(0, index - around), index + around + 1
    rows = range(max(0, rank - around), min(len(grid), rank + around + 1))
    cells = {row: [str(action) for action in grid[row][first:last]] for row in rows}
    width = max((len(cell) for row in cells.values() for cell in row), default=1) + 1
    margin = len(f"r{rows[-1]}  ")
    lines = []
    for row, texts in cells.items():
        before = "... " if first else ""
        after = "..." if last < len(grid[row]) else ""
        line = f"r{row}".ljust(margin) + before + "".join(f"{text:<{width}}" for text in texts)
        lines.append((line + after).rstrip())
        if row == rank:
            at = index - first
            caret = "^" * (len(texts[at]) if at < len(texts) else 1)
            lines.append(" " * (margin + len(before) + at * width) + caret)
    return "\n".join(lines)
