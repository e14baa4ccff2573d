"""Run one pipeline stage: forward, and backward in two halves, of several micro-batches in flight.

At F the backward graph is built too, over a cotangent whose buffer is filled only when the gradient
arrives. Only the output is evaluated then; the rest of the graph stays lazy and holds just the
activations that it needs::

    the joint graph: mx.vjp(stage, [x, weights], [cotangent])

    x, weights ---> forward ---> output                     F evaluates it, and it is sent
                       |
                  activations                               held until the backward uses them
                       |
    cotangent ---> backward ---> gradient of x              I evaluates it, and it is sent
                       +-------> gradients of the weights   W evaluates them, and adds them up

    cotangent: full of NaN at F; the gradient of the output is received into its buffer before I

So nothing is computed twice, and I and W can be evaluated apart, which zero-bubble schedules live
on (Qi et al., arXiv:2401.10241).

On a GPU this joint graph is compiled, once for each shape: then it is not traced in Python again,
and elementwise operations are fused. ``mx.compile`` fuses an operation only if all that use its
result are in the same kernel, so that nothing the forward needs can come into a kernel that needs
the cotangent. Outputs of the graph are the exception, so the forward's output passes through an
operation that is never fused. The cotangent's buffer holds NaN until the gradient arrives, which
would show a result computed too early.

A packed row grows to one of a few lengths for its compiled graph, by positions that belong to no
sequence and have no gradient. Messages do not have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import mlx.core as mx

from shardmlx.compat import begin_evaluation
from shardmlx.config.specs import FULL, NO_SAVINGS, SELECTIVE, Savings
from shardmlx.distributed.messages import copy_into
from shardmlx.engine.batches import MOST_WIDTHS, MicroBatch
from shardmlx.engine.buffers import compiled_length
from shardmlx.engine.loss import Head, HeadInput, token_loss
from shardmlx.engine.objectives import Objective
from shardmlx.models.runtime.packed_positions import PackedPositions
from shardmlx.models.runtime.slice import Slice
from shardmlx.models.runtime.traced_positions import Places, TracedPositions

Graph = Callable[..., Sequence[mx.array]]
"""A joint graph, called with the arguments of ``Stage._joint_graph``."""


def layer_of(name: str) -> str:
    """Return a parameter's layer, ``model.layers.12``, or its matrix at an end of the model."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), 2)
    return ".".join(parts[: number + 1])


@dataclass(slots=True)
class _Pending:
    """A micro-batch between its forward and the end of its backward."""

    cotangent: mx.array
    input_gradient: mx.array | None
    weight_gradients: Mapping[str, mx.array]
    to_head: HeadInput | None = None
    """Input of a trained head whose gradients are still to be computed."""


class Stage:
    """A slice of the model and its micro-batches in flight.

    ``needs_input_gradient`` says whether some stage below has trained weights, ``savings`` which
    arrays are computed in pieces or recomputed, ``compiled`` whether the joint graph is compiled,
    by default on a GPU; ``objective`` is one of preferences. The gradients of trained weights,
    ``names``, add up over micro-batches in ``gradients``, in float32 even if the weights are
    shorter.
    """

    def __init__(
        self,
        index: int,
        part: Slice,
        *,
        needs_input_gradient: bool,
        savings: Savings = NO_SAVINGS,
        compiled: bool | None = None,
        objective: Objective | None = None,
    ) -> None:
        self.index = index
        self.part = part
        self.needs_input_gradient = needs_input_gradient
        self.savings = savings
        self.checkpoint = savings.recompute == FULL
        part.prepare_training(is_selective=savings.recompute == SELECTIVE)
        self.names = part.trainable
        self._layers = {name: layer_of(name) for name in self.names}
        self.gradients: dict[str, mx.array] = {}
        self._pending: dict[int, _Pending] = {}
        # On a CPU each kernel is a run of the C++ compiler, into files that all ranks of a host
        # share without a lock.
        on_gpu = mx.default_device() == mx.gpu
        compiles = on_gpu if compiled is None else compiled
        self._compiled: Graph | None = mx.compile(self._joint_graph) if compiles else None
        self._packed_shapes: set[tuple[int, int]] = set()
        """Shapes of the packed rows that have compiled graphs."""
        self._head = Head(part, savings, compiles, objective) if part.is_last else None

    most_graphs = MOST_WIDTHS
    """Compiled graphs of packed rows, at most: they stay in memory."""

    reduces_each = False
    """True if gradients are summed over replicas after each micro-batch, not once a step."""

    def forward(
        self,
        j: int,
        microbatch: MicroBatch,
        x: mx.array | None,
        *,
        scale: float,
        key: tuple[int, ...] = (0,),
    ) -> mx.array:
        """Compute F of micro-batch ``j``, and prepare its backward.

        Returns hidden states (rows, T, D), or on the last stage the summed loss, with an objective
        of preferences the log-probability of each answer. ``x`` are the hidden states from the
        stage before, None on the first. ``scale`` is the gradient of the loss of the whole batch
        for one token's loss, 1 / valid tokens, or for one pair's. ``key`` seeds the masks of
        dropout.
        """
        if not (self.names or self.needs_input_gradient):
            return self.evaluate(microbatch, x)
        starts = self.part.dropout_starts(key, microbatch.first_row)
        source, answers = self._given(microbatch, x)
        names = self._names_in_graph(answers)
        cotangent = (
            mx.array(scale, mx.float32)
            if answers
            else self._new_cotangent(microbatch, self.part.output_size)
        )
        weights = [self.part[name] for name in names]
        graph, places = self._graph_for(microbatch.places)
        length = microbatch.shape[1]
        more = 0 if places is None else len(places.rows) - length
        out, *gradients = graph(
            _longer(source, more, "edge"),
            tuple(_longer(each, more) for each in answers),
            weights,
            cotangent if answers else _longer(cotangent, more),
            starts,
            places,
        )
        out = out if answers else _shorter(out, length)
        input_gradient = None
        if self.needs_input_gradient:
            input_gradient = _shorter(gradients.pop(0), length)
        pending = _Pending(cotangent, input_gradient, dict(zip(names, gradients, strict=True)))
        self._pending[j] = pending
        mx.eval(out, cotangent)
        if self._head is None or answers:
            return out
        given = HeadInput(out, microbatch, scale, key)
        result, gradient, given = self._head.result_and_gradient(given)
        self.fill_cotangent(j, gradient)
        pending.to_head = given if self._head.names else None
        return result

    def evaluate(self, microbatch: MicroBatch, x: mx.array | None) -> mx.array:
        """Compute the result of ``forward``, without a backward pass to follow."""
        source, answers = self._given(microbatch, x)
        out = self._outputs(source, answers, places=microbatch.places, recomputes=False)
        mx.eval(out)
        if self._head is None or answers:
            return out
        return self._head.result(HeadInput(out, microbatch))

    def _graph_for(self, places: PackedPositions | None) -> tuple[Graph, Places | None]:
        """Return the joint graph for a micro-batch, compiled or not, and the places that it takes:
        those of a packed row that may have grown, so that rows of many lengths have few graphs."""
        if self._compiled is None or places is None:
            return self._compiled or self._joint_graph, places
        chunk = self.savings.attention_chunk
        traced = TracedPositions.of(places, compiled_length(len(places.rows)), chunk)
        shapes = self._packed_shapes | {(len(traced.rows), traced.longest)}
        if places.shares_prefixes or len(shapes) > self.most_graphs:
            return self._joint_graph, places
        self._packed_shapes = shapes
        return self._compiled, traced

    def _given(
        self, microbatch: MicroBatch, x: mx.array | None
    ) -> tuple[mx.array, tuple[mx.array, ...]]:
        """Return the input, and for a loss in one piece, target tokens and which of them count."""
        source = mx.array(microbatch.inputs) if x is None else x
        if self._head is None or self._head.takes_pieces(microbatch):
            return source, ()
        return source, (mx.array(microbatch.targets), mx.array(microbatch.counts))

    def _names_in_graph(self, answers: tuple[mx.array, ...]) -> Sequence[str]:
        """Return the names of the trained weights whose gradients the joint graph has: all but a
        head's in pieces. A tied matrix may be the embedding, too."""
        if self._head is None or answers or self.part.is_first:
            return self.names
        return [name for name in self.names if name not in self._head.names]

    def _joint_graph(
        self,
        source: mx.array,
        answers: tuple[mx.array, ...],
        weights: Sequence[mx.array],
        cotangent: mx.array,
        starts: mx.array,
        places: Places | None,
    ) -> list[mx.array]:
        """Return output, gradient of the input if it is needed, gradients of the weights: lazy. The
        dropouts draw from ``starts``."""
        names = self._names_in_graph(answers)

        def run(*primals: mx.array) -> mx.array:
            arrays = list(primals)
            inputs = arrays.pop(0) if self.needs_input_gradient else source
            return self.part.with_parameters(
                names, arrays, lambda: self._outputs(inputs, answers, key=starts, places=places)
            )

        primals = [source] if self.needs_input_gradient else []
        if not (primals or weights):
            return [run()]
        (out,), gradients = mx.vjp(run, [*primals, *weights], [cotangent])
        return [mx.contiguous(out), *gradients]

    def _outputs(
        self,
        x: mx.array,
        answers: tuple[mx.array, ...],
        *,
        recomputes: bool = True,
        key: tuple[int, ...] | mx.array = (0,),
        **places: Any,
    ) -> mx.array:
        """Return hidden states; on the last stage normed ones, or with answers the loss."""
        hidden = self.part(
            x,
            key=key,
            checkpoint=self.checkpoint and recomputes,
            attention_chunk=self.savings.attention_chunk,
            **places,
        )
        if not self.part.is_last:
            return hidden
        normed = self.part.norm(hidden)
        if not answers:
            return normed
        return token_loss(self.part.logits(normed, key=key, **places), *answers)

    def _new_cotangent(self, microbatch: MicroBatch, size: int) -> mx.array:
        """Return room for the gradient of hidden states: a buffer once it is evaluated, which is
        then written behind MLX's back."""
        return mx.full((*microbatch.shape, size), mx.nan, self.part.dtype)

    def cotangent(self, j: int) -> mx.array:
        """Return the gradient of micro-batch ``j``'s output: to be filled before its backward."""
        return self._pending[j].cotangent

    def fill_cotangent(self, j: int, gradient: mx.array) -> None:
        """Take the gradient from a stage on the same rank."""
        copy_into(self.cotangent(j), gradient)

    def backward_input(self, j: int) -> mx.array:
        """Compute I of micro-batch ``j``: return the gradient of the stage's input.

        With gradient checkpointing W is computed too: otherwise the recomputed arrays of all layers
        would be held until W.
        """
        pending = self._pending[j]
        gradient = pending.input_gradient
        assert gradient is not None, "lowering asks for I only where it is needed"
        if self.checkpoint:
            self._add(pending)
            self._evaluate(self.names, gradient)
        else:
            mx.eval(gradient)
        pending.input_gradient = None
        if not self.names:
            del self._pending[j]
        return gradient

    def backward_in_parts(self, j: int) -> Iterator[Sequence[str]]:
        """Compute I and W of micro-batch ``j`` if the stage ``reduces_each``; yield the weights as
        soon as their gradients are added. ``backward_input`` then returns the input's gradient."""
        raise NotImplementedError

    def backward_weight(self, j: int) -> None:
        """Compute W of micro-batch ``j``: add to the gradients of the trained weights."""
        for _ in self.backward_weight_in_parts(j, [self.names]):
            pass

    def backward_weight_in_parts(
        self, j: int, parts: Sequence[Sequence[str]]
    ) -> Iterator[Sequence[str]]:
        """Compute W part after part of the trained weights; yield each part once it is computed."""
        self._add(self._pending.pop(j))
        for part in parts:
            self._evaluate(part)
            yield part

    def _evaluate(self, names: Sequence[str], *others: mx.array) -> None:
        """Compute the gradients of these weights, which are in backward order, and the others."""
        gradients = [self.gradients[name] for name in names]
        if self.checkpoint:
            # In one graph the recomputed arrays of every layer would be held to the end. Layer by
            # layer, one layer's are freed before the next. The host waits for the last alone.
            for _, layer in groupby(names, self._layers.__getitem__):
                begin_evaluation([self.gradients[name] for name in layer])
        mx.eval(gradients, others)

    def sum_partial_gradients(self) -> None:
        """Sum the gradients that each rank of a group has a part of, in the same order on all."""
        if self.part.all_sum is not None:
            for name in self.part.partial:
                self.gradients[name] = self.part.all_sum(self.gradients[name])
            mx.eval([self.gradients[name] for name in self.part.partial])

    def _add(self, pending: _Pending) -> None:
        gradients, pending.weight_gradients = pending.weight_gradients, {}
        self._add_up(gradients)
        to_head, pending.to_head = pending.to_head, None
        if self._head is not None and to_head is not None:
            self._head.add_gradients(to_head, self.gradients)

    def _add_up(self, gradients: Mapping[str, mx.array]) -> None:
        """Add to the sums: lazily."""
        for name, gradient in gradients.items():
            if gradient.dtype != mx.float32:
                gradient = gradient.astype(mx.float32)
            total = self.gradients.get(name)
            self.gradients[name] = gradient if total is None else total + gradient


def _longer(array: mx.array, more: int, mode: Literal["constant", "edge"] = "constant") -> mx.array:
    """Return an array (rows, T, ...) with ``more`` positions: zeros, or at the ``edge`` mode copies
    of the last, so that no layer divides by zero there."""
    if not more:
        return array
    widths = [(0, 0)] * array.ndim
    widths[1] = (0, more)
    return mx.pad(array, widths, mode=mode)


def _shorter(array: mx.array, length: int) -> mx.array:
    """Return the first positions of an array (rows, T, ...)."""
    return array if array.shape[1] == length else array[:, :length]
