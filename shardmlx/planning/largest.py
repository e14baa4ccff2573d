"""Find the longest sequence, the largest micro-batch or rank that fits. No MLX, no MPI."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from shardmlx.config.specs import RunSpec
from shardmlx.planning.choice import fits
from shardmlx.planning.facts import Facts, SequenceLengths

QUESTIONS: Mapping[str, str] = MappingProxyType(
    {
        "seq": "longest sequence that fits: {batch.max_seq_length} tokens",
        "batch": "largest micro-batch that fits: {batch.micro_batch_size} x {batch.max_seq_length} "
        "tokens; a batch may have any number of them",
        "rank": "largest rank that fits: {tune.lora_parameters[rank]}, in lora_parameters of a "
        "YAML file",
    }
)
"""The questions, with the words of an answer."""

LONGEST = 2**20
"""Tokens of the longest sequence that is looked at."""

MULTIPLE = 32
"""Tokens to a multiple of which sequences are padded, as in mlx_lm."""

MOST_ROWS = 2**10

BITS = 6
"""Significant bits of an answer, which is within 3% then, as memory is of its plan."""


def largest(question: str, run: RunSpec, facts: Facts) -> tuple[RunSpec, Facts]:
    """Return the run and the facts with the largest value that fits; the least if none does."""
    most = {
        "seq": LONGEST // MULTIPLE,
        "batch": MOST_ROWS,
        "rank": facts.workload.shape.hidden_size,
    }[question]
    exponents = range(most.bit_length())
    rounded = {digits << exponent for digits in range(1, 2**BITS) for exponent in exponents}
    values = sorted(value for value in rounded if value <= most)
    fitting = bisect_left(
        values, True, key=lambda value: not fits(*_with(question, value, run, facts))
    )
    return _with(question, values[max(0, fitting - 1)], run, facts)


def _with(question: str, value: int, run: RunSpec, facts: Facts) -> tuple[RunSpec, Facts]:
    if question == "seq":
        length = MULTIPLE * value
        batch = replace(run.batch, max_seq_length=length)
        return replace(run, batch=batch), replace(facts, lengths=SequenceLengths.full(length))
    if question == "batch":
        # No rank of a pipeline holds more micro-batches at a time than there are ranks.
        rows = value * facts.cluster.size
        return replace(
            run, batch=replace(run.batch, batch_size=rows, micro_batch_size=value)
        ), facts
    parameters = {**run.fine_tune.lora_parameters, "rank": value}
    return replace(run, fine_tune=replace(run.fine_tune, lora_parameters=parameters)), facts
