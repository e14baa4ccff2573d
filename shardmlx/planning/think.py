"""Plan a job from the options and the facts: on rank 0 alone, before any weight is read. No MLX, no
MPI.

``think`` serves all: ``plan`` with the facts of a hostfile, a run with those of its ranks, its dry
run, a sweep, a restart on fewer hosts, and every command that generates. So none of them can choose
otherwise than another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardmlx.checkpoint.resume import CheckpointFacts, RunStart, resume_point
from shardmlx.config.inference import InferenceConfig
from shardmlx.config.specs import RunSpec
from shardmlx.errors import UserError
from shardmlx.partitioners import DoesNotFitError
from shardmlx.pipeline.plan import Plan
from shardmlx.planning.choice import Advance, Choice, decide
from shardmlx.planning.facts.job_facts import Facts, TrainingFacts
from shardmlx.planning.facts.plan_facts import PlanFacts, SequenceLengths
from shardmlx.planning.generation import generation_part, plan_generation
from shardmlx.planning.groups import in_shares, parts_of
from shardmlx.planning.job import Job, TrainingPart
from shardmlx.planning.layout import lay_out
from shardmlx.planning.memory.limits import (
    PlannedMemory,
    how_to_allow,
    limits_of,
    would_take,
)
from shardmlx.planning.suggestions import remedies
from shardmlx.planning.ways import ways


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options of a job: to train, to generate, or to do both on the same weights."""

    training: RunSpec | None = None
    generation: InferenceConfig | None = None
    start: RunStart | None = None
    """The options and the identity by which training begins, or goes on from a checkpoint; None
    where nobody looked for any."""


def think(options: JobOptions, facts: Facts, advance: Advance = lambda done, total: None) -> Job:
    """Return the job that does what is asked, on the machines of the ``facts``: the fastest way
    that fits of those that the options leave open.

    ``advance`` gets the number of ways to train that were examined, and of all. Raises
    ``UserError``, which names what would fit, or why the ranks cannot be divided so.
    """
    run = options.training
    if run is not None:
        job = _plan_training(run, options.generation, facts, advance)
        if options.start is None or facts.checkpoints is None:
            return job
        return begin(job, options.start, facts.checkpoints)
    if options.generation is None:
        raise ValueError("a job trains or generates")
    return plan_generation(options.generation, facts)


def begin(job: Job, start: RunStart, seen: CheckpointFacts) -> Job:
    """Return the job of a run that begins so, or goes on from one of the checkpoints that ranks
    see. Raises ``UserError``."""
    tune = job.trained.way.fine_tune
    divides = tune.divides_optimizer or tune.keeps_errors
    owners = job.mesh.size // (1 if divides else job.mesh.dp)
    return job.resuming(resume_point(start, seen, owners))


def check_layout(run: RunSpec, facts: Facts) -> None:
    """Raise ``UserError`` for options of training that are wrong for any data, before these are
    read, and for a profile of other work or other machines."""
    asked = facts.to_train
    for rank in range(facts.machines.size):
        facts.machines.clock(rank, asked.workload)
    if run.batch.pack and not asked.workload.shape.takes_packed:
        raise UserError(
            "--pack: the model's layers depend on the place of a token in its row",
            "train without --pack",
        )
    full = facts.with_lengths(SequenceLengths.full(run.batch.max_seq_length))
    run, of_groups = in_shares(run, full.of_training, run.layout.across)
    simplest = ways(run, of_groups)[0]
    try:
        plan = lay_out(simplest, of_groups)
    except DoesNotFitError:
        return  # another way may, once the lengths are known
    _of_model(plan, simplest, asked)


def _plan_training(
    run: RunSpec, generation: InferenceConfig | None, facts: Facts, advance: Advance
) -> Job:
    asked = facts.to_train
    of_ranks = facts.of_training
    part = None
    if generation is not None:
        run = _in_pipelines(run, generation, facts)
        part = generation_part(generation, facts, run.layout.pipeline_stages or 1)
        of_ranks = replace(of_ranks, beside=part.setup)
    choice = _chosen(run, of_ranks, facts, advance)
    shares = choice.facts.shares
    plan = _of_model(choice.plan, choice.run, asked)
    plan = replace(plan, mesh=replace(plan.mesh, tp=shares.size))
    chosen: dict[str, Any] = {
        "batch": choice.run.batch,
        "fine_tune": choice.run.fine_tune,
        "counted": asked.lengths.counted_share(plan.pack),
    }
    job = Job(
        model=facts.digest,
        mesh=plan.mesh,
        stage_map=plan.stage_map,
        shares=shares,
        cluster=facts.cluster.with_rings(shares.size),
        training=TrainingPart(
            choice=choice,
            way=choice.run,
            workload=replace(choice.facts.workload, **chosen),
            parts=tuple(parts_of(replace(asked.workload, **chosen), shares)),
            plan=plan,
            lengths=asked.lengths,
        ),
        generation=part,
    )
    return _limited(job, facts)


def _in_pipelines(run: RunSpec, generation: InferenceConfig, facts: Facts) -> RunSpec:
    """Return the run as ranks divide the model that also generate with it: in one pipeline, unless
    replicas are asked for. The first of these generates. Raises ``UserError``."""
    across = generation.tensor_parallel
    ranks = facts.machines.size // across
    run = run.with_shares(across).for_ranks(ranks)
    stages = run.layout.pipeline_stages or ranks
    if facts.stage_map is not None:
        stages = facts.stage_map.pp
    return replace(run, layout=replace(run.layout, pipeline_stages=stages, data_parallel=None))


def _chosen(run: RunSpec, of_ranks: PlanFacts, facts: Facts, advance: Advance) -> Choice:
    """Return the chosen way to train. Raises ``UserError`` if none fits in memory."""
    try:
        return decide(run, of_ranks, advance)
    except DoesNotFitError as error:
        run, of_groups = in_shares(run, of_ranks, run.layout.across)
        raise _refusal(error, remedies(run, of_groups), facts, of_groups) from None


def _refusal(
    error: DoesNotFitError, would_fit: Sequence[str], facts: Facts, of_groups: PlanFacts
) -> UserError:
    """Return why nothing fits, and what would."""
    cluster = of_groups.cluster
    if not facts.budgets:  # A hostfile, or a user, names the machines.
        remedy = "; ".join(would_fit) or "more machines, or machines with more memory"
        where = cluster.machines[error.rank].where
        return UserError(f"{where}: {error.fact}; it would fit with", remedy)
    budget = facts.budgets[of_groups.ranks[error.rank] if of_groups.ranks else error.rank]
    needed = PlannedMemory(round(cluster.capacity(error.rank) + error.shortage), 0)
    would_fit = would_fit or ["use more machines, or machines with more memory"]
    return UserError(
        error.fact if needed.peak <= budget.nbytes else would_take(error.rank, budget, needed.peak),
        f"{how_to_allow([budget], [needed])}{'; or '.join(would_fit)}",
    )


def _of_model(plan: Plan, run: RunSpec, asked: TrainingFacts) -> Plan:
    """Return the plan for the very model that rank 0 has built, if it has; ``UserError`` if nothing
    trains."""
    tune = run.fine_tune
    trainable = asked.stages(plan.stage_map.partition.ranges)
    if trainable is None:
        return plan
    if tune.train and not any(trainable):
        raise UserError(
            f"nothing is left to train with --fine-tune-type {tune.fine_tune_type} and "
            f"lora_parameters {dict(tune.lora_parameters)}",
            "its keys must name modules of this model; quantised weights train with lora only",
        )
    return replace(plan, trainable=trainable)


def _limited(job: Job, facts: Facts) -> Job:
    """Return the job with the limits of each rank. Raises ``UserError`` if one lacks memory: the
    plan was made for another rank of its group."""
    cluster = facts.cluster
    memory = job.memory
    for rank, each in enumerate(memory):
        if each.peak > cluster.capacity(rank):
            problem = would_take(rank, facts.allowed[rank], each.peak)
            raise UserError(problem, "give tensor_shares that suit the memories")
    return replace(job, limits=limits_of(facts.budgets, memory, cluster.backend))
