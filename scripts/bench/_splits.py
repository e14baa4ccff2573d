"""Divide layers by measured times, and predict what a step then takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardmlx.config.specs import NONE, RunSpec
from shardmlx.costmodel.cluster import Cluster, read_profiles
from shardmlx.costmodel.hostfile import Machine
from shardmlx.costmodel.predict import Prediction, predict
from shardmlx.costmodel.workload import Workload
from shardmlx.modelfiles.model_files import open_model
from shardmlx.partitioners import get_partitioner
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.schedules import get_schedule
from shardmlx.pipeline.stage_map import StageMap, write_stage_map
from shardmlx.planning.layout import divide_batch
from shardmlx.planning.partition_problem import Candidate, make_problem, plan_of


@dataclass(frozen=True)
class Splits:
    """The divisions of one model among ``ranks`` ranks of the machine of ``profile``."""

    workload: Workload
    cluster: Cluster
    length: int

    @classmethod
    def of(cls, run: RunSpec, profile: Path, ranks: int, length: int) -> Splits:
        measured = read_profiles(str(profile))
        machine = Machine(host=measured.machines[0].host)
        workload = Workload.of(open_model(run.model), run.fine_tune, run.batch)
        return cls(workload, Cluster(machines=(machine,) * ranks, profile=measured), length)

    def _way(self, schedule: str, virtual: int) -> Candidate:
        mesh = Mesh(1, self.cluster.size)
        rows, micro_batch_size = divide_batch(self.workload.batch, mesh)
        return Candidate(mesh, schedule, virtual, rows, micro_batch_size, NONE)

    def balanced(self, schedule: str) -> tuple[int, ...]:
        """Return the layers of each stage as ``--partitioner balanced`` divides them."""
        way = self._way(schedule, get_schedule(schedule).default_virtual)
        problem = make_problem(way, self.workload, self.cluster, self.length)
        return get_partitioner("balanced")(problem).partition.sizes

    def predicted(self, schedule: str, sizes: Sequence[int]) -> Prediction:
        """Predict the seconds of a step with so many layers in each stage."""
        way = self._way(schedule, len(sizes) // self.cluster.size)
        stage_map = StageMap.from_sizes(sizes, way.placement)
        plan = plan_of(way, stage_map, self.workload)
        return predict(plan, self.workload, self.cluster, self.length)


def even(total: int, parts: int) -> tuple[int, ...]:
    """Numbers that differ by one at most, larger ones first."""
    return tuple(total // parts + (i < total % parts) for i in range(parts))


def write_split(schedule: str, sizes: Sequence[int], ranks: int, path: Path) -> Path:
    """Write a stage map for ``shardmlx.train``."""
    placement = get_schedule(schedule).placement(ranks, len(sizes) // ranks)
    write_stage_map(StageMap.from_sizes(sizes, placement), path)
    return path
