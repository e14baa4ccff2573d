"""Plan the ranks of a training loop: how they divide the base, and whether there is room for it,
the models that train on it, and the answers that are sampled. No MLX, no MPI.

``serve --train``, ``train_client``, and ``plan`` and ``inspect`` with ``--train`` all ask here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardmlx.config.loop import LoopSpec
from shardmlx.config.specs import RunSpec
from shardmlx.errors import UserError
from shardmlx.modelfiles.model_files import ModelFiles
from shardmlx.modelfiles.parts import needed_shape
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.facts.job_facts import (
    Facts,
    GenerationFacts,
    GenerationLoad,
    TrainingFacts,
)
from shardmlx.planning.facts.plan_facts import SequenceLengths
from shardmlx.planning.facts.workload import DTYPE_BYTES, ModelSizes, Workload
from shardmlx.planning.job import Job
from shardmlx.planning.think import JobOptions, think
from shardmlx.planning.time.predict import predict_memory

FLOAT32 = DTYPE_BYTES["float32"]

MOMENTS = 2
"""Float32 copies of a LoRA that its optimizer's state takes."""

COPIES = 2 + MOMENTS
"""Float32 copies of a LoRA that a model takes: weights, gradients, and two moments."""

SNAPSHOTS = 2
"""Snapshots for each model that are planned for: the one that is sampled from, and the next."""

FULL_PIPELINE = 4
"""Micro-batches of each pipeline rank that keep its bubble small, if there are rows for so many."""

LARGE_TOKENS = 1024
"""Tokens of a micro-batch beside which its set-up is little: room for so many is planned for, where
rows are shorter."""


def most_snapshots(spec: LoopSpec) -> int:
    """Return the snapshots that are in memory at a time: one more while another leaves."""
    return SNAPSHOTS * spec.loop.max_adapters + 1


def plan_loop(spec: LoopSpec, files: ModelFiles, facts: Facts) -> Job:
    """Return the job of a training loop on the machines of the ``facts``. Raises ``UserError``,
    which names what does not fit and what would, or why the ranks cannot be divided so."""
    try:
        return _planned(spec, files, facts)
    except UserError as error:
        fewer = spec.loop.max_adapters // 2
        while fewer and not _fits(spec, fewer, files, facts):
            fewer //= 2
        if not fewer:
            raise
        remedy = f"give --max-adapters {fewer}; or {error.remedy}"
        raise UserError(error.problem, remedy) from None


def _fits(spec: LoopSpec, models: int, files: ModelFiles, facts: Facts) -> bool:
    try:
        _planned(replace(spec, loop=replace(spec.loop, max_adapters=models)), files, facts)
    except UserError:
        return False
    return True


def _planned(spec: LoopSpec, files: ModelFiles, facts: Facts) -> Job:
    run = run_of(spec, files, facts.machines.size)
    workload = Workload.of(files, run.fine_tune, run.batch)
    plain = workload.weight_sizes
    adapters = _of_ends(spec, workload)
    held = replace(
        plain,
        embedding=plain.embedding + workload.shape.tied * adapters,
        head=plain.head + (not workload.shape.tied) * adapters,
    )
    workload = replace(workload, copies=_copies(spec), weight_sizes=held)
    lengths = SequenceLengths.full(run.batch.max_seq_length)
    positions = files.config.get("max_position_embeddings") or spec.cache_tokens
    load = GenerationLoad.typical(
        spec.answers.batch_size,
        spec.cache_tokens,
        min(spec.cache_tokens, positions),
        spec.answers.max_tokens,
        keeps_prefixes=True,
    )
    known = replace(
        facts,
        model=replace(workload, weight_sizes=plain),
        training=TrainingFacts(workload, lengths),
        generation=GenerationFacts(load),
    )
    stage_map = facts.stage_map
    samples = spec.must_sample or stage_map is None or stage_map.placement[0] == 0
    job = think(JobOptions(training=run, generation=spec.answers if samples else None), known)
    if spec.must_sample and job.stage_map.placement[0] != 0:
        raise no_prompts_come_in(job.stage_map)
    return job


def no_prompts_come_in(stage_map: StageMap) -> UserError:
    """Return the refusal of samples where there is no way for them."""
    return UserError(
        f"{stage_map}: stage 0 is on rank {stage_map.placement[0]}, and prompts of samples come in "
        "on rank 0",
        "put stage 0 on rank 0",
    )


def run_of(spec: LoopSpec, files: ModelFiles, ranks: int) -> RunSpec:
    """Return the run of one model of a loop on so many ranks, packed where the family allows it.
    Raises ``UserError`` where replicas do not divide the ranks."""
    rows = FULL_PIPELINE * ranks * max(1, LARGE_TOKENS // spec.loop.max_train_length)
    run = spec.run(pack=needed_shape(files).takes_packed, rows=rows)
    return run.for_ranks(ranks // run.layout.across)


def _copies(spec: LoopSpec) -> int:
    """Return the float32 copies of a LoRA beside those of one model."""
    return COPIES * (spec.loop.max_adapters - 1) + most_snapshots(spec)


def _of_ends(spec: LoopSpec, sizes: ModelSizes) -> int:
    """Return the bytes of all copies of the adapters of the lm_head."""
    copies = COPIES + _copies(spec)
    width = sizes.shape.vocab_size + sizes.shape.hidden_size
    return FLOAT32 * copies * spec.loop.max_lora_rank * width


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """The bytes that a rank of a loop holds at its ``peak``, by what they are for. ``lora`` has the
    weights, gradients and snapshots of all models, ``passing`` is what exists only while the rank
    computes."""

    host: str
    layers: Sequence[tuple[int, int]]
    base: int
    lora: int
    optimizer: int
    kv_caches: int
    passing: int
    peak: int
    limit: float


def parts_of_ranks(spec: LoopSpec, job: Job) -> list[RankParts]:
    """Return what each rank of a planned loop holds."""
    mesh = job.mesh
    training = job.trained
    ranges = job.stage_map.partition.ranges
    copies = COPIES + _copies(spec)
    longest = training.lengths.longest[0]
    of_shares = [predict_memory(training.plan, own, job.cluster, longest) for own in training.parts]
    all_caches = job.caches
    found = []
    for rank, memory in enumerate(job.memory):
        own = training.parts[mesh.share(rank)]
        _, pipeline_rank = mesh.coordinates(rank)
        numbers = job.stage_map.stages_of(pipeline_rank)
        of_ranks, stages = of_shares[mesh.share(rank)]
        # Copies of the head's adapters stay, and of others all but the gradients of one model.
        of_layers = sum(stages[each].gradients for each in numbers)
        of_ends = 0
        if any(_has_head(own.shape, *ranges[each]) for each in numbers):
            of_ends = _of_ends(spec, own) // copies
        base = of_ranks[pipeline_rank].resident - (copies - 1) * of_layers - copies * of_ends
        optimizer = MOMENTS * spec.loop.max_adapters * (of_layers + of_ends)
        lora = copies * (of_layers + of_ends) - optimizer
        caches = all_caches[rank]
        found.append(
            RankParts(
                host=job.cluster.machines[rank].host,
                layers=job.layers(rank),
                base=base,
                lora=lora,
                optimizer=optimizer,
                kv_caches=caches,
                passing=memory.peak - base - lora - optimizer - caches,
                peak=memory.peak,
                limit=job.cluster.capacity(rank),
            )
        )
    return found


def _has_head(shape: ModelShape, start: int, stop: int) -> bool:
    """Return whether a stage has the matrix of the lm_head; a tied one is at both ends."""
    return stop == shape.num_layers or (shape.tied and start == 0)
