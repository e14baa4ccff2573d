"""Cut the rows of a request into micro-batches. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardmlx.api.plan import LoopPlan
from shardmlx.api.requests import ForwardBackward, LossRow
from shardmlx.engine.batches import MicroBatch, padded_width
from shardmlx.engine.token_losses import TokenLoss, TokenTerms
from shardmlx.models.runtime.packed_positions import PackedPositions
from shardmlx.planning.least_seconds import SET_UP_TOKENS

LARGER = 1.05
"""Times as long that a request may take by itself with larger micro-batches: its bubble is longer,
where no other model trains, and there is less to set up."""


@dataclass(frozen=True, slots=True, eq=False)
class CutRows:
    """A micro-batch, and the numbers of its rows in the request."""

    rows: Sequence[int]
    microbatch: MicroBatch

    def divided(self, logps: np.ndarray) -> list[np.ndarray]:
        """Return the log-probabilities of each row, from those of all targets."""
        terms = self.microbatch.terms
        assert terms is not None, "its loss is one of tokens"
        return np.split(logps, terms.ends[:-1])


def cut(request: ForwardBackward, plan: LoopPlan) -> list[CutRows]:
    """Return the micro-batches of a request, which depend on nothing but its rows, the longest
    first. Rows that are computed together are about equally long, and have as many targets.

    Their size is what ``train`` would choose: of all that memory allows, the one with which the
    ranks are done soonest; a larger one that is about as fast, since micro-batches of models that
    train at once fill each other's bubbles.
    """
    loss = TokenLoss(request.loss, request.settings)
    rows = request.rows
    order = sorted(range(len(rows)), key=lambda i: (_several(rows[i]), -_length(rows[i]), i))
    ways = [_grouped(rows, order, most, plan) for most in _sizes(rows, plan)]
    times = [_tokens_of_time(rows, way, plan) for way in ways]
    close = [way for way, time in zip(ways, times, strict=True) if time <= LARGER * min(times)]
    groups = close[-1]
    return [CutRows(group, _microbatch([rows[i] for i in group], loss, plan)) for group in groups]


def _sizes(rows: Sequence[LossRow], plan: LoopPlan) -> list[int]:
    """Return the tokens of micro-batches to choose from, each twice the last: those of the longest
    row, up to all rows of a request, or to what memory allows."""
    total = sum(map(_length, rows))
    sizes = [max(map(_length, rows))]
    while 2 * sizes[-1] <= min(plan.tokens, 2 * total):
        sizes.append(2 * sizes[-1])
    return sizes


def _grouped(
    rows: Sequence[LossRow], order: Sequence[int], most: int, plan: LoopPlan
) -> list[list[int]]:
    """Return the numbers of the rows of each micro-batch, of at most so many tokens."""
    groups: list[list[int]] = []
    size = 0
    for i in order:
        first = rows[groups[-1][0]] if groups else rows[i]  # the longest of its group
        more = _length(rows[i] if plan.pack else first)
        if groups and _several(first) == _several(rows[i]) and size + more <= most:
            groups[-1].append(i)
            size += more
        else:
            groups.append([i])
            size = _length(rows[i])
    return groups


def _tokens_of_time(
    rows: Sequence[LossRow], groups: Sequence[Sequence[int]], plan: LoopPlan
) -> float:
    """Return the time of micro-batches on ranks that are equally fast, in tokens that one computes
    meanwhile: each waits at both ends of a step while the largest one passes the others."""
    mesh = plan.plan.mesh
    stages = plan.plan.stage_map.num_stages
    sizes = []
    for group in groups:
        lengths = [_length(rows[i]) for i in group]
        tokens = sum(lengths) if plan.pack else len(lengths) * max(lengths)
        sizes.append(tokens + SET_UP_TOKENS)
    bubble = (mesh.pp - 1) * max(sizes) * mesh.pp / stages
    return sum(sizes) / mesh.dp + bubble


def of_replicas(pieces: Sequence[CutRows], replicas: int) -> list[list[int]]:
    """Return the numbers of the pieces of each replica, ascending: about as many tokens each."""
    sizes = [int(np.prod(piece.microbatch.shape)) for piece in pieces]
    mine: list[list[int]] = [[] for _ in range(replicas)]
    loads = [0] * replicas
    for number in sorted(range(len(pieces)), key=lambda i: -sizes[i]):
        least = loads.index(min(loads))
        mine[least].append(number)
        loads[least] += sizes[number]
    return [sorted(each) for each in mine]


def _length(row: LossRow) -> int:
    return len(row.tokens)


def _several(row: LossRow) -> int:
    """Return the number of targets of each position, 0 where targets have no second axis."""
    targets = row.inputs["target_tokens"]
    return 0 if targets.ndim == 1 else targets.shape[1]


def _microbatch(rows: Sequence[LossRow], loss: TokenLoss, plan: LoopPlan) -> MicroBatch:
    lengths = np.array([_length(row) for row in rows])
    width = min(padded_width(int(lengths.max()) + 1), plan.most_length + 1)
    # Packing costs a mask, which rows without padding do not need.
    packs = plan.pack and int(lengths.min()) + 1 < width
    tokens = np.zeros((len(rows), width), np.int32)
    for row, given in enumerate(rows):
        tokens[row, : lengths[row]] = given.tokens
    places = None
    if packs:
        numbers = np.repeat(np.arange(len(rows), dtype=np.int32), lengths)
        positions = np.concatenate([np.arange(each, dtype=np.int32) for each in lengths])
        places = PackedPositions(numbers, positions)
    spans = np.stack([np.ones(len(rows), np.int64), lengths], axis=1).astype(np.int32)
    return MicroBatch(tokens, spans, 0, places, terms=_terms(rows, loss, np.cumsum(lengths)))


def _terms(rows: Sequence[LossRow], loss: TokenLoss, ends: np.ndarray) -> TokenTerms:
    facts = loss.facts
    names = {name for row in rows for name in row.inputs}
    if facts.several_targets:
        names.add("weights")
    inputs: Mapping[str, np.ndarray] = {
        name: np.concatenate([_input(row, name, loss) for row in rows]).astype(np.float32)
        for name in (*facts.inputs, *facts.optional)
        if name in names
    }
    targets = np.concatenate([row.inputs["target_tokens"] for row in rows]).astype(np.int32)
    return TokenTerms(loss, targets, inputs, ends)


def _input(row: LossRow, name: str, loss: TokenLoss) -> np.ndarray:
    if name in row.inputs:
        return row.inputs[name]
    targets = row.inputs["target_tokens"]
    return np.full(targets.shape, loss.settings.get(name, 1.0), np.float32)
