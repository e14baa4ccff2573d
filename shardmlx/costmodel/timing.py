"""Tell how long parts of a model take on a machine, from its speed or a measurement.

No MLX, no MPI.

A part is a decoder layer, the embedding, or the head with the final norm. Its times are those of
one micro-batch: forward (F), gradient for the input (I), gradient for the weights (W).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from shardmlx.config.specs import FULL, NONE, SELECTIVE
from shardmlx.models.shape import ModelShape
from shardmlx.partitioners import LayerCosts
from shardmlx.pipeline.simulate import Costs

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
        return Costs(self.forward, self.input_gradient, self.weight_gradient)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSeconds:
    """Times of each part of a model, on one machine, for micro-batches of one size.

    ``first_trained`` is the lowest layer with trained weights, ``len(layers)`` if there is none;
    layers below run only forward.
    """

    layers: tuple[Seconds, ...]
    embedding: Seconds = Seconds()
    head: Seconds = Seconds()
    first_trained: int = 0
    recompute: str = NONE

    def layer(self, index: int) -> float:
        """Return F + I + W of one layer, and the recomputed share of its F."""
        seconds = self.layers[index]
        again = COMPUTED_AGAIN[self.recompute] * (index >= self.first_trained)
        return max(0.0, seconds.microbatch + again * seconds.forward)

    @property
    def layer_costs(self) -> LayerCosts:
        """F + I + W of each part, for a partitioner."""
        return LayerCosts(
            tuple(map(self.layer, range(len(self.layers)))),
            max(0.0, self.embedding.microbatch),
            max(0.0, self.head.microbatch),
        )

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
        total = sum(parts, Seconds())
        forward, update = max(LEAST_SECONDS, total.forward), max(0.0, total.update)
        if stop <= self.first_trained:
            return Seconds(forward)
        # Only layers with a backward pass are recomputed.
        again = COMPUTED_AGAIN[self.recompute] * sum(
            each.forward for each in self.layers[max(start, self.first_trained) : stop]
        )
        backward = max(0.0, total.input_gradient + total.weight_gradient) + again
        if start <= self.first_trained:
            return Seconds(forward, 0.0, backward, update)
        if self.recompute == FULL:
            return Seconds(forward, backward, 0.0, update)
        input_gradient = max(0.0, total.input_gradient) + again
        return Seconds(forward, input_gradient, max(0.0, total.weight_gradient), update)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A machine known by its FLOP/s alone, as reached in matrix products."""

    shape: ModelShape
    flops: float
    first_trained: int
    trains_weights: bool
    trains_ends: bool = False
    recompute: str = NONE

    def seconds(self, rows: int, length: int) -> ModelSeconds:
        """Return F, I and W of equal FLOPs, at the machine's speed (6N: Kaplan et al. 2020).

        Layers below ``first_trained`` run F alone. Embedding, norms, update, and the few FLOPs of W
        with adapters are left out.
        """
        tokens = rows * length
        layers = [
            self._pass_of(self.shape.layer(layer).flops(length) * tokens, layer)
            for layer in range(self.shape.num_layers)
        ]
        head = self._pass_of(self.shape.head_flops() * tokens, self.shape.num_layers - 1)
        return ModelSeconds(
            layers=tuple(layers),
            head=replace(head, weight_gradient=head.weight_gradient * self.trains_ends),
            first_trained=self.first_trained,
            recompute=self.recompute,
        )

    def _pass_of(self, flops: float, layer: int) -> Seconds:
        once = flops / self.flops
        backward = once if layer >= self.first_trained else 0.0
        return Seconds(once, backward, backward * self.trains_weights)


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Times of a layer that trains, with every gradient, and of one that runs only forward."""

    trained: Seconds
    frozen: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Times measured with micro-batches of ``rows`` x ``length`` tokens.

    ``layer`` is a layer that trains, with every gradient; ``frozen`` one that runs only forward.
    ``others`` are the other kinds of layers.
    """

    rows: int
    length: int
    layer: Seconds
    frozen: Seconds
    embedding: Seconds
    head: Seconds
    others: tuple[LayerTimes, ...] = ()

    @property
    def kinds(self) -> tuple[LayerTimes, ...]:
        """Times of each kind of layer."""
        return (LayerTimes(self.layer, self.frozen), *self.others)

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    def __post_init__(self) -> None:
        if self.rows < 1 or self.length < 1:
            raise ValueError(f"a micro-batch of {self.rows} x {self.length} tokens")
        layers = [part for kind in self.kinds for part in (kind.trained, kind.frozen)]
        for part in (*layers, self.embedding, self.head):
            if not all(map(math.isfinite, astuple(part))):
                raise ValueError(f"times of {astuple(part)} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A machine on which samples were taken: equal rows in each, in ascending order of length."""

    pattern: tuple[int, ...]
    """Kind of each layer, as its number in the samples."""
    samples: tuple[Sample, ...]
    first_trained: int
    recompute: str = NONE

    def seconds(self, rows: int, length: int) -> ModelSeconds:
        """Return times interpolated between the samples of the next shorter and longer sequences.

        The outermost line goes on beyond the samples; times from one sample are proportional to
        tokens. A row costs as much as in the samples.
        """

        def part(times: Sequence[Seconds]) -> Seconds:
            return self._interpolated(times, rows, length)

        kinds = list(zip(*(sample.kinds for sample in self.samples), strict=True))
        trained = [part([times.trained for times in kind]) for kind in kinds]
        frozen = [part([times.frozen for times in kind]) for kind in kinds]
        return ModelSeconds(
            layers=tuple(
                frozen[kind] if i < self.first_trained else trained[kind]
                for i, kind in enumerate(self.pattern)
            ),
            embedding=part([sample.embedding for sample in self.samples]),
            head=part([sample.head for sample in self.samples]),
            first_trained=self.first_trained,
            recompute=self.recompute,
        )

    def _interpolated(self, times: Sequence[Seconds], rows: int, length: int) -> Seconds:
        """Return the time of a part by those in each sample."""
        lengths = [sample.length for sample in self.samples]
        if len(times) == 1:
            mixed = times[0].scaled(length / lengths[0])
        else:
            upper = next((i for i, each in enumerate(lengths) if each >= length), len(times) - 1)
            upper = max(1, upper)
            low, high = lengths[upper - 1], lengths[upper]
            weight = (length - low) / (high - low)
            mixed = times[upper - 1].scaled(1 - weight) + times[upper].scaled(weight)
        return replace(mixed.scaled(rows / self.samples[0].rows), update=times[0].update)
