"""Keep the rounding errors of gradients on the wire until their next sum (error feedback).

Seide et al., "1-bit stochastic gradient descent", Interspeech 2014: nothing is lost for good,
unless a gradient overflows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import mlx.core as mx

from shardmlx.distributed.messages import buffer_of, new_buffer


class RoundingErrors:
    """The errors of one rank, an array in float32 for each weight that it has summed.

    ``groups`` are the ranks that sum each weight, this one among them; without any, no errors are
    kept. Checkpoints name an error ``WEIGHT.MEMBER``, by the rank's place in the group.
    """

    def __init__(self, rank: int, groups: Mapping[str, Sequence[int]]) -> None:
        self._rank = rank
        self._groups = groups
        self._errors: dict[str, mx.array] = {}

    def take(self, sizes: Mapping[str, int]) -> mx.array | None:
        """Return the errors of weights of these ``sizes`` in a row, for a sum to change; zeros at
        first. The array is a copy, since a checkpoint may still refer to the original."""
        if not self._groups:
            return None
        errors = new_buffer((sum(sizes.values()),), mx.float32)
        buffer, start = buffer_of(errors), 0
        for name, size in sizes.items():
            stop = start + errors.itemsize * size
            if name in self._errors:
                buffer[start:stop] = buffer_of(self._errors.pop(name))
            start = stop
        return errors

    def keep(self, sizes: Mapping[str, int], errors: mx.array | None) -> None:
        """Keep the ``errors`` that a sum has left."""
        if errors is not None:
            ends = accumulate(sizes.values(), initial=0)
            kept = [errors[start:stop] for start, stop in pairwise(ends)]
            mx.eval(kept)
            self._errors.update(zip(sizes, kept, strict=True))

    def scale(self, ratio: float) -> None:
        """Scale the errors for gradients ``ratio`` times as large."""
        for name in self._errors:
            self._errors[name] = self._errors[name] * ratio
            mx.eval(self._errors[name])

    def forget(self) -> None:
        """Start again without errors."""
        self._errors.clear()

    def state(self) -> dict[str, mx.array]:
        """Return the state for a checkpoint, in arrays that do not change."""
        return {
            f"{name}.{self._groups[name].index(self._rank)}": error
            for name, error in self._errors.items()
        }

    def takes(self, key: str) -> bool:
        """Tell whether this rank restores the error ``key``. If fewer ranks go on, some take the
        errors of several: nothing is lost."""
        name, _, member = key.rpartition(".")
        group = self._groups.get(name, ())
        return len(group) > 1 and group[int(member) % len(group)] == self._rank

    def restore(self, key: str, error: mx.array) -> None:
        """Add the error ``key`` of a checkpoint."""
        name = key.rpartition(".")[0]
        if name in self._errors:
            error = self._errors[name] + error
            mx.eval(error)
        self._errors[name] = error
