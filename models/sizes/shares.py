"""Divide a layer's matrices among ranks that compute it together: tensor shares. No MLX, no MPI.

Each rank has whole heads of keys and values, with the queries of their groups, and columns of the
MLP. The sums of all ranks' parts follow attention's last matrix, and the MLP's (Shoeybi et al.,
arXiv:1909.08053)::

    q, k, v, gate, up   rows: outputs of the rank's heads and columns
    o, down             columns: a part of each output, to be summed

Each rank may have whole experts of a mixture instead (Lepikhin et al., arXiv:2006.16668).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal

from shardmlx.errors import UserError
from shardmlx.models.sizes.layer_shape import NO_RECURRENCE, LayerShape
from shardmlx.models.sizes.shape import ModelShape

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of rows or columns."""

BLOCK = 16
"""Columns of an MLP that stay together, where its width is a multiple."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a matrix, or of an array: ``ranges`` of ``whole`` outputs, which are rows, of
    inputs, which are columns, or of experts in their stack."""

    ranges: Ranges
    whole: int
    of: Literal["outputs", "inputs", "experts"] = "outputs"

    @property
    def size(self) -> int:
        """The number of heads, columns or experts in the ranges."""
        return sum(stop - start for start, stop in self.ranges)

    def axis(self, sides: int, leaf: str) -> int:
        """Return the side that is divided of an array with so many, a matrix or beside one."""
        if self.of == "experts":
            return 0
        return sides - 1 if self.of == "inputs" or leaf == "bias" else max(0, sides - 2)

    def scaled(self, size: int) -> Ranges:
        """Return the ranges in an array that packs all of them into ``size``."""
        return tuple((a * size // self.whole, b * size // self.whole) for a, b in self.ranges)


@dataclass(frozen=True, slots=True)
class TensorShares:
    """The shares of the ranks of a group, in proportion; ``group_size`` weights share a scale.
    Ranks have columns of all experts of a mixture, or ``whole_experts``."""

    weights: tuple[int, ...] = (1,)
    group_size: int = 1
    whole_experts: bool = False

    @property
    def size(self) -> int:
        """The number of ranks that compute a layer together."""
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
        values, products = _last_matrices(layer)
        cuts = dict(self._of_attention(layer, values, rank))
        for path in products:
            has_experts = self.whole_experts and dict(layer.linears)[path].experts
            divide = self._of_experts if has_experts else self._of_mlp
            cuts |= divide(layer, path, rank)
        return cuts

    def _of_attention(self, layer: LayerShape, path: str, rank: int) -> Iterator[tuple[str, Cut]]:
        heads = layer.heads
        parent = f"{path.rpartition('.')[0]}."
        values = dict(layer.linears)[path]
        columns = values.inputs // heads.keys
        unit = math.lcm(columns, self.group_size) // columns
        if heads.keys % unit or heads.keys // unit < self.size:
            together = f", of which {unit} share scales" if unit > 1 else ""
            raise ValueError(
                f"it has fewer heads of keys and values than ranks: {heads.keys}{together}"
            )
        first, last = (unit * each for each in self.bounds(heads.keys // unit, rank))
        cut = partial(_cut_by_heads, heads.keys, (first, last))
        queries = heads.queries * heads.key_dim
        keys = heads.keys * heads.key_dim
        outputs = heads.queries * heads.value_dim
        held = heads.keys * heads.value_dim
        if values.inputs != outputs:
            raise ValueError(f"{path} has other inputs than its heads")
        yield path, replace(cut(values.inputs), of="inputs")
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
        linears = dict(layer.linears)
        parent = f"{path.rpartition('.')[0]}."
        width = linears[path].inputs
        block = math.lcm(math.gcd(width, BLOCK), self.group_size)
        if width % block or width // block < self.size:
            raise ValueError(f"its MLP has {width} columns, of which {block} stay together")
        first, last = (block * each for each in self.bounds(width // block, rank))
        yield path, Cut(((first, last),), width, of="inputs")
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

    def _of_experts(self, layer: LayerShape, path: str, rank: int) -> Iterator[tuple[str, Cut]]:
        count = dict(layer.linears)[path].experts
        parent = f"{path.rpartition('.')[0]}."
        if count < self.size:
            raise ValueError(f"it has fewer experts than ranks: {count}")
        for name, linear in layer.linears:
            if name.startswith(parent) and linear.experts == count:
                yield name, Cut((self.bounds(count, rank),), count, of="experts")

    def check(self, shape: ModelShape) -> None:
        """Raise ``UserError`` where layers cannot be divided so."""
        has_experts = any(layer.experts for layer in shape.kinds)
        if self.whole_experts and (self.size == 1 or not has_experts):
            raise UserError(
                f"expert_parallel divides nothing of {shape.model_type} with --tensor-parallel "
                f"{self.size}",
                "leave it out",
            )
        if (reason := self._refusal(shape)) is not None:
            remedy = "leave it out: stages divide the model by layers"
            if has_experts and replace(self, whole_experts=True)._refusal(shape) is None:
                remedy = "give --expert-parallel, to train expert_parallel in the YAML file"
            raise UserError(
                f"--tensor-parallel {self.size}: layers of {shape.model_type} cannot be divided: "
                f"{reason}",
                remedy,
            )

    def _refusal(self, shape: ModelShape) -> str | None:
        """Return the reason why layers cannot be divided so; None if they can."""
        try:
            for layer in shape.kinds if self.size > 1 else ():
                self.cuts(layer, 0)
        except ValueError as error:
            return str(error)
        return None

    def groups(self, ranks: int) -> int:
        """Return how many groups so many ranks are. Raises ``UserError``."""
        if ranks % self.size:
            raise UserError(
                f"--tensor-parallel {self.size}: {ranks} ranks are not stages of {self.size} each",
                f"start mpirun with -n {self.size} or a multiple of it",
            )
        return ranks // self.size

    def of(self, shape: ModelShape, rank: int) -> ModelShape:
        """Return the sizes of the model that a rank of the group holds."""
        if self.size == 1:
            return shape
        kinds = tuple(self._share(each, rank) for each in shape.kinds)
        return replace(shape, kinds=kinds, divides=shape)

    def _share(self, layer: LayerShape, rank: int) -> LayerShape:
        cuts = self.cuts(layer, rank)
        heads = layer.heads
        values, _ = _last_matrices(layer)
        keys = cuts[values].size * heads.keys // cuts[values].whole
        queries, cached = (keys * each // heads.keys for each in (heads.queries, heads.cached))
        linears = dict(layer.linears)
        arrays = dict(layer.arrays)
        for path, cut in cuts.items():
            if path in arrays:
                arrays[path] = (cut.size, *arrays[path][1:])
            else:
                fewer: dict[str, Any] = {cut.of: cut.size}
                linears[path] = linears[path]._replace(**fewer)
        return replace(
            layer,
            linears=tuple(linears.items()),
            arrays=tuple(arrays.items()),
            heads=heads._replace(queries=queries, keys=keys, cached=cached),
        )


WHOLE = TensorShares()
"""The shares of a rank that has whole layers."""


def summed(layer: LayerShape) -> tuple[str, str]:
    """Return the paths of the two modules whose outputs ranks sum: of attention its last matrix,
    and that of the MLP, or the module with all experts of a layer."""
    values, products = _last_matrices(layer)
    is_dense = len(products) == 1 and not dict(layer.linears)[products[0]].experts
    return values, products[0] if is_dense else products[0].partition(".")[0]


def _last_matrices(layer: LayerShape) -> tuple[str, list[str]]:
    """Return the paths of the last matrices of attention, and of MLPs. Raises ``ValueError``."""
    if layer.recurrence != NO_RECURRENCE:
        raise ValueError("it has recurrent layers")
    if any(each.source.startswith("latent") for _, each in layer.linears):
        raise ValueError("its keys and values are made of one latent state")
    if layer.is_parallel:
        raise ValueError("it has attention and MLP side by side")
    values = [path for path, each in layer.linears if each.source.startswith("values")]
    products = [path for path, each in layer.linears if each.source.startswith("product")]
    if len(values) != 1 or not all("." in path for path in (*values, *products)):
        raise ValueError(f"a layer has {len(values)} modules of attention")
    blocks = {path.partition(".")[0] for path in products}
    norms = [path for path, _ in layer.norms if path.partition(".")[0] in blocks]
    if len(blocks) != 1 or (len(products) > 1 and norms):
        raise ValueError(f"a layer has {len(products)} MLPs")
    return values[0], products


def _cut_by_heads(count: int, own: tuple[int, int], size: int) -> Cut:
    """Return the cut of a side of so many heads together, of which a rank has its ``own``."""
    each = size // count
    return Cut(((own[0] * each, own[1] * each),), size)
