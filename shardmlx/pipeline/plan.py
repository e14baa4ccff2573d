"""Plan a run: what every rank does in a step. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from shardmlx.common.digests import json_digest
from shardmlx.errors import UserError
from shardmlx.pipeline.actions import Grid
from shardmlx.pipeline.lowering import lower, validate
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.schedules import Schedule, compute_actions, get_schedule
from shardmlx.pipeline.stage_map import StageMap


@dataclass(frozen=True)
class Plan:
    """The plan of a run, which every rank has alike: mesh, stages, schedule and micro-batches.

    ``trainable[s]`` says whether stage s has trained weights. A step has ``rows`` sequences on each
    replica, in micro-batches of ``micro_batch_size``, the last one taking what is left; with
    ``pack`` each micro-batch is one row, of about as many tokens as the others. ``model``
    identifies the model's configuration. Raises ``UserError`` if the schedule cannot run so.
    """

    mesh: Mesh
    stage_map: StageMap
    schedule: str
    rows: int
    micro_batch_size: int
    trainable: tuple[bool, ...]
    model: str = ""
    pack: bool = False

    def __post_init__(self) -> None:
        if len(self.trainable) != self.stage_map.num_stages:
            raise ValueError(f"{len(self.trainable)} flags for {self.stage_map.num_stages} stages")
        if self.mesh.pp != self.stage_map.pp:
            raise ValueError(f"{self.mesh.pp} pipeline ranks, {self.stage_map.pp} in the map")
        validate(self.actions, self.stage_map.placement, self.trainable)

    @property
    def microbatches(self) -> int:
        """Number of micro-batches of one replica in one step."""
        return -(-self.rows // self.micro_batch_size)

    @cached_property
    def actions(self) -> Grid:
        """Lowered actions of one training step, by pipeline rank."""
        virtual = self.stage_map.virtual
        schedule = get_schedule(self.schedule)
        grid = compute_actions(self.schedule, self.mesh.pp, self.microbatches, virtual)
        order = _rank_order(self.stage_map, schedule.placement(self.mesh.pp, virtual), schedule)
        placed = tuple(grid[order.index(rank)] for rank in range(self.mesh.pp))
        return lower(placed, self.stage_map.placement, self.trainable)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a world rank runs, ascending."""
        _, pipeline_rank = self.mesh.coordinates(rank)
        return self.stage_map.stages_of(pipeline_rank)

    @property
    def digest(self) -> str:
        """Digest that is equal on two ranks if and only if they plan the same run."""
        stages = (self.stage_map.partition.ranges, self.stage_map.placement)
        rows = (self.rows, self.micro_batch_size, self.pack)
        return json_digest([asdict(self.mesh), stages, rows, self.actions, self.model])


def suits(stage_map: StageMap, schedule: Schedule) -> bool:
    """Return whether a schedule can run a map's stages where the map puts them."""
    virtual = stage_map.virtual
    if schedule.virtual_choices and virtual not in schedule.virtual_choices:
        return False
    try:
        _rank_order(stage_map, schedule.placement(stage_map.pp, virtual), schedule)
    except UserError:
        return False
    return True


def _rank_order(
    stage_map: StageMap, placement: Sequence[int], schedule: Schedule
) -> tuple[int, ...]:
    """Return the pipeline rank for each rank of the schedule; a map may number them freely."""
    order: dict[int, int] = {}
    for stage, (ours, theirs) in enumerate(zip(stage_map.placement, placement, strict=True)):
        if order.setdefault(theirs, ours) != ours:
            raise UserError(
                f"{stage_map} puts stage {stage} on rank {ours}, but the schedule "
                f"{schedule.name} wants its stages on ranks {', '.join(map(str, placement))}"
            )
    return tuple(order[rank] for rank in range(len(order)))
