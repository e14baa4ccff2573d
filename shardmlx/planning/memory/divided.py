"""Predict a replica's bytes of weights that all replicas divide. No MLX, no MPI.

Chooses owners like ``engine.divided_weights``, by the sizes of matrices, but for each stage alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardmlx.engine.owners import Gathered, Held, held_by, owners_of_gathered
from shardmlx.models.sizes.layer_shape import LayerShape
from shardmlx.planning.memory.training_setup import TrainingSetup

END = "end"
"""Room of embedding and lm_head."""


@dataclass(frozen=True, slots=True)
class Divided:
    """Parts of divided weights: ``most`` is the fullest replica's, and ``part`` the largest share
    of a layer's bytes that one replica owns, as a mean of all layers."""

    most: Held
    part: float


def divided(setup: TrainingSetup, start: int, stop: int, ends: Sequence[float]) -> Divided:
    """Say how replicas divide layers and matrices of the bytes of ``ends``, without adapters."""
    first_trained = setup.workload.first_trained_layer
    lowest = max(start, first_trained) if setup.tune.is_full else stop
    kinds = [setup.shape.layer(i) for i in range(start, stop)]
    sizes = setup.workload.weight_sizes.layers[start:stop]
    layers = tuple(zip(kinds, sizes, strict=True))
    return _divided(layers, lowest - start, tuple(ends), setup.tune.unfreeze_all, setup.dp)


@lru_cache(maxsize=256)
def _divided(
    layers: Sequence[tuple[LayerShape, float]],
    lowest: int,
    ends: Sequence[float],
    trains_ends: bool,
    members: int,
) -> Divided:
    weights = {}
    layer_of = {}
    for i, (shape, size) in enumerate(layers):
        for path, nbytes in _parts(shape, size):
            place = (i % 2, path, round(nbytes))
            weights[f"{i} {path}"] = Gathered(round(nbytes), i % 2, place, place, i >= lowest)
            layer_of[f"{i} {path}"] = i
    for i, size in enumerate(ends):
        weights[f"{END} {i}"] = Gathered(round(size), END, END, (END, i), trains_ends)
    owned = owners_of_gathered(weights, members)
    most = max(held_by(weights, owned, members), key=lambda each: each.with_update)
    parts = [[0] * members for _ in layers]
    for name, i in layer_of.items():
        parts[i][owned[name]] += weights[name].nbytes
    part = sum(map(max, parts)) / max(1, sum(map(sum, parts)))
    return Divided(most, part)


def _parts(layer: LayerShape, nbytes: float) -> Iterator[tuple[str, float]]:
    """Yield the parameters of a layer of ``nbytes``, as if all were held in the same precision."""
    scale = nbytes / layer.parameters
    for path, linear in layer.linears:
        yield path, scale * linear.parameters
    for path, norm in layer.norms:
        yield path, scale * math.prod(norm.sides) * (1 + norm.bias)
    for path, sides in layer.arrays:
        yield path, scale * math.prod(sides)
