"""Plan the training of a model on given machines: from options and a hostfile to a prediction, and
the longest sequence that fits. No MLX, no MPI."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from shardmlx.config.specs import DIVIDED_WEIGHTS, RunSpec
from shardmlx.errors import UserError
from shardmlx.modelfiles.model_files import open_model
from shardmlx.pipeline.stage_map import read_stage_map
from shardmlx.planning.choice import Advance, Choice, choose, fits
from shardmlx.planning.facts.chips import as_macs
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.hostfile import Machine, machine_of_each_rank
from shardmlx.planning.facts.job_facts import Facts, TrainingFacts
from shardmlx.planning.facts.plan_facts import SequenceLengths
from shardmlx.planning.facts.profile_file import read_profiles
from shardmlx.planning.facts.workload import Workload
from shardmlx.planning.groups import in_shares
from shardmlx.planning.memory.limits import budgets_of, within
from shardmlx.planning.memory.training_setup import BACKENDS
from shardmlx.planning.think import JobOptions, think

if TYPE_CHECKING:
    from shardmlx.config.train import TrainConfig

LONGEST = 2**20
"""Tokens of the longest sequence that is looked at."""

MULTIPLE = 32
"""Tokens to a multiple of which sequences are padded, as in mlx_lm."""

BITS = 6
"""Significant bits of an answer, which is within 3% then, as memory is of its plan."""


def plan_training(
    config: TrainConfig | RunSpec,
    machines: Sequence[Machine],
    *,
    backend: str = BACKENDS[0],
    max_of: str | None = None,
    advance: Advance = lambda done, total: None,
) -> Choice:
    """Choose the fastest way that fits of those that ``config`` leaves open, for full rows.

    With ``max_of``, which is ``seq``, the run has the longest sequences that fit. Times are FLOPs
    if the speed of a machine is unknown. ``advance`` gets the number of ways examined, and of all.
    ``UserError`` names a way that fits.
    """
    run = config if isinstance(config, RunSpec) else config.spec
    facts = facts_for(run, machines, backend)
    if max_of is not None:
        run, facts = _longest(run, facts)
    return think(JobOptions(training=run), facts, advance).trained.choice


def facts_for(run: RunSpec, machines: Sequence[Machine], backend: str) -> Facts:
    """Return the facts for a run with full rows on these machines, each rank by itself."""
    profile = run.machines.profile
    stage_map = run.layout.stage_map
    cluster = Cluster(
        machines=machine_of_each_rank(machines if backend == "cpu" else as_macs(machines)),
        profile=None if profile is None else read_profiles(profile),
        backend=backend,
    )
    limit = run.machines.memory_limit
    if limit is not None:
        cluster = within(cluster, budgets_of(cluster, limit))
    if any(math.isinf(cluster.capacity(rank)) for rank in range(cluster.size)):
        cluster.check_speeds()
    files = open_model(run.model, run.revision)
    workload = Workload.of(files, run.fine_tune, run.batch, run.saves)
    return Facts(
        model=workload,
        machines=cluster,
        stage_map=None if stage_map is None else read_stage_map(stage_map),
        training=TrainingFacts(workload, SequenceLengths.full(run.batch.max_seq_length)),
    )


def with_divided_weights(run: RunSpec, planned: Choice) -> tuple[Choice, ...]:
    """Return the choice for the same run with ``--zero 3`` if it is predicted to be faster than the
    ``planned`` one; none if that is asked for or refused, or the times of messages are unknown."""
    facts = planned.facts.whole or planned.facts
    is_open = run.fine_tune.zero is None and not planned.run.fine_tune.divides_weights
    if not is_open or facts.cluster.size == 1 or not facts.is_timed:
        return ()
    divided = replace(run, fine_tune=replace(run.fine_tune, zero=DIVIDED_WEIGHTS))
    with suppress(UserError):
        other = choose(*in_shares(divided, facts, 1))
        if other.prediction.step_seconds < planned.prediction.step_seconds:
            return (other,)
    return ()


def _longest(run: RunSpec, facts: Facts) -> tuple[RunSpec, Facts]:
    """Return the run and the facts with the longest sequence that fits; the shortest if none."""
    exponents = range((LONGEST // MULTIPLE).bit_length())
    rounded = {digits << exponent for digits in range(1, 2**BITS) for exponent in exponents}
    values = sorted(value for value in rounded if value <= LONGEST // MULTIPLE)

    fitting = bisect_left(values, True, key=lambda value: not _fits(run, facts, MULTIPLE * value))
    return _of_length(run, facts, MULTIPLE * values[max(0, fitting - 1)])


def _of_length(run: RunSpec, facts: Facts, length: int) -> tuple[RunSpec, Facts]:
    """Return the run and the facts with rows of so many tokens."""
    batch = replace(run.batch, max_seq_length=length)
    return replace(run, batch=batch), facts.with_lengths(SequenceLengths.full(length))


def _fits(run: RunSpec, facts: Facts, length: int) -> bool:
    longer, known = _of_length(run, facts, length)
    return fits(*in_shares(longer, known.of_training, run.layout.across))
