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
from shardmlx.planning.loop import FULL_PIPELINE


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
    first. Rows that are computed together are about equally long, and have as many targets."""
    loss = TokenLoss(request.loss, request.settings)
    rows = request.rows
    mesh = plan.plan.mesh
    total = sum(map(_length, rows))
    # Shorter micro-batches than memory allows, so that there are enough for all ranks.
    wanted = -(-total // (FULL_PIPELINE * mesh.pp * mesh.dp))
    most = max(min(plan.tokens, wanted), max(map(_length, rows)))
    order = sorted(range(len(rows)), key=lambda i: (_several(rows[i]), -_length(rows[i]), i))
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
    return [CutRows(group, _microbatch([rows[i] for i in group], loss, plan)) for group in groups]


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
    width = int(lengths.max()) + 1
    if not plan.pack:
        width = min(padded_width(width), plan.most_length + 1)
    tokens = np.zeros((len(rows), width), np.int32)
    for row, given in enumerate(rows):
        tokens[row, : lengths[row]] = given.tokens
    places = None
    if plan.pack:
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
