"""Plan a run: the actions of every rank in a step. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from shardmlx.errors import UserError
from shardmlx.pipeline.actions import FORWARD, Grid
from shardmlx.pipeline.lowering import lower, validate
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.schedules import Schedule, compute_actions, get_schedule
from shardmlx.pipeline.stage_map import StageMap


@dataclass(frozen=True)
class Plan:
    """The plan of a run, equal on every rank: mesh, stages, schedule and micro-batches.

    ``trainable[s]`` says whether stage s has trained weights. A step has ``rows`` sequences on each
    replica, in micro-batches of ``micro_batch_rows``, the last one taking the rest; with ``pack``
    each micro-batch is one row, of about equal length. Each ``together`` rows stay in one
    micro-batch. If replicas have unequal rows, ``replica_rows`` are each one's, and ``rows`` the
    most. Micro-batches are padded to one of the ``widths``, if there are any. ``runs`` that train
    side by side have these micro-batches each.
    Raises ``UserError`` if the schedule cannot run so.
    """

    mesh: Mesh
    stage_map: StageMap
    schedule: str
    rows: int
    micro_batch_rows: int
    trainable: tuple[bool, ...]
    pack: bool = False
    replica_rows: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    together: int = 1
    runs: int = 1

    def __post_init__(self) -> None:
        if len(self.trainable) != self.stage_map.num_stages:
            raise ValueError(f"{len(self.trainable)} flags for {self.stage_map.num_stages} stages")
        if self.mesh.pp != self.stage_map.pp:
            raise ValueError(f"{self.mesh.pp} pipeline ranks, {self.stage_map.pp} in the map")
        if len(self.shares) != self.mesh.dp or max(self.shares) != self.rows:
            raise ValueError(f"{self.shares} rows for {self.mesh.dp} replicas, {self.rows} at most")
        if any(each % self.together for each in (self.micro_batch_rows, *self.shares)):
            raise ValueError(f"{self.micro_batch_rows} rows of {self.shares}: not {self.together}s")
        schedule, virtual = get_schedule(self.schedule), self.stage_map.virtual
        for count in {self.microbatches_of(replica) for replica in range(self.mesh.dp)}:
            schedule.check(self.mesh.pp, count, virtual)
        _rank_order(self.stage_map, schedule.placement(self.mesh.pp, virtual), schedule)

    @property
    def microbatches(self) -> int:
        """Number of micro-batches of the busiest replica in one step."""
        return -(-self.rows // self.micro_batch_rows)

    def grid(self, microbatches: int) -> Grid:
        """Return the lowered actions of a step of so many micro-batches, by pipeline rank, which
        are proved to end. Raises ``UserError`` if the schedule cannot run so many."""
        return self._by_rank(_proved_grid, microbatches)

    def computing(self, microbatches: int) -> Grid:
        """Return what ``grid`` does without messages and a proof, for a simulation of a plan among
        many."""
        return self._by_rank(_computing_grid, microbatches)

    def _by_rank(self, grid_of: Callable[..., Grid], microbatches: int) -> Grid:
        schedule, virtual = get_schedule(self.schedule), self.stage_map.virtual
        order = _rank_order(self.stage_map, schedule.placement(self.mesh.pp, virtual), schedule)
        grid = grid_of(self.schedule, self.mesh.pp, virtual, self.trainable, microbatches)
        return tuple(grid[order.index(rank)] for rank in range(self.mesh.pp))

    @property
    def actions(self) -> Grid:
        """Lowered actions of a training step of the busiest replica, by pipeline rank."""
        return self.grid(self.runs * self.microbatches)

    @property
    def unproved_actions(self) -> Grid:
        """The ``actions`` without a proof, for the memory of a plan among many."""
        return self._by_rank(_lowered_grid, self.runs * self.microbatches)

    def prove(self) -> None:
        """Raise ``ScheduleError`` unless its order of actions ends, in the shortest step alike."""
        plan = self.shortest_alike
        plan.grid(plan.microbatches)

    @property
    def shares(self) -> tuple[int, ...]:
        """Rows of each replica."""
        return self.replica_rows or (self.rows,) * self.mesh.dp

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First row of each replica in the global batch, and at the end the rows of all."""
        return tuple(accumulate(self.shares, initial=0))

    def microbatches_of(self, replica: int) -> int:
        """Return the number of micro-batches of a replica in one step."""
        return -(-self.shares[replica] // self.micro_batch_rows)

    @property
    def shortest_alike(self) -> Plan:
        """The plan of a step of as few micro-batches, of as few rows and layers, as take a rank of
        one replica through all that it holds at a time in this step: one for all plans with these
        actions."""
        schedule = get_schedule(self.schedule)
        count = schedule.fewest_alike(self.mesh.pp, self.runs * self.microbatches)
        stages = StageMap.from_sizes([1] * self.stage_map.num_stages, self.stage_map.placement)
        return replace(
            self,
            mesh=Mesh(1, self.mesh.pp),
            stage_map=stages,
            rows=count * self.together,
            micro_batch_rows=self.together,
            pack=False,
            replica_rows=(),
            widths=(),
            runs=1,
        )

    def forwards(self, microbatches: int) -> Grid:
        """Return the lowered actions of a training step that evaluation takes, too."""
        return tuple(
            tuple(action for action in actions if action.kind in FORWARD)
            for actions in self.grid(microbatches)
        )

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a world rank runs, ascending."""
        _, pipeline_rank = self.mesh.coordinates(rank)
        return self.stage_map.stages_of(pipeline_rank)


@lru_cache(maxsize=128)
def _lowered_grid(
    schedule: str, pp: int, virtual: int, trainable: tuple[bool, ...], microbatches: int
) -> Grid:
    """Return lowered actions by the ranks of the schedule: stage maps that number these otherwise
    share them."""
    grid = compute_actions(schedule, pp, microbatches, virtual)
    return lower(grid, get_schedule(schedule).placement(pp, virtual), trainable)


@lru_cache(maxsize=64)
def _computing_grid(
    schedule: str, pp: int, virtual: int, trainable: tuple[bool, ...], microbatches: int
) -> Grid:
    """Return lowered actions without messages: as if all stages were on one rank."""
    grid = compute_actions(schedule, pp, microbatches, virtual)
    return lower(grid, [0] * len(trainable), trainable)


@lru_cache(maxsize=64)
def _proved_grid(
    schedule: str, pp: int, virtual: int, trainable: tuple[bool, ...], microbatches: int
) -> Grid:
    """Return lowered actions that cannot deadlock, by the ranks of the schedule."""
    lowered = _lowered_grid(schedule, pp, virtual, trainable, microbatches)
    validate(lowered, get_schedule(schedule).placement(pp, virtual), trainable)
    return lowered


def suits(stage_map: StageMap, schedule: Schedule) -> bool:
    """Return whether a schedule can run a map's stages in their places."""
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
