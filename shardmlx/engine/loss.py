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
from copy import copy
from dataclasses import dataclass, field
from itertools import pairwise
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

    def compute(logits: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        losses, weights, sums = _losses_and_softmax(logits.flatten(0, -2), targets)
        return (losses * counts).sum(), weights, sums

    def gradient(logits: mx.array, cotangents: Sequence[mx.array], out: Sequence[mx.array]) -> Any:
        _, weights, sums = out
        return _slopes(weights, sums, targets, counts * cotangents[0]).reshape(logits.shape)

    loss: mx.array = with_gradient(compute, gradient)(logits)[0]
    return loss


class _Chunk(NamedTuple):
    """A few positions: their states (n, D), their target tokens (n,) or (n, K), and ``factors`` of
    the same shape, which are the gradient of the batch's loss for the targets' own losses."""

    states: mx.array
    targets: mx.array
    factors: mx.array


@dataclass(frozen=True, slots=True)
class Counted:
    """The positions of a micro-batch that count, at least one: their ``numbers`` in the flattened
    (rows, T), and 1 for each in ``weights``, which the first of none does not have. They are
    computed in this ``order``, and no more than the first ``steep`` have a gradient."""

    numbers: np.ndarray
    weights: np.ndarray
    order: np.ndarray
    steep: int

    @classmethod
    def of(cls, microbatch: MicroBatch) -> Counted:
        """Find them: all have a gradient, or with a loss of tokens those of which nothing shows
        that they have none."""
        counts = microbatch.counts.ravel()
        numbers = np.flatnonzero(counts).astype(np.int32)
        if not len(numbers):
            numbers = np.zeros(1, np.int32)
        weights = counts[numbers].astype(np.float32)
        terms = microbatch.terms
        if terms is None:
            return cls(numbers, weights, np.arange(len(numbers)), len(numbers))
        is_flat = terms.loss.flat(terms)
        return cls(numbers, weights, np.argsort(is_flat, kind="stable"), int((~is_flat).sum()))


@dataclass(frozen=True, slots=True)
class HeadInput:
    """Normed states (rows, T, D) of a micro-batch. ``scale`` is the gradient of the loss of the
    whole batch for one token's loss, or for that of one pair; ``key`` seeds dropout. ``factors``
    are the gradient of the batch's loss for the loss of each target that counts; None until all of
    them are known. ``counted`` are the positions of the micro-batch that count."""

    states: mx.array
    microbatch: MicroBatch
    scale: float = 1.0
    key: tuple[int, ...] = (0,)
    factors: np.ndarray | None = None
    counted: Counted = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counted", Counted.of(self.microbatch))

    def with_factors(self, factors: np.ndarray) -> HeadInput:
        """Return the same with the factors of all targets."""
        made = copy(self)
        object.__setattr__(made, "factors", factors)
        return made


class Head:
    """The lm_head of the last slice, and the loss, in pieces.

    A piece takes at most ``loss_chunk`` x V x (bytes of a logit + 8). Each piece is evaluated
    before the next begins, because MLX allocates arrays well ahead of computing them. The result is
    the summed loss; with an ``objective`` of preferences, the log-probability of each answer; with
    a loss of tokens, that of each target.
    """

    def __init__(
        self, part: Slice, savings: Savings, compiled: bool, objective: Objective | None = None
    ) -> None:
        self._part = part
        self._savings = savings
        self._objective = objective
        # A piece with dropout has an argument that is not an array, so it is not compiled.
        compiled = compiled and not part.head_drops
        self._multiple_of = COMPILED_POSITIONS if compiled else 1
        make = mx.compile if compiled else (lambda function: function)
        self._loss_of, self._gradients_of = make(self._loss_graph), make(self._gradients_graph)
        self.names = part.head_names

    def takes_pieces(self, microbatch: MicroBatch) -> bool:
        """Return False if one piece would do, unless only tokens that count are to be computed: all
        logits are then held, to the bit as in mlx-lm."""
        rows, length = microbatch.shape
        if self._objective is not None or microbatch.terms is not None:
            return True
        return self._savings.takes_loss_in_pieces(rows * length)

    def _is_whole(self, given: HeadInput) -> bool:
        """Return whether there is one piece of the positions whose gradient may differ from 0, and
        one of the others: on a CPU, which multiplies few rows at a time slowly, a loss of tokens is
        computed so where another one would not be in pieces."""
        rows, length, _ = given.states.shape
        terms = given.microbatch.terms
        if (
            terms is None
            or terms.targets.ndim > 1
            or self._savings.takes_loss_in_pieces(rows * length)
        ):
            return False
        return is_slow(given.states.dtype) and self._multiple_of == 1

    def result(self, given: HeadInput) -> mx.array:
        """Compute the result, in float32."""
        factors = self._first_factors(given)
        is_whole = self._is_whole(given)
        losses = [
            self._losses(piece, how)
            for _, piece, how in self._pieces(given, factors, is_whole=is_whole)
        ]
        result = self._result(losses, given)
        mx.eval(result)
        return result

    def result_and_gradient(self, given: HeadInput) -> tuple[mx.array, mx.array, HeadInput]:
        """Compute the result, the gradient of the batch's loss for the states, and the input of
        ``add_gradients``."""
        order, steep = given.counted.order, given.counted.steep
        losses: list[mx.array] = []
        rows, length, width = given.states.shape
        gradients = [mx.zeros((0, width), given.states.dtype)]
        factors = self._first_factors(given)
        weights = self._weights
        is_whole = self._is_whole(given)
        for start, piece, how in self._pieces(given, factors, is_whole=is_whole):
            if losses:  # the last piece is evaluated with the result, in one wait
                mx.eval(losses[-1], gradients[-1])
            if start >= steep:
                losses.append(self._losses(piece, how))
                continue
            of_piece, gradient = self._loss_of(piece, weights, **how)
            if is_whole:
                mx.eval(of_piece)  # so that the gradient takes the room of the logits
            losses.append(of_piece)
            gradients.append(gradient)
        result = self._result(losses, given)
        mx.eval(result, gradients[-1])
        counted = mx.concatenate(gradients)[: len(order)]
        order = order[: len(counted)]
        later = self._later_factors(result, given)
        if later is not None:
            factors = later
            # In float32: float16 has no room for the scale of the loss alone.
            counted = (counted * mx.array(later[order])[:, None]).astype(counted.dtype)
        numbers = given.counted.numbers[order]
        whole = mx.zeros((rows * length, width), given.states.dtype).at[mx.array(numbers)]
        gradient = whole.add(counted).reshape(rows, length, width)
        return result, gradient, given.with_factors(factors)

    def _losses(self, piece: _Chunk, how: Mapping[str, Any]) -> mx.array:
        """Compute the losses of a piece alone."""
        logits = self._logits(piece.states, **how)
        losses, _ = losses_and_slopes(logits, piece.targets, piece.factors)
        mx.eval(losses)
        return losses

    def _first_factors(self, given: HeadInput) -> np.ndarray:
        """Return the factors of the counted targets as far as they are known before their losses:
        1 where they are not known."""
        microbatch = given.microbatch
        if microbatch.terms is not None:
            known = microbatch.terms.loss.known_slopes(microbatch.terms)
            if known is not None:
                return (-given.scale * known).astype(np.float32)
            return np.ones(len(microbatch.terms.targets), np.float32)
        scale = given.scale if self._objective is None else 1.0
        return np.float32(scale) * given.counted.weights

    def _later_factors(self, result: mx.array, given: HeadInput) -> np.ndarray | None:
        """Return the factors that depend on the result: the gradient of a token's loss is known
        before the log-probabilities of the whole row, on which its factor depends."""
        microbatch = given.microbatch
        if (terms := microbatch.terms) is not None:
            if terms.loss.known_slopes(terms) is not None:
                return None
            later: np.ndarray = np.float32(-given.scale) * terms.loss.slopes(
                np.array(result), terms
            )
            return later
        if self._objective is None:
            return None
        of_answers = -given.scale * self._objective.slopes(result, microbatch)
        of_positions: np.ndarray = of_answers[_answers(given)] * given.counted.weights
        return of_positions.astype(np.float32)

    def _result(self, losses: list[mx.array], given: HeadInput) -> mx.array:
        """Return the result of the losses of all pieces: of the counted targets, and padding."""
        if given.microbatch.terms is not None:
            places = mx.array(np.argsort(given.counted.order))
            return -mx.concatenate(losses)[places]
        counted = given.counted.weights
        answers = None if self._objective is None else _answers(given)
        rows = len(given.microbatch.row_numbers)
        sums = mx.array(0.0) if answers is None else mx.zeros((rows,))
        start = 0
        for of_piece in losses:
            stop = start + len(of_piece)
            mine = of_piece[: len(counted) - start] * mx.array(counted[start:stop])
            if answers is None:
                sums = sums + mine.sum()
            else:
                sums = sums.at[mx.array(answers[start:stop])].add(mine)
            start = stop
        return sums if answers is None else -sums

    def add_gradients(self, given: HeadInput, sums: dict[str, mx.array]) -> None:
        """Compute the gradients of the head's trained weights, and add them to ``sums``."""
        if not self.names:
            return
        factors = self._first_factors(given) if given.factors is None else given.factors
        weights = self._weights
        for start, piece, how in self._pieces(given, factors):
            if start >= given.counted.steep and self.names[0] in sums:
                break
            gradients = self._gradients_of(piece, weights, **how)
            for name in reversed(self.names):
                gradient = gradients.pop()
                sums[name] = sums[name] + gradient if name in sums else gradient
            del gradient
            mx.eval([sums[name] for name in self.names])

    @property
    def _weights(self) -> list[mx.array]:
        return [self._part[name] for name in self.names]

    def _pieces(
        self, given: HeadInput, factors: np.ndarray, *, is_whole: bool = False
    ) -> Iterator[tuple[int, _Chunk, dict[str, Any]]]:
        """Yield the counted positions in pieces, in their order, with the ``factors`` of their
        targets: each with the number of its first position, and the arguments of its dropout. With
        ``is_whole`` there is one piece with gradients, and one without."""
        microbatch = given.microbatch
        order = given.counted.order
        numbers = given.counted.numbers[order]
        factors = factors[order]
        if microbatch.terms is None:
            targets = microbatch.targets.ravel()[numbers]
        else:
            targets = microbatch.terms.targets[order]
        if padding := -len(numbers) % self._multiple_of:
            numbers = np.pad(numbers, (0, padding))
            targets = np.pad(targets, ((0, padding), *[(0, 0)] * (targets.ndim - 1)))
            factors = np.pad(factors, ((0, padding), *[(0, 0)] * (factors.ndim - 1)))
        states = given.states.flatten(0, 1)
        size = positions_of_piece(self._savings.loss_chunk or len(numbers), self._multiple_of)
        starts = [*range(0, len(numbers), size)]
        if is_whole:
            starts = sorted({0, given.counted.steep} - {len(numbers)})
        for start, stop in pairwise([*starts, len(numbers)]):
            mine = slice(start, stop)
            piece = _Chunk(
                states[mx.array(numbers[mine])], mx.array(targets[mine]), mx.array(factors[mine])
            )
            yield start, piece, self._how(given, numbers[mine])

    def _how(self, given: HeadInput, numbers: np.ndarray) -> dict[str, Any]:
        if not self._part.head_drops:
            return {}
        length, places = given.microbatch.shape[1], given.microbatch.places
        if places is None:
            at = PackedPositions(numbers // length, numbers % length)
        else:
            at = PackedPositions(places.rows[numbers], places.positions[numbers])
        return {"key": given.key, "first_row": given.microbatch.first_row, "places": at}

    def _logits(self, states: mx.array, **how: Any) -> mx.array:
        # Not [0]: its gradient would be copied into zeros of the logits' size.
        return self._part.logits(states[None], **how).squeeze(0)

    def _graph(
        self, how: Mapping[str, Any], chunk: _Chunk, weights: Sequence[mx.array]
    ) -> tuple[mx.array, list[mx.array]]:
        """Return a chunk's losses, and the gradients for its states and ``weights``: lazy."""

        def run(states: mx.array, *weights: mx.array) -> mx.array:
            return self._part.with_parameters(
                self.names, weights, lambda: self._logits(states, **how)
            )

        primals = [chunk.states, *weights]
        scores = run(*primals)
        losses, slopes = losses_and_slopes(scores, chunk.targets, chunk.factors)
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


def _answers(given: HeadInput) -> np.ndarray:
    """Return the answer of each position that counts."""
    answers: np.ndarray = given.microbatch.answer_of.ravel()[given.counted.numbers]
    return answers


def losses_and_slopes(
    logits: mx.array, targets: mx.array, factors: mx.array
) -> tuple[mx.array, mx.array]:
    """Return the losses of targets (n,) or (n, K) for logits (n, V), and the gradient of their sum,
    each times its factor, for the logits: both float32."""
    losses, weights, sums = _losses_and_softmax(logits.astype(mx.float32), targets)
    return losses, _slopes(weights, sums, targets, factors)


def _losses_and_softmax(logits: mx.array, targets: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Return the loss of each target for logits (n, V), one or K of each row, in the shape of the
    targets, and dividend and divisor of the softmax of each row."""
    most = logits.max(axis=1, keepdims=True)
    at_targets = mx.take_along_axis(logits, targets.reshape(len(logits), -1), axis=1)
    weights = exponential(logits - most)
    sums = weights.sum(axis=1, keepdims=True)
    return (most + mx.log(sums) - at_targets).reshape(targets.shape), weights, sums


def _slopes(weights: mx.array, sums: mx.array, targets: mx.array, factors: mx.array) -> mx.array:
    """Return the gradient of each row's losses times their factors: the factors' sum times softmax,
    less each factor at its target."""
    rows = len(weights)
    factors = factors.reshape(rows, -1)
    slopes = weights * (factors.sum(axis=1, keepdims=True) / sums)
    return slopes.at[mx.arange(rows)[:, None], targets.reshape(rows, -1)].subtract(factors)
