"""Everything a training run needs before its first step, on every rank."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer

from shardmlx.checkpoint.resume import Resumption, prepare_resumption
from shardmlx.checkpoint.run_identity import identity_of
from shardmlx.common.formatting import gibibytes
from shardmlx.common.reporter import Reporter, check_writable
from shardmlx.config.train import TrainConfig
from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.memory_limits import (
    MemoryBudget,
    MemoryLimits,
    check_budgets,
    how_to_allow_more,
    memory_limits,
    unwired,
    within,
)
from shardmlx.costmodel.workload import Workload
from shardmlx.distributed.agreement import on_all_ranks, on_rank_0
from shardmlx.distributed.transport import Transport
from shardmlx.engine.engine import Engine
from shardmlx.engine.optimizer import build_optimizer
from shardmlx.engine.stage import Stage, build_stages
from shardmlx.errors import UserError
from shardmlx.loading.allocator import find_budgets, set_limits
from shardmlx.loading.build import build_model, count_parameters
from shardmlx.loading.discovery import find_weights
from shardmlx.loading.rank_setup import (
    SETUP_SECONDS,
    cluster_of,
    compare_plans,
    given_stage_map,
    model_digest,
)
from shardmlx.loading.transfer import Weights
from shardmlx.modelfiles.model_files import open_model
from shardmlx.models.shape import ModelShape, read_config
from shardmlx.models.slice import Slice
from shardmlx.partitioners import DoesNotFitError
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.layout import divide_batch, make_mesh, make_stage_map
from shardmlx.training.datasets import DataSets, read_data, read_tokenizer
from shardmlx.training.predicted import longest_inputs, planned_memory
from shardmlx.training.token_cache import open_cache

__all__ = ["SETUP_SECONDS", "Job", "optimizer_of", "prepare_job"]


@dataclass(frozen=True, slots=True)
class Job:
    """A run that is ready to start. ``data`` is on rank 0 only, ``sizes`` of its sets on all.

    ``identity``, on rank 0 of a run that saves checkpoints, says in them which run it is;
    ``limits`` are those of the memory of each world rank.
    """

    config: TrainConfig
    transport: Transport
    reporter: Reporter
    model_path: Path
    workload: Workload
    cluster: Cluster
    plan: Plan
    engine: Engine
    optimizer: Optimizer
    data: DataSets | None
    sizes: Mapping[str, int]
    resumption: Resumption
    identity: Mapping[str, Any] | None
    limits: tuple[MemoryLimits, ...]

    @property
    def stages(self) -> list[Stage]:
        return list(self.engine.stages.values())


def prepare_job(config: TrainConfig, transport: Transport, reporter: Reporter) -> Job:
    """Check everything, then load; raises the same ``UserError`` on all ranks.

    No weight is read before model, plan and data are known to be good on all ranks.
    """
    with transport.longer_timeout(SETUP_SECONDS):
        weights = find_weights(
            transport,
            reporter,
            config.model,
            mode=config.weights,
            cache=config.weight_cache,
            adapters=_adapters(config),
        )
    with weights:
        return _prepare(config, transport, reporter, weights)


def _adapters(config: TrainConfig) -> str | None:
    """What the model starts with beside its weights."""
    return config.resume_adapter_file if config.train else config.adapter_path


def _with_adapters(config: TrainConfig, adapters: str | None) -> TrainConfig:
    """The same, with the place at which this rank has them."""
    if adapters is None:
        return config
    if config.train:
        return replace(config, resume_adapter_file=adapters)
    return replace(config, adapter_path=adapters)


def _prepare(
    config: TrainConfig,
    transport: Transport,
    reporter: Reporter,
    weights: Weights,
) -> Job:
    path = weights.path
    own = _with_adapters(config, weights.adapters)
    model_config = on_all_ranks(transport, "reading config.json", lambda: read_config(path))
    shape = on_all_ranks(
        transport, "checking config.json", lambda: ModelShape.from_config(model_config)
    )
    model = on_all_ranks(transport, "building the model", lambda: build_model(path, own))
    workload = on_all_ranks(
        transport, "reading the headers", lambda: Workload.of(open_model(str(path)), config)
    )
    cluster = cluster_of(transport, config.hosts, config.profile)
    budgets = find_budgets(transport, cluster, config.memory_limit)
    cluster = within(cluster, budgets)
    # A profile of other work or other machines is found before anything is loaded.
    on_all_ranks(
        transport,
        "checking the profile",
        lambda: [
            cluster.clock(rank, workload, config.grad_checkpoint) for rank in range(cluster.size)
        ],
    )
    given = given_stage_map(transport, config.stage_map)
    plan, slices = on_all_ranks(
        transport,
        "planning",
        lambda: _plan(config, given, budgets, workload, cluster, model, model_config),
    )
    compare_plans(transport, plan.digest)
    optimizer = on_all_ranks(transport, "building the optimizer", lambda: optimizer_of(config))
    on_rank_0(transport, "checking the output", lambda: _check_output(config, path))
    reporter.say(_headline(config, plan))
    if config.train:
        count = count_parameters(model)
        reporter.say(
            f"Trainable parameters: {100 * count.trained / count.total:.3f}% "
            f"({count.trained / 1e6:.3f}M/{count.total / 1e6:.3f}M)"
        )
    with transport.longer_timeout(SETUP_SECONDS):
        data = on_rank_0(
            transport, "reading the data", lambda: _data(config, path, model_config, reporter)
        )
        sizes, lengths = transport.broadcast(
            None if data is None else (data.sizes(), _longest(config, data)), what="data"
        )
        limits = on_all_ranks(
            transport,
            "planning memory",
            lambda: _limits(config, plan, workload, cluster, budgets, lengths, reporter),
        )
        set_limits(limits[transport.rank])
        identity = on_all_ranks(
            transport,
            "reading which model it is",
            lambda: None if data is None else _identity(config, weights, data),
        )
        resumption = prepare_resumption(config, transport, reporter, identity, plan.mesh.pp)
        stages = _load(transport, reporter, plan, slices, config, weights, shape, limits)
    engine = Engine(plan, transport, stages)
    return Job(
        config=config,
        transport=transport,
        reporter=reporter,
        model_path=path,
        workload=workload,
        cluster=cluster,
        plan=plan,
        engine=engine,
        optimizer=optimizer,
        data=data,
        sizes=sizes,
        resumption=resumption,
        identity=identity,
        limits=limits,
    )


def _identity(config: TrainConfig, weights: Weights, data: DataSets) -> dict[str, Any] | None:
    """What checkpoints say of the run, where it has any."""
    if not config.checkpoint_dir and config.resume in ("auto", "never"):
        return None
    return identity_of(config, weights.path, data.train, data.valid, weights.read)


def optimizer_of(config: TrainConfig) -> Optimizer:
    """The optimizer that ``config`` names, with its settings."""
    name = config.optimizer
    return build_optimizer(
        name, config.learning_rate, config.lr_schedule, config.optimizer_config.get(name, {})
    )


def _check_output(config: TrainConfig, model_path: Path) -> None:
    """Before hours of work: what the run will write can be written."""
    for service in (config.report_to or "").lower().replace(",", " ").split():
        if find_spec(service) is None:
            raise UserError(f"--report-to {service}: it is not installed: pip install {service}")
    if config.trace is not None:
        check_writable(Path(config.trace), "--trace")
    if config.rebalance is not None:
        check_writable(Path(config.rebalance), "--rebalance")
    if not config.train:
        return
    output = Path(config.adapter_path)
    existing = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(
            f"--adapter-path {output} cannot be written: {existing} is not a directory that you "
            "may write to"
        )
    if config.fine_tune_type == "full" and output.resolve() == model_path.resolve():
        raise UserError(
            f"--adapter-path {output} is the model itself: name another directory, so that the "
            "model you start from stays"
        )


def _plan(
    config: TrainConfig,
    given: StageMap | None,
    budgets: Sequence[MemoryBudget],
    workload: Workload,
    cluster: Cluster,
    model: nn.Module,
    model_config: dict[str, Any],
) -> tuple[Plan, list[Slice]]:
    """The plan, and all stages' slices: unread, so that knowing them costs nothing."""
    try:
        stage_map = make_stage_map(config, given, workload, cluster)
    except DoesNotFitError as error:
        if config.memory_limit is None:
            raise
        way = how_to_allow_more(config.memory_limit, budgets)
        raise UserError(
            f"{error.fact}: {way}lower --max-seq-length, or use more machines"
        ) from None
    _check_pack(config, model_config)
    mesh = make_mesh(stage_map, len(budgets), [room.host for room in budgets])
    rows, micro_batch_size = divide_batch(config, mesh)
    slices = [Slice(model, start, stop) for start, stop in stage_map.partition.ranges]
    if config.train and not any(part.trainable for part in slices):
        raise UserError(
            f"nothing is left to train with --fine-tune-type {config.fine_tune_type} and "
            f"lora_parameters {dict(config.lora_parameters)}: its keys must name modules of this "
            "model; quantised weights train with lora only"
        )
    plan = Plan(
        mesh=mesh,
        stage_map=stage_map,
        schedule=config.schedule,
        rows=rows,
        micro_batch_size=micro_batch_size,
        trainable=tuple(bool(part.trainable) for part in slices),
        model=model_digest(model_config),
        pack=config.pack,
    )
    return plan, slices


def _check_pack(config: TrainConfig, model_config: dict[str, Any]) -> None:
    """Rotary embeddings that depend on the length of the row would be others."""
    rope = model_config.get("rope_scaling") or model_config.get("rope_parameters") or {}
    if config.pack and "dynamic" in (rope.get("type"), rope.get("rope_type")):
        raise UserError(
            "--pack: the model's rotary embeddings are of type dynamic, and change with the length "
            "of the row: train without --pack"
        )


def _data(
    config: TrainConfig, path: Path, model_config: dict[str, Any], reporter: Reporter
) -> DataSets:
    data = read_data(
        config,
        lambda: read_tokenizer(path, config.trust_remote_code, model_config.get("eos_token_id")),
        model_config.get("max_position_embeddings"),
        reporter.track,
        open_cache(config, path, reporter.warn),
    )
    counts = ", ".join(f"{count} {name}" for name, count in data.sizes().items() if count)
    reporter.say(f"Data: {counts} samples from {config.data}")
    for warning in data.warnings:
        reporter.warn(warning)
    return data


def _longest(config: TrainConfig, data: DataSets) -> tuple[int, int]:
    """Of the sequences of a step, and of those that only pass forward."""
    sets = [data.train] * config.train + [data.valid] * (config.val_batches != 0)
    sets += [data.test] * config.test
    first, *others = (longest_inputs(each, config.max_seq_length) for each in sets if len(each))
    return first, max(others, default=0)


def _limits(
    config: TrainConfig,
    plan: Plan,
    workload: Workload,
    cluster: Cluster,
    budgets: Sequence[MemoryBudget],
    lengths: tuple[int, int],
    reporter: Reporter,
) -> tuple[MemoryLimits, ...]:
    """Of every rank's memory, for the longest sequences; ``UserError`` without room."""
    planned = planned_memory(plan, workload, cluster, lengths, config.grad_checkpoint)
    check_budgets(budgets, planned, _how_to_need_less(config, plan))
    for warning in unwired(budgets, planned):
        reporter.warn(warning)
    return tuple(map(memory_limits, budgets, planned, [cluster.backend] * len(budgets)))


def _how_to_need_less(config: TrainConfig, plan: Plan) -> str:
    ways = {
        "lower --micro-batch-size": plan.micro_batch_size > 1,
        "lower --max-seq-length": True,
        "add --grad-checkpoint": config.train and not config.grad_checkpoint,
        "try --partitioner memory": config.stage_map is None
        and plan.mesh.pp > 1
        and config.partitioner != "memory",
        "give that rank fewer layers": config.stage_map is not None and plan.mesh.pp > 1,
    }
    return ", ".join([*(way for way, is_open in ways.items() if is_open), "or use more machines"])


def _load(
    transport: Transport,
    reporter: Reporter,
    plan: Plan,
    slices: list[Slice],
    config: TrainConfig,
    weights: Weights,
    shape: ModelShape,
    limits: Sequence[MemoryLimits],
) -> list[Stage]:
    start = time.monotonic()
    own = plan.stages_of(transport.rank)
    weights.load([slices[index] for index in own], shape, reporter)
    stages = build_stages(slices, own, checkpoint=config.grad_checkpoint)
    nbytes = sum(stage.part.nbytes for stage in stages)
    trained = sum(stage.part[name].size for stage in stages for name in stage.names)
    gathered = transport.gather(
        (nbytes, trained, mx.get_active_memory(), time.monotonic() - start), what="loading"
    )
    if gathered is not None:
        reporter.table(
            (
                *("rank", "host", "stages", "weights", "trained", "memory", "loaded in"),
                *("planned peak", "limit"),
            ),
            [
                (
                    str(rank),
                    transport.hosts[rank],
                    _describe(plan, rank),
                    gibibytes(nbytes),
                    f"{trained / 1e6:.3f}M",
                    gibibytes(memory),
                    f"{seconds:.1f} s",
                    gibibytes(limits[rank].planned.peak),
                    gibibytes(limits[rank].memory),
                )
                for rank, (nbytes, trained, memory, seconds) in enumerate(gathered)
            ],
        )
    return stages


def _describe(plan: Plan, rank: int) -> str:
    """The layers of a rank's stages: ``layers 0-11``."""
    ranges = [plan.stage_map.partition.ranges[stage] for stage in plan.stages_of(rank)]
    text = ", ".join(f"{start}-{stop - 1}" for start, stop in ranges)
    ends = []
    if ranges[0][0] == 0:
        ends.append("embedding")
    if ranges[-1][1] == plan.stage_map.partition.num_layers:
        ends.append("head")
    return " + ".join([f"layers {text}", *ends])


def _headline(config: TrainConfig, plan: Plan) -> str:
    mesh, count = plan.mesh, plan.stage_map.num_stages
    replicas = f"{mesh.dp} replica{'s' if mesh.dp > 1 else ''}"
    stages = f"{count} stage{'s' if count > 1 else ''}"
    return (
        f"{config.model}: {mesh.size} rank{'s' if mesh.size > 1 else ''} = {replicas} x "
        f"{mesh.pp} in a pipeline of {stages}, {plan.schedule}, batches of {config.batch_size} in "
        f"{plan.microbatches} micro-batches a replica"
    )
