"""Set up the ranks of a training loop: plan them on rank 0, and load the base on all."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from shardmlx.api.adapters import fine_tune_of
from shardmlx.api.checks import Checker
from shardmlx.api.cuts import FULL_PIPELINE
from shardmlx.api.models import Models
from shardmlx.api.plan import LoopPlan
from shardmlx.api.requests import LoraOptions
from shardmlx.api.sampling import SHORTEST_SHARED, Sampler, SamplingWorker
from shardmlx.api.service import TrainService
from shardmlx.api.states import StateStore
from shardmlx.api.worker import LoopWorker
from shardmlx.common.formatting import gibibytes, numbers_of, plural
from shardmlx.config.common_options import AUTO, SIMPLEST
from shardmlx.config.inference import PIPELINED_CHUNK
from shardmlx.config.loop import LoopSpec
from shardmlx.config.objective import ObjectiveOptions
from shardmlx.config.specs import BatchOptions, RunSpec
from shardmlx.distributed.crew import Crew
from shardmlx.inference.prefix_cache import PrefixCache
from shardmlx.loading.rank_setup import (
    ModelWorker,
    bring_weights,
    gather_facts,
    join_groups,
    open_everywhere,
)
from shardmlx.loading.transfer import Needs
from shardmlx.modelfiles.model_files import open_model
from shardmlx.partitioners import LayerCosts
from shardmlx.planning.facts.job_facts import TrainingFacts
from shardmlx.planning.facts.plan_facts import SequenceLengths
from shardmlx.planning.facts.workload import DTYPE_BYTES, ModelSizes, Workload
from shardmlx.planning.memory.generation import GenerationSetup, kv_cache_memory
from shardmlx.planning.think import JobOptions, think

FLOAT32 = DTYPE_BYTES["float32"]

COPIES = 4
"""Float32 copies of a LoRA that a model takes: weights, gradients, and two moments."""

SNAPSHOTS = 2
"""Snapshots for each model that are planned for: the one that is sampled from, and the next."""


def prepare(spec: LoopSpec, crew: Crew[LoopWorker]) -> None:
    """Plan the ranks, and load the base. On rank 0. Raises ``UserError`` for what the user can
    fix, before weights are read."""
    reporter = crew.worker.reporter
    opened = open_everywhere(crew, spec.source, None, reporter)
    crew.all(LoopWorker.build_base, spec.dtype)
    plan = _planned(spec, crew)
    crew.all(LoopWorker.cut_base, plan)
    mesh = plan.plan.mesh
    join_groups(crew, mesh)
    crew.all(ModelWorker.set_limits, plan.limits)
    ranges = plan.plan.stage_map.partition.ranges
    stages = [[ranges[stage] for stage in plan.plan.stages_of(rank)] for rank in range(mesh.size)]
    bring_weights(crew, Needs(stages, opened.shape, plan.shares), reporter)
    loaded = crew.all(LoopWorker.load_base)
    columns = {
        "rank": [str(rank) for rank in range(mesh.size)],
        "host": crew.transport.hosts,
        "layers": [", ".join(numbers_of(*each) for each in of_rank) for of_rank in stages],
        "weights": [gibibytes(nbytes) for nbytes in loaded],
        "planned peak": [gibibytes(each.planned_process) for each in plan.limits],
    }
    reporter.table(list(columns), list(zip(*columns.values(), strict=True)))


def serve_loop(spec: LoopSpec, crew: Crew[LoopWorker], tokenizer: TokenizerWrapper) -> TrainService:
    """Return the service of ranks that are prepared. The directory of its states is kept from
    others until the process ends. Raises ``UserError``."""
    worker = crew.worker
    sampler = None
    if worker.sampling is not None:
        sampler = Sampler(
            crew.part(SamplingWorker, "sampling"),
            tokenizer,
            worker.opened.shape.vocab_size,
            most=worker.plan.sequences,
            context=worker.opened.max_positions or worker.plan.cache_tokens,
            capacity=worker.plan.cache_tokens,
            prefixes=PrefixCache.of(worker.opened.shape, shortest=SHORTEST_SHARED),
        )
    plan = worker.plan
    directory = spec.loop.state_dir
    store = None if directory is None else StateStore(Path(directory), worker.reporter)
    checker = Checker(worker.opened.shape.vocab_size, plan.most_length, plan.most_rank)
    models = Models(crew, spec.source.model, store, plan.most_snapshots)
    return TrainService(crew, checker, models, sampler)


def _planned(spec: LoopSpec, crew: Crew[LoopWorker]) -> LoopPlan:
    """Return the plan of ranks that have opened the model."""
    reporter = crew.worker.reporter
    opened = crew.worker.opened
    lora = LoraOptions(rank=spec.loop.max_lora_rank)
    tune = fine_tune_of(lora, None, spec.dtype)
    rows = FULL_PIPELINE * crew.size
    batch = BatchOptions(
        batch_size=rows,
        max_seq_length=spec.loop.max_train_length,
        recompute=spec.loop.recompute,
        pack=opened.shape.takes_packed,
    )
    layout = spec.layout
    if layout.schedule == AUTO:  # samples are fastest with one stage a rank
        layout = replace(layout, schedule=SIMPLEST)
    if layout.data_parallel is None and layout.pipeline_stages is None and layout.stage_map is None:
        layout = replace(layout, data_parallel=1)
    run = RunSpec(
        model=spec.source.model,
        revision=spec.source.revision,
        fine_tune=tune,
        batch=batch,
        layout=layout,
        machines=spec.machines,
        loss=ObjectiveOptions(),
    )
    run = run.for_ranks(crew.size // layout.across)
    workload = Workload.of(open_model(str(opened.path)), tune, batch)
    workload = replace(workload, copies=_copies(spec), weight_sizes=_held_sizes(spec, workload))
    facts = gather_facts(crew, workload, spec.machines, layout.stage_map)
    lengths = SequenceLengths.full(batch.max_seq_length)
    facts = replace(facts, training=TrainingFacts(workload, lengths))
    job = think(JobOptions(training=run), facts)
    for warning in job.warnings:
        reporter.warn(warning)
    plan = job.trained.plan
    reporter.say(
        f"{spec.source.model}: {plural(plan.stage_map.num_stages, 'stage')} on "
        f"{plural(plan.mesh.size, 'rank')}, {plan.schedule}, room for "
        f"{plural(spec.loop.max_adapters, 'model')} of rank {spec.loop.max_lora_rank}"
    )
    return LoopPlan(
        plan=plan,
        shares=job.shares,
        savings=job.trained.workload.savings(job.cluster.backend),
        dtype=spec.dtype,
        tokens=plan.micro_batch_rows * batch.max_seq_length,
        pack=plan.pack,
        most_length=batch.max_seq_length,
        most_models=spec.loop.max_adapters,
        most_rank=spec.loop.max_lora_rank,
        most_snapshots=SNAPSHOTS * spec.loop.max_adapters + 1,
        sequences=spec.sequences,
        cache_tokens=spec.cache_tokens,
        chunk=PIPELINED_CHUNK,
        random_state=int.from_bytes(os.urandom(4)),
        limits=job.limits,
    )


def _copies(spec: LoopSpec) -> int:
    """Return the float32 copies of a LoRA beside those of one model."""
    return COPIES * (spec.loop.max_adapters - 1) + SNAPSHOTS * spec.loop.max_adapters + 1


def _held_sizes(spec: LoopSpec, sizes: ModelSizes) -> LayerCosts:
    """Return the bytes of each part of the model with what stays in memory beside its weights: the
    KV caches of samples, and the adapters of the lm_head."""
    shape = sizes.shape
    caches = GenerationSetup(
        model=sizes,
        sequences=spec.sequences,
        context=spec.cache_tokens,
        cache_tokens=spec.cache_tokens,
    )
    copies = COPIES + _copies(spec)
    width = shape.vocab_size + shape.hidden_size
    adapters = FLOAT32 * copies * spec.loop.max_lora_rank * width
    of_weights = sizes.weight_sizes
    return LayerCosts(
        tuple(
            nbytes + kv_cache_memory(caches, i, i + 1) for i, nbytes in enumerate(of_weights.layers)
        ),
        of_weights.embedding + shape.tied * adapters,
        of_weights.head + (not shape.tied) * adapters,
    )
