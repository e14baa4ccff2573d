"""Plan a training run, on rank 0: check the options, read the data, choose a way that fits."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardmlx.checkpoint.export import indexed_files
from shardmlx.common.formatting import plural
from shardmlx.common.reporter import Reporter, check_writable
from shardmlx.config.specs import RunSpec
from shardmlx.config.train import BEST, TrainConfig
from shardmlx.distributed.crew import Crew
from shardmlx.engine.batches import few_widths
from shardmlx.engine.objectives import Objective
from shardmlx.engine.optimizer import build_optimizer
from shardmlx.errors import UserError
from shardmlx.islands.client import Hub
from shardmlx.loading.rank_setup import (
    OpenedModel,
    PlanInputs,
    gather_plan_inputs,
    limits_of,
    measure_again,
    open_everywhere,
)
from shardmlx.loading.tokenizer import read_tokenizer
from shardmlx.modelfiles.model_files import open_model
from shardmlx.modelfiles.safetensors_header import INDEX_FILE, MODEL_FILES
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.partitioners import DoesNotFitError
from shardmlx.pipeline.plan import Plan
from shardmlx.planning.choice import Choice, decide
from shardmlx.planning.facts.plan_facts import PlanFacts, SequenceLengths
from shardmlx.planning.facts.workload import Workload
from shardmlx.planning.groups import in_shares, parts_of
from shardmlx.planning.layout import lay_out
from shardmlx.planning.memory.limits import PlannedMemory, how_to_allow, would_take
from shardmlx.planning.suggestions import remedies
from shardmlx.planning.ways import ways
from shardmlx.training.datasets import DataSets, longest_input, mean_lengths, read_data
from shardmlx.training.planned_run import PlannedRun, memory_of_ranks
from shardmlx.training.worker import TrainWorker


def open_for_training(
    config: TrainConfig, crew: Crew[TrainWorker], reporter: Reporter
) -> OpenedModel:
    """Find the model and the run's starting point on all ranks; return rank 0's. Raises
    ``UserError``."""
    adapters = config.resume_adapter_file if config.tune.train else config.adapter_path
    return open_everywhere(crew, config.source, adapters, reporter)


def plan_run(
    config: TrainConfig,
    crew: Crew[TrainWorker],
    reporter: Reporter,
    runs: int = 1,
    read: Callable[[], DataSets] | None = None,
) -> tuple[PlannedRun, DataSets]:
    """Check the options, read the data, choose the plan, for so many runs that train side by side;
    ``read`` gets the rows of all. On rank 0, once all have opened the model; all have built it
    then. Raises ``UserError``."""
    opened = crew.worker.opened
    asked = config
    if config.epochs is not None:  # until the data is read
        config = asked.with_iters(max(asked.iters, asked.batch.grad_accumulation_steps))
    spec = replace(config.spec, runs=runs)
    files = open_model(str(opened.path))
    workload = Workload.of(files, spec.fine_tune, spec.batch, spec.saves)
    # First, since mlx-lm cannot even freeze some models that cannot be trained.
    inputs = gather_plan_inputs(
        crew,
        replace(workload, copies=_copies(config, reporter)),
        spec.machines,
        config.layout.stage_map,
    )
    run = spec.for_ranks(crew.size // spec.layout.across)
    total, trained = crew.all(TrainWorker.build, run.fine_tune, config.seed)[0]
    # Wrong options are found before the data is read.
    _check_layout(run, inputs, crew.worker)
    build_optimizer(run.fine_tune)
    check_output(config, opened.path)
    data = read_sets(config, opened, reporter) if read is None else read()
    if asked.epochs is not None and config.tune.train:
        config = asked.with_iters(asked.steps_of(data.sizes()["train"]))
        run = replace(run, fine_tune=config.tune)
        reporter.say(f"--epochs {asked.epochs:g}: {config.iters} steps")
    lengths = lengths_of(config, data)
    inputs = measure_again(crew, inputs, run.machines)
    planned, choice = _choose(config, run, inputs, lengths, crew.worker, reporter)
    check_valid(config, data.sizes())
    reporter.say(_headline(planned.way, planned.plan))
    if config.tune.train:
        if planned.way != run.with_shares(run.layout.across):
            reporter.say(str(choice))
        reporter.say(
            f"Trainable parameters: {100 * trained / total:.3f}% "
            f"({trained / 1e6:.3f}M/{total / 1e6:.3f}M)"
        )
    return replace(planned, sizes=data.sizes()), data


def _copies(config: TrainConfig, reporter: Reporter) -> int:
    """Return how many copies of the trained weights the hub wants of an island, if it is one."""
    if config.island is None:
        return 0
    hub = Hub.of(config.island, str(config.name), reporter.say)
    return hub.persist(hub.terms).copies


def _choose(
    config: TrainConfig,
    run: RunSpec,
    inputs: PlanInputs[Workload],
    lengths: SequenceLengths,
    worker: TrainWorker,
    reporter: Reporter,
) -> tuple[PlannedRun, Choice]:
    """Return the plan of the fastest way that fits, but for the sizes of the data, and all that was
    looked at. Raises ``UserError`` if none fits."""
    choice = choose_plan(run, inputs, lengths)
    plan = _of_model(choice.plan, choice.run, worker)
    return planned_by(choice, plan, config, inputs, reporter), choice


def planned_by(
    choice: Choice,
    plan: Plan,
    config: TrainConfig,
    inputs: PlanInputs[Workload],
    reporter: Reporter,
) -> PlannedRun:
    """Return a run by the chosen ``plan``, but for the sizes of the data. Raises ``UserError`` if a
    rank lacks memory for its share."""
    way = choice.run
    shares = choice.facts.shares
    lengths = choice.facts.lengths
    plan = replace(plan, mesh=replace(plan.mesh, tp=shares.size))
    counted = lengths.counted_share(plan.pack)
    chosen: dict[str, Any] = {
        "batch": way.batch,
        "fine_tune": way.fine_tune,
        "counted": counted,
    }
    parts = parts_of(replace(inputs.sizes, **chosen), shares)
    return PlannedRun(
        config=config,
        way=way,
        objective=Objective.of(config.loss),
        workload=replace(choice.facts.workload, **chosen),
        parts=parts,
        cluster=inputs.cluster.with_rings(shares.size),
        plan=plan,
        shares=shares,
        sizes={},
        lengths=lengths,
        limits=limits_of(inputs, _fitting(plan, parts, inputs, lengths), reporter),
    )


def _fitting(
    plan: Plan, parts: Sequence[Workload], inputs: PlanInputs[Workload], lengths: SequenceLengths
) -> list[PlannedMemory]:
    """Return the memory of each rank. Raises ``UserError`` if one lacks some: the plan was made for
    another rank of its group."""
    memory = memory_of_ranks(plan, parts, inputs.cluster, lengths.longest)
    for rank, each in enumerate(memory):
        if each.peak > inputs.cluster.capacity(rank):
            problem = would_take(rank, inputs.budgets[rank], each.peak)
            raise UserError(problem, "give tensor_shares that suit the memories")
    return memory


def check_valid(config: TrainConfig, sizes: Mapping[str, int]) -> None:
    """Raise ``UserError`` if the run chooses by validations, and has none."""
    if config.tune.train and not sizes["valid"] and (config.early_stop or config.keep == BEST):
        raise UserError(
            f"{config.sets.data} has no validation set, by which early_stop and --keep best decide",
            "add one, or leave them out",
        )


def check_output(config: TrainConfig, model_path: Path) -> None:
    """Raise ``UserError``, before hours of work, if the run's outputs cannot be written."""
    for service in config.services:
        if find_spec(service) is None:
            raise UserError(f"--report-to {service} is not installed", f"pip install {service}")
    if config.trace is not None:
        check_writable(Path(config.trace), "--trace")
        if config.metrics_file and _is_same(Path(config.trace), Path(config.metrics_file)):
            raise UserError(
                f"--trace {config.trace} is the --metrics-file too", "give each a file of its own"
            )
    if not config.tune.train:
        return
    for output in dict.fromkeys((Path(config.adapter_path), config.last_path)):
        existing = next(path for path in (output, *output.absolute().parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise UserError(
                f"--adapter-path {output} cannot be written: {existing} is not a directory that "
                "you may write to"
            )
        if config.tune.is_full:
            _check_models_place(output, model_path)


def _check_models_place(output: Path, model_path: Path) -> None:
    """Raise ``UserError`` if a model in a directory would spoil another, or the one in the way."""
    if _is_same(output, model_path):
        raise UserError(
            f"--adapter-path {output} is the model itself",
            "name another directory, so that the model you start from stays",
        )
    # A loader would take them with the new ones.
    others = sorted({file.name for file in output.glob(MODEL_FILES)} - indexed_files(output))
    if others:
        raise UserError(
            f"--adapter-path {output} has {others[0]}, which no {INDEX_FILE} lists there",
            "name another directory, or move that model",
        )


def _is_same(path: Path, other: Path) -> bool:
    """Tell whether two paths are of one file, or will be."""
    if path.exists() and other.exists():
        return path.samefile(other)
    return path.resolve() == other.resolve()


def read_sets(config: TrainConfig, opened: OpenedModel, reporter: Reporter) -> DataSets:
    """Read the data of a run, and say what was read. Raises ``UserError``."""
    data = read_data(
        config.wanted_data,
        read_tokenizer(opened.path, config.sets.trust_remote_code, opened.config),
        opened.max_positions,
        reporter.track,
        vocabulary=opened.shape.vocab_size,
    )
    counts = ", ".join(f"{count} {name}" for name, count in data.sizes().items() if count)
    reporter.say(f"Data: {counts} samples from {config.sets.data}")
    for warning in data.warnings:
        reporter.warn(warning)
    return data


def lengths_of(config: TrainConfig, data: DataSets) -> SequenceLengths:
    """Return the lengths of a step's sequences, and of forward-only ones."""
    most = config.batch.max_seq_length
    sets = [data.train] * config.tune.train + [data.valid] * (config.val_batches != 0)
    sets += [data.test] * config.sets.test
    used = [each for each in sets if len(each)]
    first, *others = (longest_input(each.lengths, most) for each in used)
    lengths = used[0].lengths
    counted = used[0].counted(most)
    widths = few_widths(lengths, most) if config.tune.train else ()
    means = mean_lengths(lengths, counted, config.batch.batch_size, most, widths)
    return SequenceLengths((first, max(others, default=0)), *means, widths)


def _facts_of(inputs: PlanInputs[Workload], lengths: SequenceLengths) -> PlanFacts:
    return PlanFacts(
        workload=inputs.sizes, cluster=inputs.cluster, lengths=lengths, stage_map=inputs.stage_map
    )


def _check_layout(run: RunSpec, inputs: PlanInputs[Workload], worker: TrainWorker) -> None:
    """Raise ``UserError`` for options that are wrong for any data, before these are read."""
    check_packing(run, worker.opened.shape)
    facts = _facts_of(inputs, SequenceLengths.full(run.batch.max_seq_length))
    run, facts = in_shares(run, facts, run.layout.across)
    simplest = ways(run, facts)[0]
    try:
        plan = lay_out(simplest, facts)
    except DoesNotFitError:
        return  # another way may, once the lengths are known
    _of_model(plan, simplest, worker)


def check_packing(run: RunSpec, shape: ModelShape) -> None:
    """Raise ``UserError`` if a run packs rows that the model's layers would not tell apart."""
    if run.batch.pack and not shape.takes_packed:
        raise UserError(
            "--pack: the model's layers depend on the place of a token in its row",
            "train without --pack",
        )


def _of_model(plan: Plan, run: RunSpec, worker: TrainWorker) -> Plan:
    """Return the plan for the very model that rank 0 has built; ``UserError`` if nothing trains."""
    tune = run.fine_tune
    trainable = worker.trainable(plan.stage_map.partition.ranges)
    if tune.train and not any(trainable):
        raise UserError(
            f"nothing is left to train with --fine-tune-type {tune.fine_tune_type} and "
            f"lora_parameters {dict(tune.lora_parameters)}",
            "its keys must name modules of this model; quantised weights train with lora only",
        )
    return replace(plan, trainable=trainable, model=worker.opened.digest)


def choose_plan(run: RunSpec, inputs: PlanInputs[Workload], lengths: SequenceLengths) -> Choice:
    """Return the chosen way to train. Raises ``UserError`` if none fits in memory."""
    facts = _facts_of(inputs, lengths)
    try:
        return decide(run, facts)
    except DoesNotFitError as error:
        run, facts = in_shares(run, facts, run.layout.across)
        budget = inputs.budgets[facts.ranks[error.rank] if facts.ranks else error.rank]
        needed = PlannedMemory(round(facts.cluster.capacity(error.rank) + error.shortage), 0)
        would_fit = remedies(run, facts) or ["use more machines, or machines with more memory"]
        fits = needed.peak <= budget.nbytes
        raise UserError(
            error.fact if fits else would_take(error.rank, budget, needed.peak),
            f"{how_to_allow([budget], [needed])}{'; or '.join(would_fit)}",
        ) from None


def _headline(run: RunSpec, plan: Plan) -> str:
    mesh = plan.mesh
    stages = plural(plan.stage_map.num_stages, "stage")
    rows = ""
    across = f" x {mesh.tp} tensor parallel" if mesh.tp > 1 else ""
    batches = "micro-batch" if plan.microbatches == 1 else "micro-batches"
    if plan.replica_rows:
        rows = f" at most, rows {' + '.join(map(str, plan.replica_rows))}"
    return (
        f"{run.model}: {plural(mesh.size, 'rank')} = {mesh.dp} data parallel x "
        f"{mesh.pp} pipeline parallel{across}, {stages}, {plan.schedule}, batches of "
        f"{run.batch.batch_size} in {plan.microbatches} {batches} a replica{rows}"
    )
