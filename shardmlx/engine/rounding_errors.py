"""Keep what a wire format rounds off of gradients until their next sum (error feedback).

Seide et al., "1-bit stochastic gradient descent", Interspeech 2014: nothing is lost for good, but
where a gradient overflows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import mlx.core as mx

from shardmlx.distributed.messages import buffer_of, new_buffer


class RoundingErrors:
    """The errors of one rank, an array in float32 for each weight that it has summed.

    ``groups`` are the ranks that sum each weight, this one among them; without any, no errors are
    kept. Checkpoints know an error as ``WEIGHT.MEMBER``: the rank's place in the group.
    """

    def __init__(self, rank: int, groups: Mapping[str, Sequence[int]]) -> None:
        self._rank = rank
        self._groups = groups
        self._errors: dict[str, mx.array] = {}

    def take(self, sizes: Mapping[str, int]) -> mx.array | None:
        """Return the errors of weights of these ``sizes`` in a row, for a sum to change; zeros at
        first. It is a copy: a checkpoint may still refer to what was there."""
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
        """Keep what a sum has left of ``errors``."""
        if errors is not None:
            ends = accumulate(sizes.values(), initial=0)
            kept = [errors[start:stop] for start, stop in pairwise(ends)]
            mx.eval(kept)
            self._errors.update(zip(sizes, kept, strict=True))

    def scale(self, ratio: float) -> None:
        """Go on with gradients that are ``ratio`` times those of which the errors are."""
        for name in self._errors:
            self._errors[name] = self._errors[name] * ratio
            mx.eval(self._errors[name])

    def forget(self) -> None:
        """Begin anew."""
        self._errors.clear()

    def state(self) -> dict[str, mx.array]:
        """Return what a checkpoint keeps. These arrays do not change."""
        return {
            f"{name}.{self._groups[name].index(self._rank)}": error
            for name, error in self._errors.items()
        }

    def takes(self, key: str) -> bool:
        """Tell whether this rank is to go on with what ``state`` has returned as ``key``. Where
        fewer ranks go on, some take the errors of several: nothing is lost."""
        name, _, member = key.rpartition(".")
        group = self._groups.get(name, ())
        return len(group) > 1 and group[int(member) % len(group)] == self._rank

    def restore(self, key: str, error: mx.array) -> None:
        """Add what ``state`` has returned as ``key``."""
        name = key.rpartition(".")[0]
        if name in self._errors:
            error = self._errors[name] + error
            mx.eval(error)
        self._errors[name] = error
