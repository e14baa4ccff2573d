"""The plan of a run, and ``python -m shardmlx.plan``: what a schedule does. No MLX, no MPI."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from typing import NoReturn

from shardmlx.actions import Grid
from shardmlx.draw import timeline
from shardmlx.errors import UserError
from shardmlx.lowering import lower, validate
from shardmlx.mesh import Mesh
from shardmlx.schedules import SCHEDULES, Schedule, compute_actions, get_schedule
from shardmlx.simulate import Costs, Simulation, simulate
from shardmlx.stage_map import StageMap


@dataclass(frozen=True)
class Plan:
    """What every rank must know of a run to play its part; the same on all ranks.

    ``trainable[s]`` says whether stage s has trained weights; ``microbatches`` and
    ``micro_batch_size`` divide the rows of one replica, the last micro-batch taking what is left;
    ``model`` identifies the model's configuration. Raises ``UserError``.
    """

    mesh: Mesh
    stage_map: StageMap
    schedule: str
    rows: int
    micro_batch_size: int
    trainable: tuple[bool, ...]
    model: str = ""

    def __post_init__(self) -> None:
        if len(self.trainable) != self.stage_map.num_stages:
            raise ValueError(f"{len(self.trainable)} flags for {self.stage_map.num_stages} stages")
        if self.mesh.pp != self.stage_map.pp:
            raise ValueError(f"{self.mesh.pp} pipeline ranks, {self.stage_map.pp} in the map")
        validate(self.actions, self.stage_map.placement, self.trainable)

    @property
    def microbatches(self) -> int:
        """Micro-batches of one replica in one step."""
        return -(-self.rows // self.micro_batch_size)

    @cached_property
    def actions(self) -> Grid:
        """The lowered actions of one training step, by pipeline rank."""
        virtual = self.stage_map.virtual
        schedule = get_schedule(self.schedule)
        grid = compute_actions(self.schedule, self.mesh.pp, self.microbatches, virtual)
        order = _rank_order(self.stage_map, schedule.placement(self.mesh.pp, virtual), schedule)
        placed = tuple(grid[order.index(rank)] for rank in range(self.mesh.pp))
        return lower(placed, self.stage_map.placement, self.trainable)

    @property
    def digest(self) -> str:
        """Equal on two ranks if and only if they plan the same run."""
        stages = (self.stage_map.partition.ranges, self.stage_map.placement)
        actions = [[str(action) for action in rank] for rank in self.actions]
        text = json.dumps(
            [asdict(self.mesh), stages, self.rows, self.micro_batch_size, actions, self.model]
        )
        return hashlib.sha256(text.encode()).hexdigest()


def _rank_order(
    stage_map: StageMap, placement: Sequence[int], schedule: Schedule
) -> tuple[int, ...]:
    """The pipeline rank that plays each rank of the schedule; the map may number them freely."""
    order: dict[int, int] = {}
    for stage, (ours, theirs) in enumerate(zip(stage_map.placement, placement, strict=True)):
        if order.setdefault(theirs, ours) != ours:
            raise UserError(
                f"{stage_map} puts stage {stage} on rank {ours}, but the schedule "
                f"{schedule.name} wants its stages on ranks {', '.join(map(str, placement))}"
            )
    return tuple(order[rank] for rank in range(len(order)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def _costs(text: str) -> Costs:
    try:
        forward, input_gradient, weight_gradient = map(float, text.split(","))
    except ValueError:
        raise UserError(f"costs {text!r}: give three numbers F,I,W, like 1,1,1") from None
    return Costs(forward, input_gradient, weight_gradient)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="shardmlx.plan", description="Show what a pipeline schedule does.")
    parser.add_argument("--schedule", default="1f1b", help=f"one of {', '.join(SCHEDULES)}")
    parser.add_argument(
        "--pipeline-stages", type=int, required=True, metavar="P", help="ranks of the pipeline"
    )
    parser.add_argument(
        "--micro-batches", type=int, required=True, metavar="M", help="micro-batches of a step"
    )
    parser.add_argument(
        "--virtual-stages", type=int, metavar="V", help="stages a rank (default: the schedule's)"
    )
    parser.add_argument(
        "--costs",
        default="1,1,1",
        metavar="F,I,W",
        help="time of one micro-batch on one rank: forward, input gradient, weight gradient",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--print",
        choices=("actions", "timeline", "lowered"),
        help="actions: compute only; timeline: drawn in time; lowered: with messages",
    )
    output.add_argument("--json", action="store_true", help="makespan, bubble, peak in flight")
    return parser


def _rows(grid: Grid) -> str:
    return "\n".join(
        " ".join([f"r{rank}", *map(str, actions)]) for rank, actions in enumerate(grid)
    )


def _summary(simulation: Simulation) -> str:
    peaks = simulation.peak_in_flight
    return "\n".join(
        [
            f"makespan        {simulation.makespan:g}",
            f"bubble          {simulation.bubble:.1%}",
            f"peak in flight  {' '.join(map(str, peaks))}  (stage-micro-batches, ranks 0 to "
            f"{len(peaks) - 1})",
            "",
            timeline(simulation),
        ]
    )


def _report(arguments: argparse.Namespace) -> str:
    schedule = get_schedule(arguments.schedule)
    pp, microbatches = arguments.pipeline_stages, arguments.micro_batches
    virtual = arguments.virtual_stages
    if virtual is None:
        virtual = schedule.default_virtual
    costs = _costs(arguments.costs)
    grid = compute_actions(schedule.name, pp, microbatches, virtual)
    placement = schedule.placement(pp, virtual)
    lowered = lower(grid, placement)
    validate(lowered, placement)
    if arguments.print == "actions":
        return _rows(grid)
    if arguments.print == "lowered":
        return _rows(lowered)
    simulation = simulate(grid, placement, costs)
    if arguments.print == "timeline":
        return timeline(simulation)
    if not arguments.json:
        return _summary(simulation)
    return json.dumps(
        {
            "schedule": schedule.name,
            "pp": pp,
            "microbatches": microbatches,
            "virtual": virtual,
            "costs": astuple(costs),
            "makespan": simulation.makespan,
            "bubble_fraction": simulation.bubble,
            "bubble_fraction_of_ranks": simulation.bubbles,
            "peak_in_flight": simulation.peak_in_flight,
        }
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 2 and one line on stderr for bad input."""
    try:
        print(_report(_parser().parse_args(argv)))
    except UserError as error:
        print(f"shardmlx: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
