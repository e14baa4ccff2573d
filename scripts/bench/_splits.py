"""Divide layers by measured times, and predict what a step then takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardmlx.config.specs import RunSpec
from shardmlx.costmodel.cluster import Cluster, read_profiles
from shardmlx.costmodel.hostfile import Machine
from shardmlx.costmodel.predict import Prediction, predict
from shardmlx.costmodel.workload import Workload
from shardmlx.modelfiles.model_files import open_model
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.schedules import get_schedule
from shardmlx.pipeline.stage_map import StageMap, write_stage_map
from shardmlx.planning.layout import lay_out


@dataclass(frozen=True)
class Splits:
    """The divisions of one model among ``ranks`` ranks of the machine of ``profile``."""

    run: RunSpec
    workload: Workload
    cluster: Cluster
    length: int

    @classmethod
    def of(cls, run: RunSpec, profile: Path, ranks: int, length: int) -> Splits:
        measured = read_profiles(str(profile))
        machine = Machine(host=measured.machines[0].host)
        workload = Workload.of(open_model(run.model), run.fine_tune, run.batch)
        return cls(run, workload, Cluster(machines=(machine,) * ranks, profile=measured), length)

    def _plan(self, schedule: str, stage_map: StageMap | None = None) -> Plan:
        layout = replace(
            self.run.layout,
            pipeline_stages=self.cluster.size,
            partitioner="balanced",
            schedule=schedule,
        )
        way, length = replace(self.run, layout=layout), self.length
        return lay_out(way, self.workload, stage_map, self.cluster, length, length)

    def balanced(self, schedule: str) -> tuple[int, ...]:
        """Return the layers of each stage as ``--partitioner balanced`` divides them."""
        return self._plan(schedule).stage_map.partition.sizes

    def predicted(self, schedule: str, sizes: Sequence[int]) -> Prediction:
        """Predict the seconds of a step with so many layers in each stage."""
        ranks = self.cluster.size
        placement = get_schedule(schedule).placement(ranks, len(sizes) // ranks)
        plan = self._plan(schedule, StageMap.from_sizes(sizes, placement))
        return predict(plan, self.workload, self.cluster, self.length)


def even(total: int, parts: int) -> tuple[int, ...]:
    """Numbers that differ by one at most, larger ones first."""
    return tuple(total // parts + (i < total % parts) for i in range(parts))


def write_split(schedule: str, sizes: Sequence[int], ranks: int, path: Path) -> Path:
    """Write a stage map for ``shardmlx.train``."""
    placement = get_schedule(schedule).placement(ranks, len(sizes) // ranks)
    write_stage_map(StageMap.from_sizes(sizes, placement), path)
    return path
