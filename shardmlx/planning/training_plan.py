"""Plan the training of a model on given machines: from options and a hostfile to a prediction, and
the longest sequence that fits. No MLX, no MPI."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from shardmlx.config.specs import RunSpec
from shardmlx.costmodel.chips import as_macs
from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.hostfile import Machine, machine_of_each_rank
from shardmlx.costmodel.memory_limits import budgets_of, within
from shardmlx.costmodel.profile_file import read_profiles
from shardmlx.costmodel.training_setup import BACKENDS
from shardmlx.costmodel.workload import Workload
from shardmlx.errors import UserError
from shardmlx.modelfiles.model_files import open_model
from shardmlx.partitioners import DoesNotFitError
from shardmlx.pipeline.stage_map import read_stage_map
from shardmlx.planning.choice import CLEARLY, Choice, choose, fits
from shardmlx.planning.facts import PlanFacts, SequenceLengths
from shardmlx.planning.groups import asked_shares, in_groups
from shardmlx.planning.suggestions import remedies

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
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Choice:
    """Choose the fastest way that fits of those that ``config`` leaves open, for full rows.

    With ``max_of``, which is ``seq``, the run has the longest sequences that fit. Times are FLOPs
    if the speed of a machine is unknown. ``advance`` gets the number of ways examined, and of all.
    ``UserError`` names a way that fits.
    """
    run, facts = facts_for(config, machines, backend)
    if max_of is not None:
        run, facts = _longest(run, facts)
    try:
        return choose(run, facts, advance)
    except DoesNotFitError as error:
        remedy = "; ".join(remedies(run, facts)) or "more machines, or machines with more memory"
        where = facts.cluster.machines[error.rank].where
        raise UserError(f"{where}: {error.fact}; it would fit with", remedy) from None


def facts_for(
    config: TrainConfig | RunSpec, machines: Sequence[Machine], backend: str
) -> tuple[RunSpec, PlanFacts]:
    """Return a run, and the facts for it with full rows on these machines."""
    run = config if isinstance(config, RunSpec) else config.spec
    profile, stage_map = run.machines.profile, run.layout.stage_map
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
    facts = PlanFacts(
        workload=Workload.of(
            open_model(run.model, run.revision), run.fine_tune, run.batch, run.saves
        ),
        cluster=cluster,
        lengths=SequenceLengths.full(run.batch.max_seq_length),
        stage_map=None if stage_map is None else read_stage_map(stage_map),
    )
    if run.layout.tensor_parallel > 1:
        shares = asked_shares(run.layout, facts.workload, cluster)
        work, grouped, _ = in_groups(facts.workload, cluster, shares)
        facts = replace(facts, workload=work, cluster=grouped, whole=facts)
    return run, facts


def with_shares(config: TrainConfig, machines: Sequence[Machine], planned: Choice) -> list[Choice]:
    """Return the choices for the same run with tensor shares, for each number of ranks that can
    have some; none if the times of messages are unknown, or it has shares already."""
    cluster, found = planned.facts.cluster, []
    if config.layout.tensor_parallel > 1 or not _is_timed(cluster):
        return []
    for across in range(2, cluster.size + 1):
        with suppress(UserError):
            other = config.changed(tensor_parallel=across)
            found.append(plan_training(other, machines, backend=cluster.backend))
    return found


def with_divided_weights(
    config: TrainConfig, machines: Sequence[Machine], planned: Choice
) -> list[Choice]:
    """Return the choice for the same run with ``--zero 3`` if it is predicted to be faster than the
    ``planned`` one; none if that is asked for or refused, or the times of messages are unknown."""
    cluster = (planned.facts.whole or planned.facts).cluster
    is_open = config.tune.zero is None and not planned.run.fine_tune.divides_weights
    if not is_open or cluster.size == 1 or not _is_timed(cluster):
        return []
    with suppress(UserError):
        other = plan_training(config.changed(zero=3), machines, backend=cluster.backend)
        if other.prediction.step_seconds < planned.prediction.step_seconds:
            return [other]
    return []


def _is_timed(cluster: Cluster) -> bool:
    return cluster.unit == "seconds" and cluster.knows_messages


def fastest_first(planned: Choice, others: Sequence[Choice]) -> list[Choice]:
    """Return all choices: one of ``others``, with tensor shares, first where it clearly wins."""
    best = min(others, key=lambda each: each.prediction.step_seconds, default=planned)
    if best.prediction.step_seconds * CLEARLY > planned.prediction.step_seconds:
        return [planned, *others]
    return [best, planned, *(each for each in others if each is not best)]


def _longest(run: RunSpec, facts: PlanFacts) -> tuple[RunSpec, PlanFacts]:
    """Return the run and the facts with the longest sequence that fits; the shortest if none."""
    exponents = range((LONGEST // MULTIPLE).bit_length())
    rounded = {digits << exponent for digits in range(1, 2**BITS) for exponent in exponents}
    values = sorted(value for value in rounded if value <= LONGEST // MULTIPLE)

    def with_value(value: int) -> tuple[RunSpec, PlanFacts]:
        length = MULTIPLE * value
        batch = replace(run.batch, max_seq_length=length)
        return replace(run, batch=batch), replace(facts, lengths=SequenceLengths.full(length))

    fitting = bisect_left(values, True, key=lambda value: not fits(*with_value(value)))
    return with_value(values[max(0, fitting - 1)])
