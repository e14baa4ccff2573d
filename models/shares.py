"""Divide a layer's matrices among ranks that compute it together: tensor shares. No MLX, no MPI.

Each rank has whole heads of keys and values, with the queries of their groups, and columns of the
MLP. The sums of all ranks' parts follow attention's last matrix, and the MLP's (Shoeybi et al.,
arXiv:1909.08053)::

    q, k, v, gate, up   rows: outputs of the rank's heads and columns
    o, down             columns: a part of each output, to be summed
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from shardmlx.errors import UserError
from shardmlx.models.layer_shape import NO_RECURRENCE, LayerShape, Linear
from shardmlx.models.shape import ModelShape

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of rows or columns."""

BLOCK = 16
"""Columns of an MLP that stay together, where its width is a multiple."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a matrix, or of an array: ``ranges`` of ``whole`` rows, or of columns."""

    ranges: Ranges
    whole: int
    of_columns: bool = False

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def scaled(self, size: int) -> Ranges:
        """Return the ranges in an array that packs all of them into ``size``."""
        return tuple((a * size // self.whole, b * size // self.whole) for a, b in self.ranges)


@dataclass(frozen=True, slots=True)
class TensorShares:
    """The shares of the ranks of a group, in proportion; ``group_size`` weights share a scale."""

    weights: tuple[int, ...] = (1,)
    group_size: int = 1

    @property
    def size(self) -> int:
        return len(self.weights)

    def bounds(self, units: int, rank: int) -> tuple[int, int]:
        """Return the units of a rank of the group, one at least; there are as many as ranks."""
        ends = [round(units * each / sum(self.weights)) for each in accumulate(self.weights)]
        for i in range(self.size):
            ends[i] = min(max(ends[i], (ends[i - 1] if i else 0) + 1), units - self.size + i + 1)
        return (ends[rank - 1] if rank else 0), ends[rank]

    def cuts(self, layer: LayerShape, rank: int) -> Mapping[str, Cut]:
        """Return the rank's part of each matrix or array by its path; the others are whole. Raises
        ``ValueError`` with the reason why a layer cannot be divided."""
        (values, attention), (down, _) = _summed(layer)
        cuts = dict(self._of_attention(layer, values, attention, rank))
        return cuts | dict(self._of_mlp(layer, down, rank))

    def _of_attention(
        self, layer: LayerShape, path: str, values: Linear, rank: int
    ) -> Iterator[tuple[str, Cut]]:
        heads, parent = layer.heads, f"{path.rpartition('.')[0]}."
        columns = values.inputs // heads.keys
        unit = math.lcm(columns, self.group_size) // columns
        if heads.keys % unit or heads.keys // unit < self.size:
            together = f", of which {unit} share scales" if unit > 1 else ""
            raise ValueError(
                f"it has fewer heads of keys and values than ranks: {heads.keys}{together}"
            )
        first, last = (unit * each for each in self.bounds(heads.keys // unit, rank))

        def cut(size: int, *, of_columns: bool = False) -> Cut:
            each = size // heads.keys
            return Cut(((first * each, last * each),), size, of_columns)

        queries, keys = heads.queries * heads.key_dim, heads.keys * heads.key_dim
        outputs, held = heads.queries * heads.value_dim, heads.keys * heads.value_dim
        if values.inputs != outputs:
            raise ValueError(f"{path} has other inputs than its heads")
        yield path, cut(values.inputs, of_columns=True)
        for name, linear in layer.linears:
            if not name.startswith(parent) or name == path:
                continue
            if linear.outputs in (queries, keys, held, outputs, heads.queries):
                yield name, cut(linear.outputs)
            elif name.endswith("qkv_proj") and linear.outputs == queries + keys + held:
                parts = [cut(size).ranges[0] for size in (queries, keys, held)]
                begins = (0, queries, queries + keys)
                ranges = [(a + at, b + at) for (a, b), at in zip(parts, begins, strict=True)]
                yield name, Cut(tuple(ranges), linear.outputs)
            else:
                raise ValueError(f"{name} is not divided by heads")
        for name, sides in layer.arrays:
            if name.startswith(parent):
                if sides[0] != heads.queries:
                    raise ValueError(f"{name} is not divided by heads")
                yield name, cut(heads.queries)
        for name, norm in layer.norms:
            if name.startswith(parent) and (norm.heads or norm.size > heads.key_dim):
                raise ValueError(f"{name} norms all heads together")

    def _of_mlp(self, layer: LayerShape, path: str, rank: int) -> Iterator[tuple[str, Cut]]:
        linears, parent = dict(layer.linears), f"{path.rpartition('.')[0]}."
        width = linears[path].inputs
        block = math.lcm(math.gcd(width, BLOCK), self.group_size)
        if width % block or width // block < self.size:
            raise ValueError(f"its MLP has {width} columns, of which {block} stay together")
        first, last = (block * each for each in self.bounds(width // block, rank))
        yield path, Cut(((first, last),), width, of_columns=True)
        for name, _ in (*layer.norms, *layer.arrays):
            if name.startswith(parent):
                raise ValueError(f"{name} takes the whole MLP")
        for name, linear in linears.items():
            if not name.startswith(parent) or name == path:
                continue
            if linear.outputs == width:
                yield name, Cut(((first, last),), width)
            elif linear.outputs == 2 * width:
                yield name, Cut(((first, last), (width + first, width + last)), 2 * width)
            else:
                raise ValueError(f"{name} is not divided by columns")

    def check(self, shape: ModelShape) -> None:
        """Raise ``UserError`` where layers cannot be divided so."""
        for layer in shape.kinds if self.size > 1 else ():
            try:
                self.cuts(layer, 0)
            except ValueError as error:
                raise UserError(
                    f"--tensor-parallel {self.size}: layers of {shape.model_type} cannot be "
                    f"divided: {error}",
                    "leave it out: stages divide the model by layers",
                ) from None

    def of(self, shape: ModelShape, rank: int) -> ModelShape:
        """Return the sizes of the model that a rank of the group holds."""
        if self.size == 1:
            return shape
        return replace(shape, kinds=tuple(self._share(each, rank) for each in shape.kinds))

    def _share(self, layer: LayerShape, rank: int) -> LayerShape:
        cuts, heads = self.cuts(layer, rank), layer.heads
        (values, whole), _ = _summed(layer)
        keys = cuts[values].size * heads.keys // whole.inputs
        queries, cached = (keys * each // heads.keys for each in (heads.queries, heads.cached))
        linears, arrays = dict(layer.linears), dict(layer.arrays)
        for path, cut in cuts.items():
            if path in arrays:
                arrays[path] = (cut.size, *arrays[path][1:])
            elif cut.of_columns:
                linears[path] = linears[path]._replace(inputs=cut.size)
            else:
                linears[path] = linears[path]._replace(outputs=cut.size)
        return replace(
            layer,
            linears=tuple(linears.items()),
            arrays=tuple(arrays.items()),
            heads=heads._replace(queries=queries, keys=keys, cached=cached),
        )


WHOLE = TensorShares()
"""The shares of a rank that has whole layers."""


def _summed(layer: LayerShape) -> tuple[tuple[str, Linear], tuple[str, Linear]]:
    """Return the last matrices of attention and of the MLP, with their paths. Raises
    ``ValueError``."""
    if layer.recurrence != NO_RECURRENCE:
        raise ValueError("it has recurrent layers")
    if any(each.source.startswith("latent") for _, each in layer.linears):
        raise ValueError("its keys and values are made of one latent state")
    if layer.is_parallel:
        raise ValueError("it has attention and MLP side by side")
    of_attention = [(path, each) for path, each in layer.linears if each.source == "values"]
    of_mlp = [(path, each) for path, each in layer.linears if each.source.startswith("product")]
    for found, what in ((of_attention, "attention"), (of_mlp, "MLPs")):
        if len(found) != 1 or "." not in found[0][0]:
            raise ValueError(f"a layer has {len(found)} {what}")
    return of_attention[0], of_mlp[0]
