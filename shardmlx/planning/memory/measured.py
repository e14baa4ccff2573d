"""Bytes that ``shardmlx profile`` measured of stages, in place of the rule of ``layer_memory``.

A prediction is the rule's, times the measured bytes over the rule's of the measured micro-batch: so
it is exact where it was measured, and grows with length and rows like the rule, and shrinks with
tensor shares: whole layers are measured. No MLX, no MPI.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shardmlx.config.specs import Savings
from shardmlx.planning.memory.stages import stage_memory
from shardmlx.planning.memory.training_setup import MeasuredRatios, Ratios, TrainingSetup

LEAST_LAYERS = 4
"""Fewest layers of a model that has each of the measured stages."""


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes held after F and I, passing in F and I (or W)."""

    after_forward: int
    after_input: int
    during_forward: int
    during_backward: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Bytes measured with a micro-batch of ``rows`` x ``length`` tokens, of the ``sample_ranges``:
    the first layers, the last ones, and those of each kind between."""

    rows: int
    length: int
    savings: Savings
    first: StageBytes
    last: StageBytes
    kinds: tuple[StageBytes, ...]


def sample_ranges(pattern: Sequence[int]) -> list[tuple[int, int]]:
    """Return the layers that are measured as stages, of one kind each: two where they are
    neighbours, for the scheduler gets from one into the next. ``pattern`` has each layer's kind."""
    count = len(pattern)
    kinds = []
    for kind in range(max(pattern) + 1):
        inner = [i for i in range(1, count - 1) if pattern[i] == kind]
        pairs = [(i, i + 2) for i in inner if i + 1 in inner]
        start = [*inner, pattern.index(kind)][0]
        kinds.append([*pairs, (start, start + 1)][0])
    first = 2 if pattern[0] == pattern[1] else 1
    last = 2 if pattern[-1] == pattern[-2] else 1
    return [(0, first), (count - last, count), *kinds]


def with_measurements(
    setup: TrainingSetup, machines: Iterable[Sequence[MemorySample]]
) -> TrainingSetup:
    """Return the setup with the largest of all machines' measurements at the nearest length; the
    rule stays without samples that save memory alike, and for shares, whose ratios are others."""
    if setup.shape.divides or setup.shape.num_layers < LEAST_LAYERS:
        return setup
    found = []
    for samples in machines:
        alike = [
            each
            for each in samples
            if each.savings == setup.savings and len(each.kinds) == len(setup.shape.kinds)
        ]
        if alike:
            nearest = min(alike, key=lambda each: abs(math.log(each.length / setup.length)))
            found.append(_ratios(setup, nearest))
    if not found:
        return setup
    first, last, *kinds = (
        Ratios(*map(max, zip(*each, strict=True))) for each in zip(*found, strict=True)
    )
    return replace(setup, measured=MeasuredRatios(first, last, tuple(kinds)))


def _ratios(setup: TrainingSetup, sample: MemorySample) -> list[Ratios]:
    """Return the measured bytes over the rule's, for each of the ``sample_ranges``."""
    workload = replace(
        setup.workload,
        fine_tune=replace(setup.tune, train=True, num_layers=-1, zero=0),
        batch=replace(setup.workload.batch, pack=False),
    )
    measured = replace(setup, workload=workload, rows=sample.rows, length=sample.length, dp=1)
    ratios = []
    stages = [sample.first, sample.last, *sample.kinds]
    for ends, each in zip(sample_ranges(setup.shape.pattern), stages, strict=True):
        rule = stage_memory(measured, *ends)
        backward = rule.during_input if rule.has_input_gradient else rule.during_weight
        ratios.append(
            Ratios(
                each.after_forward / rule.after_forward,
                each.after_input / rule.after_input if rule.after_input else 1.0,
                each.during_forward / rule.during_forward,
                each.during_backward / backward,
            )
        )
    return ratios
