"""Plan a training run, on rank 0: check the options, read the data, choose a way that fits."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardmlx.checkpoint.export import indexed_files
from shardmlx.common.formatting import plural
from shardmlx.common.reporter import Reporter, check_writable
from shardmlx.config.specs import RunSpec
from shardmlx.config.train import BEST, TrainConfig
from shardmlx.distributed.crew import Crew
from shardmlx.engine.batches import few_widths
from shardmlx.engine.optimizer import build_optimizer
from shardmlx.errors import UserError
from shardmlx.islands.client import Hub
from shardmlx.loading.rank_setup import OpenedModel, gather_facts, measure_again, open_everywhere
from shardmlx.loading.tokenizer import read_tokenizer
from shardmlx.modelfiles.model_files import open_model
from shardmlx.modelfiles.safetensors_header import INDEX_FILE, MODEL_FILES
from shardmlx.pipeline.plan import Plan
from shardmlx.planning.facts.job_facts import TrainingFacts
from shardmlx.planning.facts.plan_facts import SequenceLengths
from shardmlx.planning.facts.workload import Workload
from shardmlx.planning.job import Job
from shardmlx.planning.think import JobOptions, check_layout, think
from shardmlx.runreport.services import check_services
from shardmlx.training.datasets import DataSets, longest_input, mean_lengths, read_data
from shardmlx.training.run_start import find_start
from shardmlx.training.worker import TrainWorker


def open_for_training(
    config: TrainConfig, crew: Crew[TrainWorker], reporter: Reporter
) -> OpenedModel:
    """Find the model and the run's starting point on all ranks; return rank 0's. Raises
    ``UserError``."""
    adapters = config.resume_adapter_file if config.tune.train else config.adapter_path
    return open_everywhere(crew, config.source, adapters, reporter)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run with a job that fits, before any weight is read, and its data. On rank 0."""

    config: TrainConfig
    """The run as the user wants it; ``epochs`` are steps now."""
    job: Job
    data: DataSets
    identity: Mapping[str, Any] | None = None
    """The facts that tell the run from others, if it has checkpoints."""

    def seconds(self) -> float | None:
        """Return the predicted seconds of a step with rows of mean length; None where speeds are
        unknown."""
        return self.job.seconds(self.job.trained.mean_length)


def plan_run(
    config: TrainConfig,
    crew: Crew[TrainWorker],
    reporter: Reporter,
    runs: int = 1,
    read: Callable[[], DataSets] | None = None,
) -> PlannedRun:
    """Check the options, read the data, plan the job, for so many runs that train side by side;
    ``read`` gets the rows of all. On rank 0, once all have opened the model; all have built it
    then. Raises ``UserError``."""
    opened = crew.worker.opened
    asked = config
    if config.epochs is not None:  # until the data is read
        config = asked.with_iters(max(asked.iters, asked.batch.grad_accumulation_steps))
    spec = replace(config.spec, runs=runs)
    files = open_model(str(opened.path))
    # First, since mlx-lm cannot even freeze some models that cannot be trained.
    workload = Workload.of(files, spec.fine_tune, spec.batch, spec.saves)
    workload = replace(workload, copies=_copies(config, reporter))
    facts = gather_facts(crew, workload, spec.machines, config.layout.stage_map)
    run = spec.for_ranks(crew.size // spec.layout.across)
    total, trained = crew.all(TrainWorker.build, run.fine_tune, config.seed)[0]
    lengths = SequenceLengths.full(run.batch.max_seq_length)
    layers = crew.worker.trained_layers()
    facts = replace(facts, training=TrainingFacts(workload, lengths, layers))
    # Wrong options are found before the data is read.
    check_layout(run, facts)
    build_optimizer(run.fine_tune)
    check_output(config, opened.path)
    data = read_sets(config, opened, reporter) if read is None else read()
    if asked.epochs is not None and config.tune.train:
        config = asked.with_iters(asked.steps_of(data.sizes()["train"]))
        run = replace(run, fine_tune=config.tune)
        reporter.say(f"--epochs {asked.epochs:g}: {config.iters} steps")
    check_valid(config, data.sizes())
    start = None
    if config.sweep is None and config.tune.train and not config.dry_run:
        start, seen = find_start(config, data, crew)
        facts = replace(facts, checkpoints=seen)
    facts = measure_again(crew, facts.with_lengths(lengths_of(config, data)), run.machines)
    job = think(JobOptions(training=run, start=start), facts)
    for warning in job.warnings:
        reporter.warn(warning)
    reporter.say(_headline(job.trained.way, job.trained.plan))
    if config.tune.train:
        if job.trained.way != run.with_shares(run.layout.across):
            reporter.say(str(job.trained.choice))
        reporter.say(
            f"Trainable parameters: {100 * trained / total:.3f}% "
            f"({trained / 1e6:.3f}M/{total / 1e6:.3f}M)"
        )
    return PlannedRun(config, job, data, None if start is None else start.identity)


def _copies(config: TrainConfig, reporter: Reporter) -> int:
    """Return how many copies of the trained weights the hub wants of an island, if it is one."""
    if config.island is None:
        return 0
    hub = Hub.of(config.island, str(config.name), reporter.say)
    return hub.persist(hub.terms).copies


def check_valid(config: TrainConfig, sizes: Mapping[str, int]) -> None:
    """Raise ``UserError`` if the run chooses by validations, and has none."""
    if config.tune.train and not sizes["valid"] and (config.early_stop or config.keep == BEST):
        raise UserError(
            f"{config.sets.data} has no validation set, by which early_stop and --keep best decide",
            "add one, or leave them out",
        )


def check_output(config: TrainConfig, model_path: Path) -> None:
    """Raise ``UserError``, before hours of work, if the run's outputs cannot be written."""
    check_services(config.services)
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
