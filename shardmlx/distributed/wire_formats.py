"""Wire formats of contributions to sums."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

BLOCK = 256
"""Numbers that share a scale in int8."""


class WireFormat:
    """The form of float32 numbers on their way: as they are, or shorter in a subclass.

    Equal numbers have equal bytes on all ranks.
    """

    is_shorter = False

    keeps_errors = False
    """True if rounding errors are too large to lose and are added to the next sum; a rank's own
    contribution is then not rounded."""

    def nbytes(self, count: int) -> int:
        """Return the bytes of so many numbers."""
        return 4 * count

    def encode(self, numbers: np.ndarray) -> np.ndarray:
        """Return float32 numbers (N,) as they travel."""
        return numbers

    def decode(self, data: np.ndarray, count: int) -> np.ndarray:
        """Return the float32 numbers that these bytes, uint8, encode."""
        return data.view(np.float32)


class BFloat16(WireFormat):
    """The upper half of a float32, to the nearest, ties to even."""

    is_shorter = True

    def nbytes(self, count: int) -> int:
        """Return 2 bytes a number."""
        return 2 * count

    def encode(self, numbers: np.ndarray) -> np.ndarray:
        """Round to the nearest, ties to even."""
        bits = numbers.view(np.uint32)
        up = (bits >> 16) & 1
        up += 0x7FFF
        up += bits
        short = (up >> 16).astype(np.uint16)
        short[np.isnan(numbers)] = 0x7FC0  # adding may have carried over
        return short.view(np.uint8)

    def decode(self, data: np.ndarray, count: int) -> np.ndarray:
        """Return the upper halves as float32."""
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


class Int8(WireFormat):
    """Multiples of a scale, which ``BLOCK`` numbers share: its 127-fold is the largest of them.

    An infinite or NaN number makes its whole block NaN. Each array begins a new block.
    """

    is_shorter = True
    keeps_errors = True

    def nbytes(self, count: int) -> int:
        """Return a byte a number, and a float32 scale for each block."""
        return count + 4 * -(-count // BLOCK)

    def encode(self, numbers: np.ndarray) -> np.ndarray:
        """Round each block to multiples of a 127th of its largest number."""
        count = numbers.size
        blocks = np.zeros((-(-count // BLOCK), BLOCK), np.float32)
        blocks.reshape(-1)[:count] = numbers
        with np.errstate(invalid="ignore", divide="ignore"):
            scales = np.abs(blocks).max(axis=1) * np.float32(1 / 127)
            blocks /= scales[:, None]
            np.rint(blocks, out=blocks)
            # The scale of zeros is zero; a scale below the smallest number rounds to zero too.
            blocks[~(np.abs(blocks) <= 127)] = 0
        data = np.empty(self.nbytes(count), np.uint8)
        data[:count] = blocks.astype(np.int8).reshape(-1)[:count].view(np.uint8)
        data[count:] = scales.view(np.uint8)
        return data

    def decode(self, data: np.ndarray, count: int) -> np.ndarray:
        """Return the multiples times the scales of their blocks."""
        scales = np.frombuffer(data[count:].tobytes(), np.float32)
        numbers = data[:count].view(np.int8).astype(np.float32)
        whole = count - count % BLOCK
        blocks = numbers[:whole].reshape(-1, BLOCK)  # a view
        with np.errstate(invalid="ignore"):
            blocks *= scales[: whole // BLOCK, None]
            numbers[whole:] *= scales[-1] if count > whole else 1
        return numbers


WIRE_FORMATS: Mapping[str, WireFormat] = {
    "float32": WireFormat(),
    "bfloat16": BFloat16(),
    "int8": Int8(),
}
"""The wire format for each ``sum_dtype``."""
