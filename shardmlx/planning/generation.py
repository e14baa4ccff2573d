"""Plan what a job generates: which rank holds which layers, and whether it fits. No MLX, no MPI."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from shardmlx.common.formatting import gibibytes, numbers_of, plural
from shardmlx.config.common_options import AUTO, FASTEST, SMALLEST
from shardmlx.config.inference import NO_DRAFT, InferenceConfig
from shardmlx.errors import UserError
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.models.sizes.shares import TensorShares
from shardmlx.partitioners import (
    DoesNotFitError,
    LayerCosts,
    NoOrderFitsError,
    Problem,
    fastest_in_order,
    get_partitioner,
)
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.facts.job_facts import Facts, GenerationFacts, GenerationLoad
from shardmlx.planning.facts.workload import ModelSizes
from shardmlx.planning.generation_times import are_unlike, seconds_on
from shardmlx.planning.groups import asked_shares
from shardmlx.planning.job import GenerationPart, Job
from shardmlx.planning.layout import costs_by_speed, make_mesh
from shardmlx.planning.memory.generation import (
    GenerationSetup,
    cuttable,
    inference_memory,
    most_copies,
    setups_of,
)
from shardmlx.planning.memory.limits import (
    MemoryBudget,
    how_to_allow,
    limits_of,
    would_take,
)

STEP_TOKENS = 20
"""Tokens of a prompt that take as long as a decode step of a group, on a CPU with OpenBLAS."""


def plan_generation(config: InferenceConfig, facts: Facts) -> Job:
    """Return the job of a run that generates. Raises ``UserError`` where layers cannot be divided
    so, the stage map does not fit the ranks, or the sequences not the memory."""
    cluster = facts.cluster
    shares = asked_shares(config, facts.model, cluster)
    stages = cluster.size // shares.size
    part = generation_part(config, facts, stages)
    if facts.stage_map is not None:
        _check_map(facts.stage_map, config, facts.model, cluster.machines[:: shares.size])
    less = _less(part)

    problem = generation_problem(part, shares, cluster)
    try:
        job = _divided(config, facts, problem, part, shares)
    except DoesNotFitError as error:
        more = "raise --memory-limit, " * (config.memory_limit is not None)
        raise UserError(error.fact, f"{more}{less}, or use more machines") from None
    if excess := _overfull(job, facts.allowed):
        is_open = facts.stage_map is None and stages > 1
        if is_open and config.partitioner not in (AUTO, SMALLEST):
            less += ", try --partitioner memory"
        allowed = how_to_allow(facts.allowed, job.memory)
        raise UserError(excess, f"{allowed}{less}, or use more machines")
    return job


def generation_part(config: InferenceConfig, facts: Facts, stages: int) -> GenerationPart:
    """Return what a run on so many ``stages`` generates. Raises ``UserError`` where caches cannot
    forget drafts."""
    asked = facts.to_generate
    shape = facts.model.shape
    if config.draft != NO_DRAFT:
        check_gives_back(shape, config.draft)
    if asked.draft is not None:
        check_gives_back(asked.draft.shape, config.draft)
    setup = _setup(config, facts, asked, stages)
    most = cuttable(shape, setup.max_kv_size)
    if asked.draft is not None:
        most = min(most, cuttable(asked.draft.shape))
    return GenerationPart(
        load=asked.load, groups=_groups(setup, stages), setup=setup, cuttable=most
    )


def _setup(
    config: InferenceConfig, facts: Facts, asked: GenerationFacts, stages: int
) -> GenerationSetup:
    """Return what decides the memory of a run on so many ``stages``."""
    shape = facts.model.shape
    backend = facts.machines.backend
    load = asked.load
    draft = asked.draft
    sequences = min(config.batch_size, load.sequences)
    step = max(load.prompt, sequences + config.most_drafts)
    setup = GenerationSetup(
        model=facts.model,
        sequences=sequences,
        context=load.context,
        chunk=config.chunk(stages, backend),
        longest=step if load.capacity is None else None,
        max_kv_size=None if shape.chooses_caches else config.max_kv_size,
        cache_tokens=load.capacity,
        quantisation=config.cache_quantisation,
        state_copies=most_copies(sequences) if load.keeps_prefixes else 0,
        drafts=config.most_drafts,
        head=asked.head,
        backend=backend,
    )
    if draft is None:
        return setup
    drafting = replace(setup, model=draft, max_kv_size=None, quantisation=None, state_copies=0)
    return replace(setup, beside=inference_memory(drafting, 0, draft.shape.num_layers))


def _groups(setup: GenerationSetup, stages: int) -> int:
    """Return the number of groups in which sequences are under way: mlx-lm merges neither rotating
    caches, which keep the first tokens of a sequence, nor quantised ones."""
    is_cut = setup.max_kv_size is not None or setup.quantisation is not None
    if is_cut or not setup.model.shape.takes_batches:
        return setup.sequences
    return min(stages, setup.sequences)


def _divided(
    config: InferenceConfig,
    facts: Facts,
    problem: Problem,
    part: GenerationPart,
    shares: TensorShares,
) -> Job:
    """Return the job with the user's stages, or the partitioner's: if that is open, the fastest
    division, or the one that takes the least memory. Raises ``DoesNotFitError``."""
    if facts.stage_map is not None:
        return _job(facts, facts.stage_map, part, shares)
    if config.partitioner != AUTO:
        return _job(facts, get_partitioner(config.partitioner)(problem), part, shares)
    if problem.once:
        with suppress(NoOrderFitsError):
            return _job(facts, fastest_in_order(problem), part, shares)
    job = _job(facts, get_partitioner(FASTEST)(problem), part, shares)
    if problem.num_stages > 1 and _overfull(job, facts.allowed):
        return _job(facts, get_partitioner(SMALLEST)(problem), part, shares)
    return job


def _job(facts: Facts, stage_map: StageMap, part: GenerationPart, shares: TensorShares) -> Job:
    """Return the job with these stages, in order, and its limits."""
    stages = stage_map.num_stages
    if stage_map.placement != tuple(range(stages)):
        stage_map = StageMap.from_sizes(stage_map.partition.sizes)
    job = Job(
        model=facts.digest,
        mesh=Mesh(1, stages, shares.size),
        stage_map=stage_map,
        shares=shares,
        cluster=facts.cluster,
        generation=part,
    )
    return replace(job, limits=limits_of(facts.budgets, job.memory, facts.machines.backend))


def generation_problem(part: GenerationPart, shares: TensorShares, cluster: Cluster) -> Problem:
    """Return the problem of dividing the layers among stages, each on a group.

    If machines are unlike, and their speeds known, costs are seconds, and a micro-batch is what
    passes the stages: a chunk of a prompt, or a step of an answer of several texts. The answer of
    a text by itself passes ``once``, since it is in one stage at a time. Otherwise costs are those
    of a sequence.
    """
    setup = part.setup
    load = part.load
    across = shares.size
    capacities = [cluster.capacity(rank) for rank in range(cluster.size)]
    firsts = cluster.machines[::across]
    of_shares = setups_of(setup, shares)
    rows = -(-setup.sequences // part.groups)
    once: tuple[LayerCosts, ...] = ()
    passes = max(1, -(-load.prompt // max(1, setup.chunk)))
    if are_unlike(firsts):
        seconds = [seconds_on(each, setup.model, load, rows) for each in firsts]
        whole = tuple(each.prompt for each in seconds)
        once = tuple(each.answer for each in seconds)
        if load.sequences > 1:
            passes = load.sequences * (passes + load.answer)
            whole = tuple(each.both.scaled(load.sequences) for each in seconds)
            once = tuple(each.answer.scaled(0.0) for each in seconds)
        costs = tuple(each.scaled(1 / passes) for each in whole)
    else:
        costs = costs_by_speed(_costs(setup.model, load, rows), firsts, len(firsts))

    def peak(stage: int, start: int, stop: int) -> float:
        """Return what the rank of a stage that has the least to spare takes, were it the first."""
        mine = capacities[stage * across : (stage + 1) * across]
        taken = (inference_memory(each, start, stop) for each in of_shares)
        return max(own - room + mine[0] for own, room in zip(taken, mine, strict=True))

    return Problem(
        placement=tuple(range(len(firsts))),
        costs=costs,
        sizes=setup.model.held_sizes,
        peak=None if any(map(math.isinf, capacities)) else peak,
        capacity=tuple(capacities[::across]),
        microbatches=passes,
        once=once,
        hosts=tuple(machine.host for machine in firsts),
    )


def _less(part: GenerationPart) -> str:
    """Return the remedies that make a run need less memory."""
    setup = part.setup
    less = "lower --cache-tokens"
    if part.load.capacity is None:
        less = "lower --max-tokens" + " or --batch-size" * (setup.sequences > 1)
    return f"{less}, leave out --draft" if setup.beside or setup.head else less


def check_gives_back(shape: ModelShape, draft: str) -> None:
    """Raise ``UserError`` where caches of the model cannot forget drafts that are rejected."""
    if cuttable(shape) == 0 or shape.has_dynamic_rope:
        raise UserError(
            f"--draft {draft}: models of type {shape.model_type} cannot give back the tokens of a "
            "draft that are rejected",
            "leave it out",
        )


def _check_map(
    stage_map: StageMap, config: InferenceConfig, sizes: ModelSizes, firsts: Sequence[Machine]
) -> None:
    stage_map.check_model(config.source.model, sizes.shape.num_layers)
    for rank in range(stage_map.pp):
        if stage_map.stages_of(rank) != (rank,):
            raise UserError(
                f"{stage_map} does not have stage {rank} alone on rank {rank}: text is generated "
                "with one stage a rank, in order",
                "use another map, or none",
            )
    if stage_map.pp != len(firsts):
        across = config.tensor_parallel
        raise UserError(
            f"{stage_map} needs {stage_map.pp * across} ranks, and there are "
            f"{len(firsts) * across}",
            f"start mpirun with -n {stage_map.pp * across}",
        )
    make_mesh(stage_map, len(firsts), [machine.host for machine in firsts])


def _costs(sizes: ModelSizes, load: GenerationLoad, rows: int) -> LayerCosts:
    """Return the FLOPs of one sequence in a group of ``rows``: a token of the answer counts as the
    tokens of a prompt that take as long. The lm_head computes the last position only."""
    shape = sizes.shape
    # A sequence by itself is in one stage at a time: how its answer is divided is all the same.
    answer = load.answer * max(1.0, STEP_TOKENS / rows) if load.sequences > 1 else 0.0
    tokens = load.prompt + answer
    flops = tuple(tokens * shape.layer(i).flops(load.context) for i in range(shape.num_layers))
    return LayerCosts(flops, head=shape.head_flops() * (1 + answer))


def _overfull(job: Job, budgets: Sequence[MemoryBudget]) -> str:
    """Return how the first rank would take more than its budget; "" if none does."""
    setup = job.generated.setup
    for rank, (budget, memory) in enumerate(zip(budgets, job.memory, strict=True)):
        if memory.peak > budget.nbytes:
            tokens = f"{setup.cache_tokens} tokens"
            if setup.cache_tokens is None:
                tokens = f"{plural(setup.sequences, 'sequence')} of {setup.context} tokens"
            drafting = f", {gibibytes(setup.beside)} for the model that drafts"
            (ends,) = job.layers(rank)
            return (
                f"{would_take(rank, budget, memory.peak)} for layers {numbers_of(*ends)}, "
                f"{gibibytes(job.caches[rank])} for the KV cache of {tokens}"
                f"{drafting if rank == 0 and setup.beside else ''}"
            )
    return ""
