"""Makes one difference of those of several islands, and limits each of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from importlib.util import find_spec
from itertools import pairwise
from operator import iadd
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from shardmlx.config.options import in_group, refuse
from shardmlx.islands.outer import ROUNDS

MEAN, TRIMMED_MEAN, MEDIAN = "mean", "trimmed-mean", "median"

TRIMMED = 0.2
"""Share of the numbers that the trimmed mean leaves out at each end, at least one of three."""

_rounds = in_group(ROUNDS)

DELTA = 1e-5
"""Probability with which the privacy may fail."""


SLICE_BYTES = 16 << 20
"""Numbers of all islands that are in memory at a time, for a rule that needs all of each number."""


def weighted_mean(
    arrays: Iterable[np.ndarray], weights: Sequence[float], directory: Path
) -> np.ndarray:
    """Return the mean of float32 arrays, of which one is in memory at a time."""
    pairs = zip(arrays, weights, strict=True)
    # In place: a tensor may be as large as a model's embedding.
    total = reduce(iadd, (array * np.float32(weight) for array, weight in pairs))
    return np.asarray(total / np.float32(sum(weights)))


def trimmed_mean(
    arrays: Iterable[np.ndarray], weights: Sequence[float], directory: Path
) -> np.ndarray:
    """Return the mean of what is left of each number without the largest and smallest ones (Yin et
    al., arXiv:1803.01498): one of three islands may lie. ``weights`` do not count."""
    return _by_number(arrays, _mean_of_kept, directory)


def median(arrays: Iterable[np.ndarray], weights: Sequence[float], directory: Path) -> np.ndarray:
    """Return the median of each number. ``weights`` do not count."""
    return _by_number(arrays, lambda numbers: np.median(numbers, axis=0), directory)


def _mean_of_kept(numbers: np.ndarray) -> np.ndarray:
    ordered = np.sort(numbers, axis=0)
    count = len(ordered)
    cut = min(max(1, int(TRIMMED * count)), (count - 1) // 2)
    return np.asarray(ordered[cut : count - cut].mean(axis=0, dtype=np.float32))


def _by_number(
    arrays: Iterable[np.ndarray], rule: Callable[[np.ndarray], np.ndarray], directory: Path
) -> np.ndarray:
    """Return what ``rule`` makes of each number: of (islands, numbers) float32 it makes (numbers,).

    One array is in memory at a time, and then slices of all of them, which wait in a file in
    ``directory``: those of an embedding would fill the memory of a Mac.
    """
    shapes: list[tuple[int, ...]] = []
    with TemporaryFile(dir=directory) as file:
        for array in arrays:
            file.write(np.ascontiguousarray(array, np.float32).data)
            shapes.append(array.shape)
        size = math.prod(shapes[0])
        result = np.empty(size, np.float32)
        # All of about one size: NumPy sums a single number in another order.
        slices = math.ceil(4 * size * len(shapes) / SLICE_BYTES)
        for start, stop in pairwise(np.linspace(0, size, slices + 1, dtype=np.int64).tolist()):
            numbers = np.empty((len(shapes), stop - start), np.float32)
            for island, row in enumerate(numbers):
                file.seek(4 * (island * size + start))
                file.readinto(row.data)
            result[start:stop] = rule(numbers)
    return result.reshape(shapes[0])


Aggregate = Callable[[Iterable[np.ndarray], Sequence[float], Path], np.ndarray]
"""Makes one float32 array of those of all islands and their weights; the directory is for what has
no room in memory."""

AGGREGATES: Mapping[str, Aggregate] = {
    MEAN: weighted_mean,
    TRIMMED_MEAN: trimmed_mean,
    MEDIAN: median,
}


def squared_norm(array: np.ndarray) -> float:
    """Return the sum of squares, which is not finite if a number is not."""
    flat = array.reshape(-1)
    return float(np.einsum("i,i", flat, flat, dtype=np.float64))


def too_long(norm: float, others: Sequence[float], most_ratio: float | None) -> str | None:
    """Return why a difference of this norm is refused, or None.

    ``others`` are norms of the other islands' newest differences; their median is the measure.
    """
    if not math.isfinite(norm):
        return "a number of the difference is not finite"
    usual = statistics.median(others) if others else 0.0
    if most_ratio is None or usual == 0 or norm <= most_ratio * usual:
        return None
    return f"the difference's norm is {norm:.4g}, over {most_ratio:g} times that of others"


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """DP-FedAvg (McMahan et al., arXiv:1710.06963): each difference is clipped to the norm
    ``clip``, and Gaussian noise of ``noise * clip / reports`` is added to the mean. Raises
    ``UserError``."""

    clip: float | None = _rounds(
        None, "norm to which fedavg shortens a difference", metavar="NORM", above=0
    )
    noise: float = _rounds(
        0.0, "Gaussian noise, in --clip, on the sum of differences", metavar="FACTOR", minimum=0
    )

    def __post_init__(self) -> None:
        lacks_clip = self.noise and self.clip is None
        refuse("noise", f"is {self.noise:g} without clip", "give --clip too", when=lacks_clip)

    def factor(self, norm: float) -> float:
        """Return the factor that clips a difference of this norm."""
        return 1.0 if self.clip is None or norm <= self.clip else self.clip / norm

    def noisy(self, mean: np.ndarray, reports: int, random: np.random.Generator) -> np.ndarray:
        """Return the mean of so many differences, with noise."""
        if not self.noise or self.clip is None:
            return mean
        deviation = np.float32(self.noise * self.clip / reports)
        return np.asarray(mean + deviation * random.standard_normal(mean.shape, np.float32))

    def epsilon(self, rounds: int) -> float | None:
        """Return the epsilon of so many rounds at ``DELTA``, each of which an island may have been
        in or not; None without noise, or without dp-accounting, Google's library."""
        if not self.noise or not rounds or find_spec("dp_accounting") is None:
            return None
        return _epsilon(self.noise, rounds)


@lru_cache(maxsize=1)
def _epsilon(noise: float, rounds: int) -> float:
    from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(noise), rounds))
    return float(accountant.get_epsilon(DELTA))
