"""Plan a training run on every rank: check the options, read the data, choose a way that fits."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import mlx.nn as nn

from shardmlx.common.formatting import plural
from shardmlx.common.reporter import Reporter, check_writable
from shardmlx.config.data import DataOptions
from shardmlx.config.objective import ObjectiveOptions
from shardmlx.config.specs import FineTune, ModelSource, RunSpec
from shardmlx.config.train import BEST, TrainConfig
from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.memory_limits import MemoryLimits, PlannedMemory, how_to_allow, would_take
from shardmlx.costmodel.predict import Prediction, planned_memory, predict
from shardmlx.costmodel.workload import Workload
from shardmlx.distributed.agreement import AgreedError, from_rank_0, on_all_ranks, on_rank_0
from shardmlx.distributed.transport import Transport
from shardmlx.engine.batches import few_widths
from shardmlx.engine.objectives import Objective
from shardmlx.engine.optimizer import build_optimizer
from shardmlx.errors import UserError
from shardmlx.islands.client import Hub
from shardmlx.islands.protocol import Terms
from shardmlx.loading.build import build_model, count_parameters, cut
from shardmlx.loading.rank_setup import (
    SETUP_SECONDS,
    OpenedModel,
    PlanInputs,
    compare_plans,
    gather_plan_inputs,
    limit_memory,
    measure_again,
    open_on_all_ranks,
)
from shardmlx.loading.tokenizer import read_tokenizer
from shardmlx.modelfiles.model_files import open_model
from shardmlx.models.shares import TensorShares
from shardmlx.models.slice import Slice
from shardmlx.partitioners import DoesNotFitError
from shardmlx.pipeline.plan import Plan
from shardmlx.planning.choice import Choice, choose
from shardmlx.planning.facts import Facts, SequenceLengths
from shardmlx.planning.groups import asked_shares, in_groups, parts_of
from shardmlx.planning.layout import lay_out
from shardmlx.planning.suggestions import remedies
from shardmlx.planning.ways import ways
from shardmlx.training.datasets import DataSets, longest_input, mean_lengths, read_data


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A run with a plan that fits, before any weight is read.

    ``config`` is the run as the user wants it, ``way`` the same with nothing left open. The plan is
    for the ``workload`` of one rank of each group, ``parts`` are those of all its ranks. ``data``
    is on rank 0 only, the ``sizes`` of its sets on all; ``slices`` are of all stages.
    """

    config: TrainConfig
    way: RunSpec
    objective: Objective | None
    workload: Workload
    parts: Sequence[Workload]
    cluster: Cluster
    plan: Plan
    shares: TensorShares
    slices: Sequence[Slice]
    data: DataSets | None
    sizes: Mapping[str, int]
    lengths: SequenceLengths
    limits: tuple[MemoryLimits, ...]

    @property
    def mean_length(self) -> int:
        """Mean length of the rows of a step as they are computed, in tokens."""
        return self.lengths.mean(self.plan.pack)

    def predict(self, length: int) -> Prediction:
        return predict(self.plan, self.workload, self.cluster, length)

    def peaks(self, length: int) -> list[int]:
        """Return the peak bytes of each rank in a step of sequences of ``length`` tokens."""
        memory = _memory_of_ranks(self.plan, self.parts, self.cluster, (length, 0))
        return [each.peak for each in memory]

    def seconds(self, length: int) -> float | None:
        return self.predict(length).step_seconds if self.cluster.unit == "seconds" else None


def open_for_training(
    config: TrainConfig, transport: Transport, reporter: Reporter
) -> AbstractContextManager[OpenedModel]:
    """Find the model and the run's starting point on all ranks. All ranks must call it."""
    adapters = config.resume_adapter_file if config.train else config.adapter_path
    return open_on_all_ranks(transport, reporter, ModelSource.of(config), adapters)


def plan_run(
    config: TrainConfig,
    transport: Transport,
    reporter: Reporter,
    opened: OpenedModel,
    runs: int = 1,
    read: Callable[[], DataSets] | None = None,
) -> PlannedRun:
    """Check the options, read the data, choose the plan, for so many runs that train side by side;
    ``read`` gets the rows of all. Collective; raises ``AgreedError``."""
    asked, epochs = config, config.epochs
    if epochs is not None:  # until the data is read
        config = asked.with_iters(max(asked.iters, asked.grad_accumulation_steps))
    agree = partial(on_all_ranks, transport)
    spec = replace(RunSpec.of(config), runs=runs)
    copies = 0
    if (url := config.island) is not None:

        def terms() -> Terms:
            hub = Hub.of(url, str(config.name), reporter.say)
            return hub.persist(hub.terms)

        with transport.longer_timeout(SETUP_SECONDS):
            copies = from_rank_0(transport, "asking the hub", terms).copies
    # First, since mlx-lm cannot even freeze some models that cannot be trained.
    inputs = gather_plan_inputs(
        transport,
        lambda: replace(
            Workload.of(open_model(str(opened.path)), spec.fine_tune, spec.batch), copies=copies
        ),
        spec.machines,
        config.stage_map,
    )
    asked_of = partial(asked_shares, spec.layout, inputs.sizes, inputs.cluster)
    shares = agree("sharing layers", asked_of)
    run = agree("dividing the ranks", partial(spec.for_ranks, transport.size // shares.size))
    model, stored = agree(
        "building the model",
        partial(build_model, opened.path, run.fine_tune, config.seed, opened.adapters),
    )
    # Wrong options are found before the data is read.
    agree("planning", partial(_check_layout, run, _of_groups(inputs, shares), opened, model))
    agree("building the optimizer", partial(build_optimizer, run.fine_tune))
    on_rank_0(transport, "checking the output", partial(check_output, config, opened.path))
    with transport.longer_timeout(SETUP_SECONDS):
        data = on_rank_0(
            transport, "reading the data", read or partial(read_sets, config, opened, reporter)
        )
        sizes, lengths = transport.broadcast(
            None if data is None else (data.sizes(), _lengths(config, data)), what="data"
        )
        if epochs is not None and config.train:
            steps = asked.steps_of(sizes["train"])
            config = agree("counting the steps", partial(asked.with_iters, steps))
            run = replace(run, fine_tune=FineTune.of(config))
            reporter.say(f"--epochs {epochs:g}: {config.iters} steps")
        inputs = measure_again(transport, inputs, run.machines)
        grouped = _of_groups(inputs, shares)
        choice = agree("choosing a plan", partial(choose_plan, run, grouped, lengths))
        plan, slices = agree("planning", partial(_of_model, choice.plan, choice.run, opened, model))
        plan = replace(plan, mesh=replace(plan.mesh, tp=shares.size))
        compare_plans(transport, plan.digest)
    for part in (slices[index] for index in plan.stages_of(transport.rank)):
        part.stored = {name: stored[name] for name in part.trainable if name in stored}
    check_valid(config, sizes)
    reporter.say(_headline(choice.run, plan))
    if config.train:
        if choice.run != run:
            reporter.say(str(choice))
        total, trained = count_parameters(model)
        reporter.say(
            f"Trainable parameters: {100 * trained / total:.3f}% "
            f"({trained / 1e6:.3f}M/{total / 1e6:.3f}M)"
        )
    way, share = choice.run, lengths.counted_share(plan.pack)
    chosen = {"batch": way.batch, "fine_tune": way.fine_tune, "counted": share}
    parts = parts_of(replace(inputs.sizes, **chosen), shares)
    memory = agree("planning the memory", partial(_fitting, plan, parts, inputs, lengths))
    backend = inputs.cluster.backend
    return PlannedRun(
        config=config,
        way=way,
        objective=Objective.of(ObjectiveOptions.of(config)),
        workload=replace(grouped.sizes, **chosen),
        parts=parts,
        cluster=inputs.cluster.with_rings(shares.size),
        plan=plan,
        shares=shares,
        slices=slices,
        data=data,
        sizes=sizes,
        lengths=lengths,
        limits=limit_memory(transport.rank, inputs.budgets, memory, backend, reporter),
    )


def _of_groups(inputs: PlanInputs[Workload], shares: TensorShares) -> PlanInputs[Workload]:
    """Return the inputs of a plan for groups of ranks."""
    sizes, cluster, scarcest = in_groups(inputs.sizes, inputs.cluster, shares)
    budgets = tuple(inputs.budgets[rank] for rank in scarcest)
    return replace(inputs, sizes=sizes, cluster=cluster, budgets=budgets)


def _memory_of_ranks(
    plan: Plan, parts: Sequence[Workload], cluster: Cluster, lengths: tuple[int, int]
) -> list[PlannedMemory]:
    """Return the memory that each rank takes for its part."""
    of_parts = [planned_memory(plan, part, cluster, lengths) for part in parts]
    return [of_parts[plan.mesh.share(rank)][rank] for rank in range(plan.mesh.size)]


def _fitting(
    plan: Plan, parts: Sequence[Workload], inputs: PlanInputs[Workload], lengths: SequenceLengths
) -> list[PlannedMemory]:
    """Return the memory of each rank. Raises ``UserError`` if one lacks some: the plan was made for
    another rank of its group."""
    memory = _memory_of_ranks(plan, parts, inputs.cluster, lengths.longest)
    for rank, each in enumerate(memory):
        if each.peak > inputs.cluster.capacity(rank):
            problem = would_take(rank, inputs.budgets[rank], each.peak)
            raise UserError(problem, "give tensor_shares that suit the memories")
    return memory


def check_valid(config: TrainConfig, sizes: Mapping[str, int]) -> None:
    """Raise ``AgreedError`` if the run chooses by validations, and has none."""
    if config.train and not sizes["valid"] and (config.early_stop or config.keep == BEST):
        raise AgreedError(
            f"{config.data} has no validation set, by which early_stop and --keep best decide",
            "add one, or leave them out",
        )


def check_output(config: TrainConfig, model_path: Path) -> None:
    """Raise ``UserError``, before hours of work, if the run's outputs cannot be written."""
    for service in config.services:
        if find_spec(service) is None:
            raise UserError(f"--report-to {service} is not installed", f"pip install {service}")
    if config.trace is not None:
        check_writable(Path(config.trace), "--trace")
    if not config.train:
        return
    output = Path(config.adapter_path)
    existing = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(
            f"--adapter-path {output} cannot be written: {existing} is not a directory that you "
            "may write to"
        )
    if config.is_full and output.resolve() == model_path.resolve():
        raise UserError(
            f"--adapter-path {output} is the model itself",
            "name another directory, so that the model you start from stays",
        )


def read_sets(config: TrainConfig, opened: OpenedModel, reporter: Reporter) -> DataSets:
    """Read the data of a run, and say what was read. Raises ``UserError``."""
    data = read_data(
        DataOptions.of(config),
        read_tokenizer(opened.path, config.trust_remote_code, opened.config),
        opened.max_positions,
        reporter.track,
        vocabulary=opened.shape.vocab_size,
    )
    counts = ", ".join(f"{count} {name}" for name, count in data.sizes().items() if count)
    reporter.say(f"Data: {counts} samples from {config.data}")
    for warning in data.warnings:
        reporter.warn(warning)
    return data


def _lengths(config: TrainConfig, data: DataSets) -> SequenceLengths:
    """Return the lengths of a step's sequences, and of forward-only ones."""
    most = config.max_seq_length
    sets = [data.train] * config.train + [data.valid] * (config.val_batches != 0)
    sets += [data.test] * config.test
    used = [each for each in sets if len(each)]
    first, *others = (longest_input(each, most) for each in used)
    widths = few_widths(data.train.lengths, most) if config.train else ()
    means = mean_lengths(used[0], config.batch_size, most, widths)
    return SequenceLengths((first, max(others, default=0)), *means, widths)


def _facts_of(inputs: PlanInputs[Workload], lengths: SequenceLengths) -> Facts:
    return Facts(
        workload=inputs.sizes, cluster=inputs.cluster, lengths=lengths, stage_map=inputs.stage_map
    )


def _check_layout(
    run: RunSpec, inputs: PlanInputs[Workload], opened: OpenedModel, model: nn.Module
) -> None:
    """Raise ``UserError`` for options that are wrong for any data, before these are read."""
    if run.batch.pack and not opened.shape.takes_packed:
        raise UserError(
            "--pack: the model's layers depend on the place of a token in its row",
            "train without --pack",
        )
    facts = _facts_of(inputs, SequenceLengths.full(run.batch.max_seq_length))
    simplest = ways(run, facts)[0]
    try:
        plan = lay_out(simplest, facts)
    except DoesNotFitError:
        return  # another way may, once the lengths are known
    _of_model(plan, simplest, opened, model)


def _of_model(
    plan: Plan, run: RunSpec, opened: OpenedModel, model: nn.Module
) -> tuple[Plan, list[Slice]]:
    """Return the plan for this very model, and all stages' slices; ``UserError`` if none trains."""
    slices = cut(model, plan.stage_map.partition.ranges)
    tune = run.fine_tune
    if tune.train and not any(part.trainable for part in slices):
        raise UserError(
            f"nothing is left to train with --fine-tune-type {tune.fine_tune_type} and "
            f"lora_parameters {dict(tune.lora_parameters)}",
            "its keys must name modules of this model; quantised weights train with lora only",
        )
    trainable = tuple(bool(part.trainable) for part in slices)
    return replace(plan, trainable=trainable, model=opened.digest), slices


def choose_plan(run: RunSpec, inputs: PlanInputs[Workload], lengths: SequenceLengths) -> Choice:
    """Return the chosen way to train. Raises ``UserError`` if none fits in memory."""
    facts = _facts_of(inputs, lengths)
    try:
        return choose(run, facts)
    except DoesNotFitError as error:
        budget = inputs.budgets[error.rank]
        needed = PlannedMemory(round(facts.cluster.capacity(error.rank) + error.shortage), 0)
        would_fit = remedies(run, facts) or ["use more machines, or machines with more memory"]
        fits = needed.peak <= budget.nbytes
        raise UserError(
            error.fact if fits else would_take(error.rank, budget, needed.peak),
            f"{how_to_allow([budget], [needed])}{'; or '.join(would_fit)}",
        ) from None


def _headline(run: RunSpec, plan: Plan) -> str:
    mesh, stages, rows = plan.mesh, plural(plan.stage_map.num_stages, "stage"), ""
    across = f" x {mesh.tp} tensor parallel" if mesh.tp > 1 else ""
    if plan.replica_rows:
        rows = f" at most, rows {' + '.join(map(str, plan.replica_rows))}"
    return (
        f"{run.model}: {plural(mesh.size, 'rank')} = {mesh.dp} data parallel x "
        f"{mesh.pp} pipeline parallel{across}, {stages}, {plan.schedule}, batches of "
        f"{run.batch.batch_size} in {plan.microbatches} micro-batches a replica{rows}"
    )
