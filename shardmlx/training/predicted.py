"""Predict memory and time of a run, for its plan and for its report. No MLX, no MPI."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.predict import predict, predict_memory
from shardmlx.costmodel.workload import Workload
from shardmlx.engine.batches import MicroBatch, Sample, make_batch, padded_width
from shardmlx.pipeline.plan import Plan


@dataclass(slots=True)
class Lengths:
    """The lengths of a run's micro-batches: T of its inputs, shared by ``sequences``."""

    sequences: int = 1
    _counts: Counter[int] = field(default_factory=Counter)

    def count(self, microbatches: Sequence[MicroBatch]) -> None:
        """Count the micro-batches of a step."""
        self._counts.update(
            -(-microbatch.shape[1] // self.sequences) for microbatch in microbatches
        )

    @property
    def mean(self) -> int:
        """Mean length, rounded; times are nearly proportional to it."""
        return round(sum(t * n for t, n in self._counts.items()) / self._counts.total())

    @property
    def longest(self) -> int:
        return max(self._counts)


@dataclass(frozen=True, slots=True)
class Expected:
    """The prediction for a run with micro-batches of known lengths.

    ``num_layers`` has an entry a stage, ``peaks`` the bytes of each pipeline rank; ``step_seconds``
    is for sequences of ``mean_length`` tokens, and None without measured times.
    """

    num_layers: tuple[int, ...]
    peaks: tuple[int, ...]
    mean_length: int
    step_seconds: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the prediction for the metrics; bytes by pipeline rank."""
        return {
            "num_layers": list(self.num_layers),
            "sequence_length": self.mean_length,
            "step_seconds": self.step_seconds,
            "peak_memory_bytes": list(self.peaks),
        }


def longest_inputs(samples: Collection[Sample], max_seq_length: int) -> int:
    """Return T of the longest micro-batch that these samples can make."""
    longest = max(samples, key=lambda sample: len(sample[0]))
    return make_batch([longest], max_seq_length).shape[1]


def mean_lengths(
    samples: Sequence[Sample], batch_size: int, max_seq_length: int
) -> tuple[int, int, float]:
    """Return the mean lengths of rows, with the padding of a micro-batch of one row and without,
    and the share of the latter that counts in the loss."""
    bounds = np.array([(max(2, len(tokens)), max(1, start)) for tokens, start in samples])
    bounds = bounds[: max(1, len(bounds) // batch_size) * batch_size]
    lengths, starts = bounds.T
    padded, exact = (
        np.minimum(each, max_seq_length) - 1 for each in (padded_width(lengths), lengths)
    )
    counted = np.maximum(exact + 1 - starts, 0)
    means = round(float(padded.mean())), round(float(exact.mean()))
    return *means, float(counted.sum() / exact.sum())


def expect(
    plan: Plan, workload: Workload, cluster: Cluster, lengths: Lengths, recompute: str
) -> Expected:
    """Predict memory at the longest micro-batch, and time at the mean length."""
    peaks, _ = predict_memory(
        plan, workload, lengths.longest, recompute=recompute, backend=cluster.backend
    )
    seconds = None
    if cluster.unit == "seconds":
        seconds = predict(plan, workload, cluster, lengths.mean, recompute=recompute).step_seconds
    return Expected(plan.stage_map.partition.sizes, tuple(peaks), lengths.mean, seconds)
