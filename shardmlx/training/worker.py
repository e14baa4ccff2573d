"""The part of one rank in a training run: it builds the model, and loads its stages of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from shardmlx.checkpoint.seen_checkpoints import SeenCheckpoints
from shardmlx.common.durable_files import DirectoryLock
from shardmlx.common.reporter import Reporter
from shardmlx.config.specs import FineTune
from shardmlx.config.train import TrainConfig
from shardmlx.distributed.crew import takes_long, together
from shardmlx.distributed.transport import Transport
from shardmlx.engine.divided_weights import DividedWeights
from shardmlx.engine.engine import Engine
from shardmlx.engine.gathered_stage import build_stages
from shardmlx.engine.objectives import Objective
from shardmlx.engine.optimizer import build_optimizer
from shardmlx.engine.stage import Stage
from shardmlx.errors import UserError, file_access
from shardmlx.islands.shared_weights import Sharing
from shardmlx.loading.build import (
    build_model,
    count_parameters,
    cut,
    trained_layers,
    trained_shapes,
)
from shardmlx.loading.rank_setup import ModelWorker
from shardmlx.models.runtime.divided_layers import take_share
from shardmlx.models.runtime.slice import Slice
from shardmlx.planning.job import Job
from shardmlx.training.run_worker import RunWorker, StepAnswer, StepOrder
from shardmlx.training.setup import TrainingRun


@dataclass(slots=True)
class _Loading:
    """A run of which this rank has cut its stages, and which it has not loaded yet."""

    config: TrainConfig
    job: Job
    slices: Sequence[Slice]
    weights: DividedWeights | None
    started: float
    checkpoints: SeenCheckpoints
    output_locks: list[DirectoryLock] = field(default_factory=list)
    stages: Sequence[Stage] = ()
    """The stages of this rank, once their weights were read."""

    def release(self) -> None:
        """Let other runs have the directories of this one."""
        for lock in self.output_locks:
            lock.release()
        self.checkpoints.release()

    def parts(self, rank: int) -> list[Slice]:
        """Return the slices of a rank's stages."""
        return [self.slices[index] for index in self.job.trained.plan.stages_of(rank)]


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """The weights that a rank has loaded: their bytes, how many are trained, and the seconds."""

    nbytes: int
    trained: int
    seconds: float


def _are_one(directory: Path, other: Path) -> bool:
    return directory.exists() and other.exists() and directory.samefile(other)


class TrainWorker(ModelWorker):
    """The part of one rank in one training run, or in several that train side by side."""

    def __init__(self, transport: Transport, reporter: Reporter) -> None:
        super().__init__(transport, reporter)
        self.runs: list[RunWorker] = []
        """The runs that are loaded, in the order of their planning."""
        self._model: nn.Module | None = None
        self._stored: Mapping[str, mx.array] = {}
        self._loading: _Loading | None = None
        self._seen: SeenCheckpoints | None = None

    def build(self, fine_tune: FineTune, seed: int) -> tuple[int, int]:
        """Build the whole model, lazily, whose new weights are those of a ``seed``; return its
        parameters, and the trained ones. Raises ``UserError``."""
        opened = self.opened
        model, self._stored = build_model(opened.path, fine_tune, seed, opened.adapters)
        self._model = model
        return count_parameters(model)

    def trained_layers(self) -> tuple[bool, ...]:
        """Return whether each layer of the model, with the embedding or the head beside it, has
        weights to train."""
        return trained_layers(self._built)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all trained weights by their names."""
        return trained_shapes(self._built)

    def cut(self, config: TrainConfig, job: Job) -> None:
        """Cut this rank's stages of a run out of the model that was built."""
        slices = cut(self._built, job.stage_map.partition.ranges)
        loading = _Loading(config, job, slices, None, time.monotonic(), self.checkpoints)
        self._loading = loading
        self._seen = None
        rank = self.transport.rank
        mesh = job.mesh
        parts = loading.parts(rank)
        for part in parts:
            part.stored = {
                name: self._stored[name] for name in part.trainable if name in self._stored
            }
        if job.trained.way.fine_tune.divides_weights and mesh.dp > 1:
            _, pipeline_rank = mesh.coordinates(rank)
            loading.weights = DividedWeights(rank, mesh.replicas_of(pipeline_rank), parts)

    @property
    def checkpoints(self) -> SeenCheckpoints:
        """The checkpoints that this rank sees of the run that is to be cut next."""
        if self._seen is None:
            self._seen = SeenCheckpoints(self.transport)
        return self._seen

    def lock_output(self) -> None:
        """Make the run's directories, and keep other runs out of them. On rank 0 alone. Raises
        ``UserError``."""
        loading = self._last()
        place = loading.job.trained.resumption.place
        another = "name another directory"
        config = loading.config
        for directory in dict.fromkeys((Path(config.adapter_path), config.last_path)):
            if place is not None and _are_one(directory, place.store.directory):
                continue  # it is locked for this run's checkpoints
            problem = f"--adapter-path {directory}: another run writes there"
            refusal = UserError(problem, f"wait for its end, or {another}")
            with file_access("make --adapter-path", directory, another):
                directory.mkdir(parents=True, exist_ok=True)
                loading.output_locks.append(DirectoryLock(directory, refusal))

    def close(self) -> None:
        """Remove temporary files, and let other runs have all directories of these runs."""
        super().close()
        if self._seen is not None:
            self._seen.release()
        if self._loading is not None:
            self._loading.release()
        for worker in self.runs:
            worker.run.release()

    def share_layers(self) -> None:
        """Take this rank's share of each layer, whose group of ranks then sums. Raises
        ``UserError``."""
        loading = self._last()
        rank = self.transport.rank
        mesh = loading.job.mesh
        shares = loading.job.shares
        for part in loading.parts(rank):
            take_share(part, self.opened.shape, shares, mesh.share(rank), self.all_sum)

    @takes_long
    def load(self) -> LoadedWeights:
        """Read this rank's weights. Frozen ones are those of the runs before. Raises
        ``UserError``."""
        loading = self._last()
        rank = self.transport.rank
        training = loading.job.trained
        parts = loading.parts(rank)
        weights = loading.weights
        if self.runs:
            for part, stage in zip(parts, self.runs[0].run.stages, strict=True):
                part.share_frozen(stage.part)
        for part in parts:
            part.load()
        self.close_files()
        self._model = None
        self._stored = {}
        loading.stages = stages = build_stages(
            loading.slices,
            training.plan.stages_of(rank),
            savings=training.workload.savings(loading.job.cluster.backend),
            weights=weights,
            objective=Objective.of(loading.config.loss),
        )
        nbytes = sum(part.nbytes for part in parts) if weights is None else weights.nbytes(parts)
        trained = sum(stage.part[each].size for stage in stages for each in stage.names)
        return LoadedWeights(nbytes, trained, time.monotonic() - loading.started)

    @together
    def get_ready(
        self,
        sharing: Sharing | None,
        name: str,
        metrics_file: str | None,
    ) -> None:
        """Get ready to train the run called ``name``, which is empty for a run alone: ranks compare
        their clocks, and what they train."""
        loading = self._last()
        training = loading.job.trained
        tune = training.way.fine_tune
        engine = Engine(
            training.plan,
            self.transport,
            loading.stages,
            divides_optimizer=tune.divides_optimizer,
            sum_dtype=tune.sum_dtype,
            weights=loading.weights,
        )
        reporter = self.reporter
        if name:
            metrics = Path(metrics_file) if metrics_file else None
            reporter = reporter.of_run(name, metrics)
        run = TrainingRun(
            config=loading.config,
            job=loading.job,
            objective=Objective.of(loading.config.loss),
            transport=self.transport,
            reporter=reporter,
            model_path=self.opened.path,
            engine=engine,
            optimizer=build_optimizer(tune, loading.parts(self.transport.rank)),
            sharing=sharing,
            name=name,
            output_locks=tuple(loading.output_locks),
            checkpoints=loading.checkpoints,
            number=len(self.runs),
        )
        self.runs.append(RunWorker(run))
        self._loading = None

    @together
    def step(self, orders: Sequence[tuple[int, StepOrder]]) -> list[StepAnswer]:
        """Make a step of each of several runs, by their numbers, in one schedule: micro-batches of
        one fill the bubble of another."""
        workers = [self.runs[number] for number, _ in orders]
        what = f"step {orders[0][1].step}"
        engine = workers[0].run.engine
        begin = len(engine.recorder.events)
        with workers[0].spending(what):
            steps = [
                worker.begin_step(order) for worker, (_, order) in zip(workers, orders, strict=True)
            ]
            results = engine.train_steps(steps)
        for worker in workers[1:]:
            worker.run.engine.recorder.events += engine.recorder.events[begin:]
        answers = []
        for worker, of_run in zip(workers, results, strict=True):
            with worker.spending(f"update of {what}"):
                answers.append(worker.end_step(of_run))
        return answers

    @property
    def _built(self) -> nn.Module:
        assert self._model is not None, "it was built"
        return self._model

    def _last(self) -> _Loading:
        assert self._loading is not None, "its stages were cut"
        return self._loading
