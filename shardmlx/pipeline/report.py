"""Report what a schedule does on a pipeline: its actions, drawn in time, and what it costs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from shardmlx.common.cli import OneLineParser
from shardmlx.errors import UserError
from shardmlx.pipeline.actions import Grid
from shardmlx.pipeline.figure import check_picture, draw_schedule
from shardmlx.pipeline.lowering import lower, validate
from shardmlx.pipeline.schedules import SCHEDULES, compute_actions, get_schedule
from shardmlx.pipeline.simulate import Costs, Simulation, simulate
from shardmlx.pipeline.text_timeline import timeline


def show_schedule(argv: Sequence[str]) -> str:
    """Return the report that the flags ask for. Raises ``UserError`` for bad flags."""
    return _report(_parser().parse_args(argv))


def _costs(text: str) -> Costs:
    try:
        forward, input_gradient, weight_gradient = map(float, text.split(","))
    except ValueError:
        raise UserError(f"costs {text!r}", "give three numbers F,I,W, like 1,1,1") from None
    return Costs(forward, input_gradient, weight_gradient)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m shardmlx.plan",
        usage="%(prog)s MODEL --hosts HOSTFILE ... | --pipeline-stages P --micro-batches M ...",
        description="Show what a pipeline schedule does. With a MODEL first: plan its training "
        "(see python -m shardmlx.plan MODEL --help).",
        allow_abbrev=False,
    )
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
    parser.add_argument("--draw", metavar="FILE", help="draw it as a picture, .svg or .png")
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
    if arguments.draw:
        check_picture(Path(arguments.draw))
    pp, microbatches = arguments.pipeline_stages, arguments.micro_batches
    virtual = arguments.virtual_stages
    if virtual is None:
        virtual = schedule.default_virtual
    costs = _costs(arguments.costs)
    grid = compute_actions(schedule.name, pp, microbatches, virtual)
    placement = schedule.placement(pp, virtual)
    lowered = lower(grid, placement)
    validate(lowered, placement)
    simulation = simulate(grid, placement, costs)
    if arguments.draw:
        title = f"{schedule.name}, {pp} ranks, {microbatches} micro-batches"
        draw_schedule(simulation, Path(arguments.draw), title=title, unit="units of time")
    if arguments.print == "actions":
        return _rows(grid)
    if arguments.print == "lowered":
        return _rows(lowered)
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
