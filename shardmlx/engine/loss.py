"""The loss of the tokens that count, without the logits of all of them.

Logits have a float for each word of the vocabulary: often more than all layers hold together. In
pieces they are computed only where a token counts, for some positions at a time, and none is kept::

    F   final norm -> states at the positions that count
        for each piece: logits -> loss, softmax -> gradient of the states
    W   of a trained head, for each piece: logits again, softmax -> gradient of the head

The gradient of the states needs nothing that comes later, so it is computed beside the loss (Hsu et
al., arXiv:2410.10989). A trained head's gradient is computed in W: held from F on, for each
micro-batch in flight, it would take more memory than pieces save.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from shardmlx.config.specs import Savings
from shardmlx.engine.batches import MicroBatch
from shardmlx.engine.buffers import COMPILED_POSITIONS, positions_of_piece
from shardmlx.engine.objectives import Objective
from shardmlx.models.runtime.activations import exponential, is_slow, with_gradient
from shardmlx.models.runtime.packed_positions import PackedPositions
from shardmlx.models.runtime.slice import Slice


def token_loss(logits: mx.array, targets: mx.array, counts: mx.array) -> mx.array:
    """Return the summed loss of the tokens that count, in float32; as mlx-lm's ``default_loss``.

    MLX's own loss computes exponentials twice, slowly on a CPU; there this one keeps them.
    """
    if not is_slow(logits.dtype):
        losses: mx.array = nn.losses.cross_entropy(logits, targets) * counts
        return losses.astype(mx.float32).sum()
    targets, counts = targets.reshape(-1), counts.reshape(-1)

    def compute(logits: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        losses, weights, sums = _losses_and_softmax(logits.flatten(0, -2), targets)
        return (losses * counts).sum(), weights, sums

    def gradient(logits: mx.array, cotangents: Sequence[mx.array], out: Sequence[mx.array]) -> Any:
        _, weights, sums = out
        return _slopes(weights, sums, targets, counts * cotangents[0]).reshape(logits.shape)

    loss: mx.array = with_gradient(compute, gradient)(logits)[0]
    return loss


class _Chunk(NamedTuple):
    """Positions that count: their states (n, D), their target tokens (n,), and weights (n,), which
    are 0 for padding."""

    states: mx.array
    targets: mx.array
    counts: mx.array


@dataclass(frozen=True, slots=True)
class HeadInput:
    """Normed states (rows, T, D) of a micro-batch. ``scale`` is the gradient of the loss of the
    whole batch for one token's loss, or for that of one pair; ``key`` seeds dropout. ``weights``
    are factors of the tokens' losses, by answer."""

    states: mx.array
    microbatch: MicroBatch
    scale: float = 1.0
    key: tuple[int, ...] = (0,)
    weights: np.ndarray | None = None


class Head:
    """The lm_head of the last slice, and the loss, in pieces.

    A piece takes at most ``loss_chunk`` x V x (bytes of a logit + 8). Each piece is evaluated
    before the next begins, because MLX allocates arrays well ahead of computing them. The result is
    the summed loss; with an ``objective`` of preferences, the log-probability of each answer.
    """

    def __init__(
        self, part: Slice, savings: Savings, compiled: bool, objective: Objective | None = None
    ) -> None:
        self._part = part
        self._savings = savings
        self._objective = objective
        # A piece with dropout has an argument that is no array, so it is not compiled.
        compiled = compiled and not part.drops
        self._multiple_of = COMPILED_POSITIONS if compiled else 1
        make = mx.compile if compiled else (lambda function: function)
        self._loss_of, self._gradients_of = make(self._loss_graph), make(self._gradients_graph)
        self.names = part.head_names

    def takes_pieces(self, microbatch: MicroBatch) -> bool:
        """Return False if one piece would do, unless only tokens that count are to be computed: all
        logits are then held, to the bit as in mlx-lm."""
        rows, length = microbatch.shape
        return self._objective is not None or self._savings.takes_loss_in_pieces(rows * length)

    def result(self, given: HeadInput) -> mx.array:
        """Compute the result, in float32."""
        sums = self._new_sums(given)
        for piece, answers, how in self._pieces(given):
            scores = self._logits(piece.states, **how)
            losses, _ = losses_and_slopes(scores, piece.targets, piece.counts)
            sums = _added(sums, losses, answers)
            mx.eval(sums)
        return sums if self._objective is None else -sums

    def result_and_gradient(self, given: HeadInput) -> tuple[mx.array, mx.array, HeadInput]:
        """Compute the result, the gradient of the batch's loss for the states, and the input of
        ``add_gradients``."""
        sums, gradients = self._new_sums(given), []
        scale = mx.array(given.scale if self._objective is None else 1.0)
        weights = self._weights
        for piece, answers, how in self._pieces(given):
            losses, gradient = self._loss_of(piece, scale, weights, **how)
            sums = _added(sums, losses, answers)
            mx.eval(sums, gradient)
            gradients.append(gradient)
        rows, length, width = given.states.shape
        numbers = _numbers(given.microbatch)
        counted = mx.concatenate(gradients)[: len(numbers)]
        if self._objective is not None:
            # The gradient of a token's loss is known before the whole answer's log-probability, on
            # which its factor depends.
            sums = -sums
            of_answers = -given.scale * self._objective.slopes(sums, given.microbatch)
            given = replace(given, scale=1.0, weights=of_answers)
            answers = given.microbatch.answer_of.reshape(-1)[numbers]
            factors = of_answers[answers].astype(np.float32)
            # In float32: float16 has no room for the scale of the loss alone.
            counted = (counted * mx.array(factors)[:, None]).astype(counted.dtype)
        whole = mx.zeros((rows * length, width), given.states.dtype).at[mx.array(numbers)]
        return sums, whole.add(counted).reshape(rows, length, width), given

    def _new_sums(self, given: HeadInput) -> mx.array:
        if self._objective is None:
            return mx.array(0.0)
        return mx.zeros((len(given.microbatch.row_numbers),))

    def add_gradients(self, given: HeadInput, sums: dict[str, mx.array]) -> None:
        """Compute the gradients of the head's trained weights, and add them to ``sums``."""
        if not self.names:
            return
        scale, weights = mx.array(given.scale), self._weights
        for piece, _, how in self._pieces(given):
            gradients = self._gradients_of(piece, scale, weights, **how)
            for name in reversed(self.names):
                gradient = gradients.pop()
                sums[name] = sums[name] + gradient if name in sums else gradient
            del gradient
            mx.eval([sums[name] for name in self.names])

    @property
    def _weights(self) -> list[mx.array]:
        return [self._part[name] for name in self.names]

    def _pieces(
        self, given: HeadInput
    ) -> Iterator[tuple[_Chunk, np.ndarray | None, dict[str, Any]]]:
        """Yield pieces, each with its positions' answers if there is an objective of preferences,
        and the arguments of its dropout."""
        microbatch, counted = given.microbatch, _numbers(given.microbatch)
        numbers = np.pad(counted, (0, -len(counted) % self._multiple_of))
        is_counted = np.arange(len(numbers)) < len(counted)
        counts = (microbatch.counts.reshape(-1)[numbers] & is_counted).astype(np.float32)
        answers = None
        if self._objective is not None:
            answers = microbatch.answer_of.reshape(-1)[numbers]
            if given.weights is not None:
                counts *= given.weights[answers]
        targets = microbatch.targets.reshape(-1)[numbers]
        states = given.states.flatten(0, 1)
        size = positions_of_piece(self._savings.loss_chunk or len(numbers), self._multiple_of)
        for start in range(0, len(numbers), size):
            mine = slice(start, start + size)
            piece = _Chunk(
                states[mx.array(numbers[mine])], mx.array(targets[mine]), mx.array(counts[mine])
            )
            own = None if answers is None else answers[mine]
            yield piece, own, self._how(given, numbers[mine])

    def _how(self, given: HeadInput, numbers: np.ndarray) -> dict[str, Any]:
        if not self._part.drops:
            return {}
        length, places = given.microbatch.shape[1], given.microbatch.places
        if places is None:
            at = PackedPositions(numbers // length, numbers % length)
        else:
            at = PackedPositions(places.rows[numbers], places.positions[numbers])
        return {"key": given.key, "first_row": given.microbatch.first_row, "places": at}

    def _logits(self, states: mx.array, **how: Any) -> mx.array:
        return self._part.logits(states[None], **how)[0]

    def _graph(
        self, how: Mapping[str, Any], chunk: _Chunk, scale: mx.array, weights: Sequence[mx.array]
    ) -> tuple[mx.array, list[mx.array]]:
        """Return a chunk's losses, and the gradients for its states and ``weights``: lazy."""

        def run(states: mx.array, *weights: mx.array) -> mx.array:
            return self._part.with_parameters(
                self.names, weights, lambda: self._logits(states, **how)
            )

        primals = [chunk.states, *weights]
        scores = run(*primals)
        losses, slopes = losses_and_slopes(scores, chunk.targets, chunk.counts, scale)
        _, gradients = mx.vjp(run, primals, [slopes.astype(scores.dtype)])
        return losses, gradients

    def _loss_graph(self, *given: Any, **how: Any) -> tuple[mx.array, mx.array]:
        """Return a chunk's losses, and the gradient for its states."""
        losses, (gradient, *_) = self._graph(how, *given)
        return losses, gradient

    def _gradients_graph(self, *given: Any, **how: Any) -> list[mx.array]:
        """Return the gradients for the head's trained weights, in float32."""
        _, (_, *gradients) = self._graph(how, *given)
        return [gradient.astype(mx.float32) for gradient in gradients]


def _numbers(microbatch: MicroBatch) -> np.ndarray:
    """Return the numbers of the positions that count in the flattened (rows, T); at least one."""
    numbers = np.flatnonzero(microbatch.counts).astype(np.int32)
    return numbers if len(numbers) else np.zeros(1, np.int32)


def _added(sums: mx.array, losses: mx.array, answers: np.ndarray | None) -> mx.array:
    """Add the losses of positions, in all, or each to the sum of its answer."""
    return sums + losses.sum() if answers is None else sums.at[mx.array(answers)].add(losses)


def losses_and_slopes(
    logits: mx.array, targets: mx.array, counts: mx.array, scale: mx.array | float = 1.0
) -> tuple[mx.array, mx.array]:
    """Return the losses (n,) of logits (n, V), and ``scale`` times their sum's gradient for them:
    softmax less 1 at the target; both float32."""
    losses, weights, sums = _losses_and_softmax(logits.astype(mx.float32), targets)
    return losses * counts, _slopes(weights, sums, targets, counts * scale)


def _losses_and_softmax(logits: mx.array, targets: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Return the loss of each row of logits (n, V), and dividend and divisor of its softmax."""
    most = logits.max(axis=-1, keepdims=True)
    at_target = mx.take_along_axis(logits, targets[:, None], axis=-1)
    weights = exponential(logits - most)
    sums = weights.sum(axis=-1, keepdims=True)
    return (most + mx.log(sums) - at_target)[:, 0], weights, sums


def _slopes(weights: mx.array, sums: mx.array, targets: mx.array, scales: mx.array) -> mx.array:
    """Return ``scales`` times the gradient of each row's loss: softmax less 1 at the target."""
    slopes = weights * (scales[:, None] / sums)
    return slopes.at[mx.arange(len(targets)), targets].subtract(scales)
