"""A planned run that is loaded on a rank, up to its first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx.optimizers import Optimizer

from shardmlx.checkpoint.resume import Resumption
from shardmlx.checkpoint.seen_checkpoints import SeenCheckpoints
from shardmlx.common.durable_files import DirectoryLock
from shardmlx.common.reporter import Reporter
from shardmlx.config.train import TrainConfig
from shardmlx.distributed.transport import Transport
from shardmlx.engine.engine import Engine
from shardmlx.engine.objectives import Objective
from shardmlx.engine.stage import Stage
from shardmlx.islands.hub_link import HubLink
from shardmlx.islands.shared_weights import Sharing
from shardmlx.planning.job import Job, TrainingPart
from shardmlx.training.datasets import DataSets


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A run that is ready to start, with its options, as rank 0 has planned it. ``number`` is its
    place among runs that train side by side. Rank 0 alone has its ``data``, its ``identity``, which
    tells it from others, its ``link`` to a hub, and the locks that keep other runs out of its
    directories."""

    config: TrainConfig
    job: Job
    objective: Objective | None
    transport: Transport
    reporter: Reporter
    model_path: Path
    engine: Engine
    optimizer: Optimizer
    sharing: Sharing | None = None
    """The weights that the run shares with others, if it is an island."""
    link: HubLink | None = None
    data: DataSets | None = None
    identity: Mapping[str, Any] | None = None
    name: str = ""
    """The name among runs that train side by side; empty for a run alone."""
    output_locks: tuple[DirectoryLock, ...] = ()
    checkpoints: SeenCheckpoints | None = None
    number: int = 0

    def release(self) -> None:
        """Let other runs have the directories of this one."""
        for lock in self.output_locks:
            lock.release()
        if self.checkpoints is not None:
            self.checkpoints.release()

    @property
    def resumption(self) -> Resumption:
        """The place of the run's checkpoints, and the one that it goes on from."""
        return self.training.resumption

    @property
    def training(self) -> TrainingPart:
        """The part of the job that trains."""
        return self.job.trained

    @property
    def shares_prompts(self) -> bool:
        """True if the answers of a pair are evaluated with their prompt once."""
        plan = self.training.plan
        shape = self.training.workload.shape
        takes_pieces = shape.takes_packed and shape.family.takes_pieces
        return plan.together > 1 and takes_pieces and self.stages[0].part.takes_shared_prefixes

    @property
    def stages(self) -> list[Stage]:
        """The stages of this rank, in the order of the model."""
        return list(self.engine.stages.values())
