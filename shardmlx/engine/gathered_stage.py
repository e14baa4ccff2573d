"""Run a stage whose weights are divided among replicas: layers are gathered to compute.

The stage is ``engine.stage``'s, cut into segments: embedding, each layer, and norm with lm_head and
loss. Each is a joint graph of its own, evaluated as soon as its weights are gathered, so that
nothing is sent or awaited inside of a graph::

    F   gather layer 0, compute, gather layer 1 meanwhile, compute ...       each graph stays lazy
    B   gather layer n, gradients, gather layer n-1 meanwhile, gradients ...

At a segment's end the incoming gradient is copied into its graph's cotangent buffer, which all
segments share, one after the other. I and W are one action: a separate W would gather all layers
again. The sums of a segment's gradients over replicas start at once, in every micro-batch, so that
no replica holds those of all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx

from shardmlx.config.specs import NO_SAVINGS, Savings
from shardmlx.distributed.messages import copy_into
from shardmlx.engine.batches import MicroBatch
from shardmlx.engine.divided_weights import DividedWeights
from shardmlx.engine.loss import HeadInput, token_loss
from shardmlx.engine.objectives import Objective
from shardmlx.engine.stage import Stage
from shardmlx.models.runtime.decoder import LayerCall, Visit
from shardmlx.models.runtime.slice import Slice
from shardmlx.pipeline.actions import Kind
from shardmlx.pipeline.lowering import gradient_kinds


@dataclass(slots=True)
class _Segment:
    """A segment of a micro-batch between its forward and its backward, with lazy gradients.

    ``to_head`` is the input of a trained head whose gradients are computed in pieces.
    """

    group: int
    input_gradient: mx.array | None
    weight_gradients: Mapping[str, mx.array]
    to_head: HeadInput | None = None


@dataclass(slots=True)
class _InFlight:
    """A micro-batch between the beginning of its forward and the end of its backward.

    ``cotangent`` is the buffer to which the graphs of layers refer, ``gradient`` the incoming
    gradient of the last of the ``segments``: at first a buffer for one that another stage sends, if
    any.
    """

    cotangent: mx.array
    gradient: mx.array | None
    segments: list[_Segment] = field(default_factory=list)


class GatheredStage(Stage):
    """A stage that gathers each layer before it computes it, in forward and backward.

    This replica holds a part of ``weights``; ``how`` is as for ``Stage``. All replicas run the same
    micro-batches in the same order. The gradients equal those of ``Stage``.
    """

    reduces_each = True

    def __init__(self, index: int, part: Slice, weights: DividedWeights, **how: Any) -> None:
        super().__init__(index, part, compiled=False, **how)
        self._weights = weights
        self._in_flight: dict[int, _InFlight] = {}
        self._trained = [
            tuple(name for name in self.names if name in group) for group in part.groups
        ]
        self._tail = len(part.groups) - 1
        # A tied matrix is in the first group too, which completes its gradient.
        self._last_names = tuple(n for n in self._trained[-1] if n not in self._trained[0])
        # The lowest group with a backward; a gradient for stages below passes through all groups.
        with_gradients = [group for group, names in enumerate(self._trained) if names]
        self._lowest = 0 if self.needs_input_gradient or not with_gradients else with_gradients[0]

    def forward(
        self,
        j: int,
        microbatch: MicroBatch,
        x: mx.array | None,
        *,
        scale: float,
        key: tuple[int, ...] = (0,),
    ) -> mx.array:
        """Compute F of micro-batch ``j``, and prepare its backward, as ``Stage.forward``."""
        if not (self.names or self.needs_input_gradient):
            return self.evaluate(microbatch, x)
        self._in_flight[j] = state = self._new_state(microbatch)
        source, answers = self._given(microbatch, x)
        how: dict[str, Any] = {"first_row": microbatch.first_row, "places": microbatch.places}
        how["key"] = key
        if self.part.is_first and self._trained[0]:
            self._weights.use(self.part, 0)
            embed = partial(self.part.embed, source, **how)
            _, segment = self._segment(0, self._trained[0], embed, state.cotangent)
            state.segments.append(segment)

        def visit(i: int, call: LayerCall, x: mx.array) -> mx.array:
            group = self._begin_layer(i, x)
            if group < self._lowest:
                out = call(x)
            else:
                out, segment = self._segment(group, self._trained[group], call, state.cotangent, x)
                state.segments.append(segment)
            mx.eval(out)
            return out

        hidden = self._through_layers(source, visit, self.checkpoint, how)
        if self._head is None:
            return hidden
        self._weights.use(self.part, self._tail)
        if answers:

            def loss_of(hidden: mx.array) -> mx.array:
                return token_loss(self.part.logits(self.part.norm(hidden), **how), *answers)

            cotangent = mx.array(scale, mx.float32)
            loss, segment = self._segment(self._tail, self._trained[-1], loss_of, cotangent, hidden)
        else:
            normed = self.part.norm(hidden)
            mx.eval(normed)
            given = HeadInput(normed, microbatch, scale, key)
            loss, gradient, given = self._head.result_and_gradient(given)
            of_norm = tuple(n for n in self._trained[-1] if n not in self._head.names)
            _, segment = self._segment(self._tail, of_norm, self.part.norm, gradient, hidden)
            segment.to_head = given if self._head.names else None
        state.segments.append(segment)
        mx.eval(loss)
        return loss

    def evaluate(self, microbatch: MicroBatch, x: mx.array | None) -> mx.array:
        """Compute the result of ``forward``, without a backward pass to follow."""
        source, answers = self._given(microbatch, x)

        def visit(i: int, call: LayerCall, x: mx.array) -> mx.array:
            self._begin_layer(i, x)
            out = call(x)
            mx.eval(out)
            return out

        out = self._through_layers(source, visit, False, {"places": microbatch.places})
        if self._head is None:
            return out
        self._weights.use(self.part, self._tail)
        normed = self.part.norm(out)
        if not answers:
            mx.eval(normed)
            return self._head.result(HeadInput(normed, microbatch))
        loss = token_loss(self.part.logits(normed, places=microbatch.places), *answers)
        mx.eval(loss)
        return loss

    def _through_layers(
        self, source: mx.array, visit: Visit, checkpoint: bool, how: Mapping[str, Any]
    ) -> mx.array:
        if self.part.is_first:
            self._weights.use(self.part, 0, 1)
        chunk = self.savings.attention_chunk
        return self.part(source, checkpoint=checkpoint, attention_chunk=chunk, visit=visit, **how)

    def _begin_layer(self, i: int, x: mx.array) -> int:
        """Gather layer ``i``, with input ``x``; return the number of its group."""
        # The embedding is used before another matrix takes its room.
        mx.eval(x)
        group = i - self.part.start + 1
        following = group + 1 if group < self._tail - 1 or self.part.is_last else None
        self._weights.use(self.part, group, following)
        return group

    def _segment(
        self,
        group: int,
        names: Sequence[str],
        run: Callable[..., mx.array],
        cotangent: mx.array,
        *inputs: mx.array,
    ) -> tuple[mx.array, _Segment]:
        """Return the output of ``run``, and its lazy gradients: for the weights ``names``, and for
        its input if it has one and something below is trained."""
        passed = [*inputs] if group > self._lowest else []

        def with_weights(*primals: mx.array) -> mx.array:
            given, arrays = primals[: len(passed)] or inputs, primals[len(passed) :]
            return self.part.with_parameters(names, arrays, lambda: run(*given))

        primals = passed + [self.part[name] for name in names]
        if not primals:
            return with_weights(), _Segment(group, None, {})
        (out,), gradients = mx.vjp(with_weights, primals, [cotangent])
        input_gradient = gradients.pop(0) if passed else None
        return out, _Segment(group, input_gradient, dict(zip(names, gradients, strict=True)))

    def _new_state(self, microbatch: MicroBatch) -> _InFlight:
        shape = (*microbatch.shape, self.part.hidden_size)
        others = (state.cotangent for state in self._in_flight.values())
        cotangent = next((each for each in others if each.shape == shape), None)
        if cotangent is None:
            cotangent = self._new_cotangent(microbatch, self.part.hidden_size)
        gradient = None
        if not self.part.is_last:
            gradient = self._new_cotangent(microbatch, self.part.hidden_size)
        # Each layer's graph is evaluated by itself, some without the first of these buffers.
        mx.eval(cotangent, [] if gradient is None else gradient)
        return _InFlight(cotangent, gradient)

    def cotangent(self, j: int) -> mx.array:
        """Return the gradient of micro-batch ``j``'s output: to be filled before its backward."""
        gradient = self._in_flight[j].gradient
        assert gradient is not None, "nothing comes to the last stage"
        return gradient

    def backward_in_parts(self, j: int) -> Iterator[Sequence[str]]:
        """Compute I and W of micro-batch ``j``; yield the trained weights of each segment once
        their gradients are added."""
        state = self._in_flight[j]
        while state.segments:
            segment = state.segments.pop()
            if state.gradient is not None:
                copy_into(state.cotangent, state.gradient)
            below = state.segments[-1].group if state.segments else None
            self._weights.use(self.part, segment.group, below)
            state.gradient = segment.input_gradient
            self._add_up(segment.weight_gradients)
            if segment.to_head is not None and self._head is not None:
                self._head.add_gradients(segment.to_head, self.gradients)
            sums = [self.gradients[name] for name in self._trained[segment.group]]
            mx.eval(sums if state.gradient is None else [state.gradient, *sums])
            yield self._last_names if segment.group == self._tail else self._trained[segment.group]
        if not self.needs_input_gradient:
            del self._in_flight[j]

    def backward_input(self, j: int) -> mx.array:
        """Compute I and W of micro-batch ``j``: return the gradient of the stage's input."""
        for _ in self.backward_in_parts(j):
            pass
        gradient = self._in_flight.pop(j).gradient
        assert gradient is not None, "lowering asks for I only where it is needed"
        return gradient

    def backward_weight_in_parts(
        self, j: int, parts: Sequence[Sequence[str]]
    ) -> Iterator[Sequence[str]]:
        """Compute W, unless it came with I; yield the weights of each segment."""
        if j in self._in_flight:
            yield from self.backward_in_parts(j)


def build_stages(
    slices: Sequence[Slice],
    own: Iterable[int] | None = None,
    *,
    savings: Savings = NO_SAVINGS,
    weights: DividedWeights | None = None,
    objective: Objective | None = None,
) -> list[Stage]:
    """Build the stages of one rank out of the slices of all stages.

    ``slices[s]`` is the slice of stage s, the whole model in pipeline order: a stage above a
    trained slice needs the gradient of its input. ``own`` are the stages to build, for a plan
    ``plan.stages_of(rank)``; by default all. ``savings`` and ``objective`` are as for ``Stage``.
    Stages gather divided ``weights`` layer by layer.
    """
    gradients = gradient_kinds([bool(part.trainable) for part in slices])
    stages: list[Stage] = []
    for index in range(len(slices)) if own is None else own:
        part = slices[index]
        how: dict[str, Any] = {
            "needs_input_gradient": Kind.I in gradients[index],
            "savings": savings,
            "objective": objective,
        }
        stages.append(
            Stage(index, part, **how)
            if weights is None
            else GatheredStage(index, part, weights, **how)
        )
    return stages
