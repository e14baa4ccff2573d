"""Tell how long parts of a model take, and a machine of known speed. No MLX, no MPI.

A part is a decoder layer, the embedding, or the head with the final norm. Its times are those of
one micro-batch: forward (F), gradient for the input (I), gradient for the weights (W).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardmlx.config.specs import FULL, NONE, SELECTIVE
from shardmlx.partitioners import LayerCosts
from shardmlx.pipeline.simulate import Costs
from shardmlx.planning.facts.kernels import BACKWARD_TOKENS, tokens_in_turn
from shardmlx.planning.facts.workload import Workload

COMPUTED_AGAIN = {NONE: 0.0, SELECTIVE: 0.05, FULL: 1.0}
"""Share of a layer's forward that the backward recomputes."""

TYPICAL_LENGTH = 512
"""Number of tokens at which a layer's cost is taken if no other length is known."""

LEAST_SECONDS = 1e-6
"""Least time of a forward: differences of short measurements may be negative."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Times of a micro-batch in a part; ``update`` is the optimizer's, once a step.

    The embedding's may be negative: the first stage spares the gradient for a stage below.
    """

    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    update: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.forward + other.forward,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
            self.update + other.update,
        )

    def scaled(self, factor: float) -> Seconds:
        """Return all times, ``factor`` times as long."""
        return Seconds(
            factor * self.forward,
            factor * self.input_gradient,
            factor * self.weight_gradient,
            factor * self.update,
        )

    def of_share(self, share: float) -> Seconds:
        """Return the times of a share of a micro-batch; the update stays."""
        return replace(self.scaled(share), update=self.update)

    @property
    def microbatch(self) -> float:
        """F + I + W."""
        return self.forward + self.input_gradient + self.weight_gradient

    @property
    def costs(self) -> Costs:
        """The times of a micro-batch, for a simulation."""
        return Costs(self.forward, self.input_gradient, self.weight_gradient)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSeconds:
    """Times of each part of a model, on one machine, for micro-batches of one size; layers below
    ``first_trained`` (their number, if none is trained) run only forward."""

    layers: tuple[Seconds, ...]
    embedding: Seconds = Seconds()
    head: Seconds = Seconds()
    first_trained: int = 0
    recompute: str = NONE

    @property
    def layer_costs(self) -> LayerCosts:
        """F + I + W of each part, and the recomputed share of its F, for a partitioner."""
        again = COMPUTED_AGAIN[self.recompute]
        layers = tuple(
            max(0.0, each.microbatch + again * (i >= self.first_trained) * each.forward)
            for i, each in enumerate(self.layers)
        )
        embedding = self.embedding.microbatch
        head = self.head.microbatch
        return LayerCosts(layers, max(0.0, embedding), max(0.0, head))

    def with_sums(self, seconds: float) -> ModelSeconds:
        """Return the times with two sums a layer in F, and two where a gradient comes back."""
        below, above = Seconds(2 * seconds), Seconds(2 * seconds, 2 * seconds)
        layers = tuple(
            each + (above if i >= self.first_trained else below)
            for i, each in enumerate(self.layers)
        )
        return replace(self, layers=layers)

    def stage(self, start: int, stop: int) -> Seconds:
        """Return the times of layers ``start`` to ``stop`` as a stage, as the engine runs it.

        A stage with nothing trained below it has no I: its W is its whole backward. Recomputation
        counts in I, or in that W; if it is full, so do all gradients.
        """
        parts = list(self.layers[start:stop])
        if start == 0:
            parts.append(self.embedding)
        if stop == len(self.layers):
            parts.append(self.head)
        forward = max(LEAST_SECONDS, sum(each.forward for each in parts))
        if stop <= self.first_trained:
            return Seconds(forward)
        inputs = sum(each.input_gradient for each in parts)
        weights = sum(each.weight_gradient for each in parts)
        update = max(0.0, sum(each.update for each in parts))
        # Only layers with a backward pass are recomputed.
        trained = self.layers[max(start, self.first_trained) : stop]
        again = COMPUTED_AGAIN[self.recompute] * max(0.0, sum(each.forward for each in trained))
        backward = max(0.0, inputs + weights) + again
        if start <= self.first_trained:
            return Seconds(forward, 0.0, backward, update)
        if self.recompute == FULL:
            return Seconds(forward, backward, 0.0, update)
        return Seconds(forward, max(0.0, inputs) + again, max(0.0, weights), update)


@dataclass(frozen=True, slots=True)
class Speed:
    """A machine known by its FLOP/s alone, as reached in matrix products, and by the seconds that
    a ``token`` takes beside them in layers for which it has no kernel."""

    flops: float
    token: float = 0.0

    def seconds(self, workload: Workload, rows: int, length: int) -> ModelSeconds:
        """Return F, I and W of equal FLOPs, of matrix products (6N: Kaplan et al. 2020), and the
        tokens of recurrences without a kernel."""
        rows, length = workload.micro_batch(rows, length)
        shape = workload.shape
        tune = workload.fine_tune
        tokens = rows * length
        first = workload.first_trained
        frozen = []  # A layer of each kind, by its number.
        trained = []
        for kind in shape.kinds:
            once = kind.flops(length) * tokens / self.flops
            waits = tokens_in_turn(kind, length) * self.token
            backward = once + BACKWARD_TOKENS * waits
            frozen.append(Seconds(once + waits))
            trained.append(Seconds(once + waits, backward, once * tune.is_full))
        of_head = shape.head_flops() * tokens / self.flops
        backward = of_head if first < shape.num_layers else 0.0
        head = Seconds(of_head, backward, backward * tune.is_full * tune.unfreeze_all)
        return ModelSeconds(
            layers=tuple(
                trained[kind] if layer >= first else frozen[kind]
                for layer, kind in enumerate(shape.pattern)
            ),
            head=head.of_share(workload.head_share),
            first_trained=first,
            recompute=workload.batch.recomputed,
        )
