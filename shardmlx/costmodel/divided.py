"""Predict what a replica holds of weights that all replicas divide. No MLX, no MPI.

Owners are chosen as ``engine.divided_weights`` chooses them, by the sizes of a layer's matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from shardmlx.costmodel.training_setup import TrainingSetup
from shardmlx.engine.owners import Gathered, Share, owners_of_gathered, shares
from shardmlx.models.layer_shape import LayerShape

END = "end"
"""Room of embedding and lm_head."""


def largest_share(setup: TrainingSetup, start: int, stop: int, ends: Sequence[float]) -> Share:
    """Return the largest parts that a replica holds of layers ``start`` to ``stop`` and of matrices
    of so many bytes at their ``ends``. Adapters are not in it."""
    lowest = stop if setup.has_adapters else max(start, setup.first_trained_layer)
    kinds = [setup.shape.layer(i) for i in range(start, stop)]
    sizes = setup.weight_sizes.layers[start:stop]
    layers = tuple(zip(kinds, sizes, strict=True))
    return _largest(layers, lowest - start, tuple(ends), setup.unfreeze_all, setup.dp)


@lru_cache(maxsize=256)
def _largest(
    layers: Sequence[tuple[LayerShape, float]],
    lowest: int,
    ends: Sequence[float],
    trains_ends: bool,
    members: int,
) -> Share:
    weights = {
        f"{i} {path}": Gathered(round(nbytes), room, room, i >= lowest)
        for i, (shape, size) in enumerate(layers)
        for path, nbytes in _parts(shape, size)
        for room in [(i % 2, path, round(nbytes))]
    }
    for i, size in enumerate(ends):
        weights[f"{END} {i}"] = Gathered(round(size), END, (END, i), trains_ends)
    found = shares(weights, owners_of_gathered(weights, members), members)
    most = max(found, key=lambda each: each.weights)
    return Share(most.frozen, max(each.trained for each in found), most.room)


def _parts(layer: LayerShape, nbytes: float) -> Iterator[tuple[str, float]]:
    """Yield the parameters of a layer of ``nbytes``, as if all were held in the same precision."""
    scale = nbytes / layer.parameters
    for path, linear in layer.linears:
        yield path, scale * linear.parameters
    for path, norm in layer.norms:
        yield path, scale * math.prod(norm.sides) * (1 + norm.bias)
    for path, sides in layer.arrays:
        yield path, scale * math.prod(sides)
