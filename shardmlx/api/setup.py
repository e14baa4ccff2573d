"""Set up the ranks of a training loop: plan them on rank 0, and load the base on all."""

from __future__ import annotations

import os
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from shardmlx.api.checks import Checker
from shardmlx.api.models import Models
from shardmlx.api.plan import LoopPlan
from shardmlx.api.sampling import SHORTEST_SHARED, Sampler, SamplingWorker
from shardmlx.api.service import TrainService
from shardmlx.api.states import StateStore
from shardmlx.api.worker import LoopWorker
from shardmlx.common.formatting import gibibytes, numbers_of, plural
from shardmlx.config.inference import PIPELINED_CHUNK
from shardmlx.config.loop import LoopSpec
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
from shardmlx.planning.facts.workload import model_sizes
from shardmlx.planning.loop import most_snapshots, plan_loop, run_of


def prepare(spec: LoopSpec, crew: Crew[LoopWorker]) -> None:
    """Plan the ranks, and load the base. On rank 0. Raises ``UserError`` for what the user can
    fix, before weights are read."""
    reporter = crew.worker.reporter
    opened = open_everywhere(crew, spec.source, None, reporter)
    crew.all(LoopWorker.build_base, spec.answers.dtype)
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
    answers = spec.answers
    files = open_model(str(crew.worker.opened.path))
    run = run_of(spec, files, crew.size)
    facts = gather_facts(
        crew,
        model_sizes(files, answers.dtype),
        answers.machines,
        answers.stage_map,
        answers.bytes_for_requests,
    )
    job = plan_loop(spec, files, facts)
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
        dtype=answers.dtype,
        tokens=plan.micro_batch_rows * run.batch.max_seq_length,
        pack=plan.pack,
        most_length=run.batch.max_seq_length,
        most_models=spec.loop.max_adapters,
        most_rank=spec.loop.max_lora_rank,
        most_snapshots=most_snapshots(spec),
        sequences=answers.batch_size,
        cache_tokens=spec.cache_tokens,
        chunk=PIPELINED_CHUNK,
        random_state=int.from_bytes(os.urandom(4)),
        limits=job.limits,
    )
