"""Define the question to a partitioner, and its answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shardmlx.errors import UserError
from shardmlx.pipeline.stage_map import Partition, StageMap

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Cost of each decoder layer, of the embedding (first stage), of norm and lm_head (last stage).

    The unit is free: seconds, FLOPs, bytes. Raises ``ValueError`` for negative or infinite numbers.
    """

    layers: tuple[float, ...]
    embedding: float = 0.0
    head: float = 0.0

    def __post_init__(self) -> None:
        for cost in (*self.layers, self.embedding, self.head):
            if not (math.isfinite(cost) and cost >= 0):
                raise ValueError(f"a cost of {cost}")

    def scaled(self, factor: float) -> LayerCosts:
        """Return all costs, ``factor`` times as large."""
        layers = tuple(cost * factor for cost in self.layers)
        return LayerCosts(layers, self.embedding * factor, self.head * factor)

    def total(self, start: int, stop: int) -> float:
        """Return the cost of layers ``start`` to ``stop`` as a stage, with its ends."""
        ends = (self.embedding * (start == 0), self.head * (stop == len(self.layers)))
        return math.fsum((*self.layers[start:stop], *ends))

    def exact_sums(self) -> tuple[list[int], int]:
        """Return the costs of the layers below each, with the ends, as multiples of a small unit,
        and how many of it make 1: a difference, divided by these, is a ``total``, to the bit."""
        ends = (self.embedding, self.head)
        ratios = [cost.as_integer_ratio() for cost in (*self.layers, *ends)]
        scale = max(denominator for _, denominator in ratios)  # floats have powers of two
        *layers, embedding, head = (each * (scale // denominator) for each, denominator in ratios)
        layers[0] += embedding
        layers[-1] += head
        return [*accumulate(layers, initial=0)], scale


@runtime_checkable
class PeakTables(Protocol):
    """Peak bytes of stages that can be had many at a time."""

    def table(self, stage: int, starts: range, stops: range) -> Array:
        """Return the peaks of a stage by [start, stop]: any where it has no layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Layers to be divided among the stages of a pipeline, and the machines that run them.

    A pipeline rank is a machine, or its share of one. Missing fields are unknown, and do not count.
    Raises ``UserError`` for more stages than layers, ``ValueError`` for missing entries.
    """

    placement: tuple[int, ...]
    """The pipeline rank of each stage, in pipeline order."""
    costs: tuple[LayerCosts, ...]
    """Cost of one micro-batch on each pipeline rank, forward and backward: seconds, or FLOPs."""
    sizes: LayerCosts
    """Bytes of the parameters."""
    peak: Callable[[int, int, int], float] | None = None
    """Peak bytes of a stage with layers start to stop: (stage, start, stop) -> bytes. The stages of
    one rank add up, and more layers never hold less, but for the ``first_trained``."""
    first_trained: int = 0
    """The lowest layer with a backward pass: a stage that begins with it may hold less than one
    that begins above it, which has a gradient for the stage below."""
    capacity: tuple[float, ...] = ()
    """Bytes that each pipeline rank has; ``inf`` if unknown."""
    transfer: tuple[tuple[float, ...], ...] = ()
    """Seconds ``transfer[a][b]`` of a micro-batch's message from rank a to b; 0 if unknown."""
    microbatches: int = 1
    """Number of micro-batches of one step and one pipeline."""
    once: tuple[LayerCosts, ...] = ()
    """Cost, on each pipeline rank, of what passes the stages one after the other in a step, beside
    the micro-batches: it adds up. Only ``hetero`` and ``fastest_in_order`` count it."""
    hosts: tuple[str, ...] = ()
    """The host of each pipeline rank, if known."""

    def __post_init__(self) -> None:
        if self.num_stages > self.num_layers:
            raise UserError(
                f"{self.num_stages} stages, but the model has {self.num_layers} layers",
                f"use at most {self.num_layers} stages",
            )
        pp = self.pp
        if set(self.placement) != set(range(pp)):
            raise ValueError(f"ranks {sorted(set(self.placement))}: 0 to {pp - 1} without holes")
        if not self.capacity:
            object.__setattr__(self, "capacity", (math.inf,) * pp)
        if not self.transfer:
            object.__setattr__(self, "transfer", ((0.0,) * pp,) * pp)
        named = (self.hosts or self.costs, self.once or self.costs)
        for entries in (self.costs, self.capacity, self.transfer, *named):
            if len(entries) != pp:
                raise ValueError(f"{len(entries)} entries for {pp} pipeline ranks: {entries}")

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.sizes.layers)

    @property
    def num_stages(self) -> int:
        """Number of stages, on all ranks together."""
        return len(self.placement)

    @property
    def pp(self) -> int:
        """Number of pipeline ranks."""
        return max(self.placement, default=-1) + 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a pipeline rank runs, ascending."""
        return tuple(stage for stage, its_rank in enumerate(self.placement) if its_rank == rank)

    def held(self, stage: int, start: int, stop: int) -> float:
        """Return the ``peak`` of a stage, or the bytes of its parameters if that is unknown."""
        if self.peak is None:
            return self.sizes.total(start, stop)
        return self.peak(stage, start, stop)

    def held_by_range(self, stage: int, starts: range, stops: range) -> Array:
        """Return what ``held`` does by [start, stop]: any where a stage has no layer."""
        if isinstance(self.peak, PeakTables):
            return self.peak.table(stage, starts, stops)
        return np.array(
            [
                [self.held(stage, start, stop) if start < stop else 0.0 for stop in stops]
                for start in starts
            ],
            np.float64,
        )

    def round_trip(self, a: int, b: int) -> float:
        """Return the seconds of a micro-batch's messages from rank a to b and back."""
        return self.transfer[a][b] + self.transfer[b][a]

    def name_of(self, rank: int) -> str:
        """Return a pipeline rank as messages name it, with its host where that is known."""
        return f"rank {rank} ({self.hosts[rank]})" if self.hosts else f"rank {rank}"

    def stage_map(self, partition: Partition, placement: tuple[int, ...] | None = None) -> StageMap:
        """Return the stage map, by default with the problem's placement."""
        placement = self.placement if placement is None else placement
        hosts = tuple(self.hosts[rank] for rank in placement) if self.hosts else ()
        return StageMap(partition, placement, hosts)


Partitioner = Callable[[Problem], StageMap]
"""Divides all layers among the stages; raises ``UserError`` if that is impossible."""
