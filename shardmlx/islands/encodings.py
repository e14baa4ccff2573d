"""Encodings of the differences that islands and hub exchange, tensor by tensor.

The bytes of a tensor follow from its shape alone, and equal bytes are equal numbers on all
machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shardmlx.distributed.wire_formats import WIRE_FORMATS, WireFormat

FLOAT32 = WIRE_FORMATS["float32"]

Shape = Sequence[int]
Data = np.ndarray
"""Encoded bytes, uint8."""


class Encoding:
    """Encodes each number in a wire format; subclasses send less than all numbers."""

    warm_starts = False
    """True if the bytes of a tensor help to encode its next difference."""

    defers = False
    """True if most of a difference is told by later ones."""

    def __init__(self, wire: WireFormat = FLOAT32) -> None:
        self._wire = wire
        self.is_lossy = wire.is_shorter

    def nbytes(self, shape: Shape) -> int:
        """Return the bytes of a tensor of this shape."""
        return self._wire.nbytes(math.prod(shape))

    def encode(self, array: np.ndarray, before: Data | None = None) -> Data:
        """Return the bytes of a float32 tensor; ``before`` are those of its last difference."""
        return self._wire.encode(np.ascontiguousarray(array).reshape(-1)).view(np.uint8)

    def decode(self, data: Data, shape: Shape) -> np.ndarray:
        """Return the float32 tensor of its bytes. Raises ``ValueError`` for what ``encode`` cannot
        have made."""
        if len(data) != self.nbytes(shape):
            raise ValueError(f"{len(data)} bytes for a tensor of {self.nbytes(shape)}")
        return self._decoded(data, shape)

    def _decoded(self, data: Data, shape: Shape) -> np.ndarray:
        return self._wire.decode(data, math.prod(shape)).reshape(shape)


class TopK(Encoding):
    """The largest numbers of a tensor, a ``share`` of all, and their places: 8 bytes each."""

    defers = True

    def __init__(self, share: float) -> None:
        super().__init__()
        if not 0 < share <= 0.5:
            raise ValueError("give a share of the numbers above 0, up to 0.5")
        self.is_lossy = True
        self._share = share

    def nbytes(self, shape: Shape) -> int:
        """Return 8 bytes for each number that is kept: its place, and itself."""
        return 8 * math.ceil(self._share * math.prod(shape))

    def encode(self, array: np.ndarray, before: Data | None = None) -> Data:
        """Keep the largest numbers of all, and their places."""
        numbers = array.reshape(-1)
        count = self.nbytes(array.shape) // 8
        places = np.argpartition(np.abs(numbers), numbers.size - count)[numbers.size - count :]
        places.sort()
        parts = [places.astype(np.uint32), numbers[places]]
        return np.concatenate([part.view(np.uint8) for part in parts])

    def _decoded(self, data: Data, shape: Shape) -> np.ndarray:
        places, numbers = np.split(data, 2)
        places, whole = places.view(np.uint32), np.zeros(math.prod(shape), np.float32)
        if (places >= whole.size).any():
            raise ValueError(f"a number at {places.max()} of a tensor of {whole.size}")
        whole[places] = numbers.view(np.float32)
        return whole.reshape(shape)


class LowRank(Encoding):
    """The two factors of a matrix of a lower ``rank``: PowerSGD's (Vogels et al., arXiv:1905.13727)
    one power iteration, begun with the last factor. Vectors, and matrices that factors would not
    make shorter, are whole."""

    warm_starts = defers = True

    def __init__(self, rank: float) -> None:
        super().__init__()
        if rank != int(rank) or rank < 1:
            raise ValueError("give a rank, a whole number from 1")
        self.is_lossy = True
        self._rank = int(rank)

    def _sides(self, shape: Shape) -> tuple[int, int] | None:
        """Return rows and columns of a tensor, None if it is sent whole."""
        rows = math.prod(shape[:-1])
        columns = math.prod(shape[-1:])
        is_shorter = self._rank * (rows + columns) < rows * columns
        return (rows, columns) if len(shape) > 1 and is_shorter else None

    def nbytes(self, shape: Shape) -> int:
        """Return the bytes of two factors, or of the tensor if that is shorter."""
        sides = self._sides(shape)
        return super().nbytes(shape if sides is None else (self._rank, sum(sides)))

    def encode(self, array: np.ndarray, before: Data | None = None) -> Data:
        """Return two factors whose product is near the tensor; ``before`` has the last ones."""
        sides = self._sides(array.shape)
        if sides is None:
            return super().encode(array)
        matrix = array.reshape(sides)
        if before is None:
            right = np.random.RandomState(0).randn(self._rank, sides[1]).astype(np.float32)
        else:
            _, right = self._factors(before, sides)
        left = np.linalg.qr(matrix @ right.T)[0].T
        return super().encode(np.concatenate([left, left @ matrix], axis=1))

    def _decoded(self, data: Data, shape: Shape) -> np.ndarray:
        sides = self._sides(shape)
        if sides is None:
            return super()._decoded(data, shape)
        whole = np.zeros(sides, np.float32)
        # Each library would round a product of matrices in its own way.
        for left, right in zip(*self._factors(data, sides), strict=True):
            whole += np.multiply.outer(left, right)
        return whole.reshape(shape)

    def _factors(self, data: Data, sides: tuple[int, int]) -> list[np.ndarray]:
        """Return the factors (rank, rows) and (rank, columns)."""
        both = super()._decoded(data, (self._rank, sum(sides)))
        return np.split(both, [sides[0]], axis=1)


_WITH_NUMBER: Mapping[str, tuple[Callable[[float], Encoding], float]] = {
    "top-k": (TopK, 0.01),
    "low-rank": (LowRank, 4),
}

ENCODINGS = (*WIRE_FORMATS, *_WITH_NUMBER)
"""The names of all encodings."""


def encoding_named(text: str) -> Encoding:
    """Return the encoding of a name, with the share of ``top-k:0.01`` or the rank of ``low-rank:4``
    behind it if it is another. Raises ``ValueError``, which says what to give."""
    name, colon, number = text.partition(":")
    if name in WIRE_FORMATS and not colon:
        return Encoding(WIRE_FORMATS[name])
    if name not in _WITH_NUMBER:
        raise ValueError(f"choose from {', '.join(ENCODINGS)}")
    kind, usual = _WITH_NUMBER[name]
    try:
        value = float(number) if colon else usual
    except ValueError:
        raise ValueError(f"give a number after {name}:") from None
    return kind(value)
