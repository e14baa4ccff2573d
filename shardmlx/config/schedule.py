"""The command ``shardmlx schedule`` and its options. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardmlx.common.json_output import JsonOutput
from shardmlx.config import common_options as common
from shardmlx.config.command_line import CommandLine
from shardmlx.config.common_options import SIMPLEST
from shardmlx.config.options import REQUIRED, Options, in_group
from shardmlx.errors import UserError
from shardmlx.pipeline.actions import Grid
from shardmlx.pipeline.figure import timeline
from shardmlx.pipeline.lowering import lower, validate
from shardmlx.pipeline.schedules import SCHEDULES, compute_actions, get_schedule
from shardmlx.pipeline.simulate import Costs, Simulation, simulate

PRINTED = ("summary", "actions", "timeline", "lowered")
"""Forms of what is printed: a summary, compute actions, drawn in time, with messages."""

_schedule = in_group("schedule")
_output = in_group("output")


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(Options):
    """The schedule to show, and how. Raises ``OptionError``, a ``UserError``."""

    pipeline_stages: int = _schedule(REQUIRED, "ranks of the pipeline")
    micro_batches: int = _schedule(REQUIRED, "micro-batches of a step")
    schedule: str = _schedule(
        SIMPLEST, "order of forward and backward", metavar="{" + ",".join(SCHEDULES) + "}"
    )
    virtual_stages: int | None = _schedule(None, "stages a rank", unset="the schedule's own")
    costs: str = _schedule(
        "1,1,1", "time of forward, input gradient, weight gradient", metavar="F,I,W"
    )

    print: str = _output(
        PRINTED[0],
        "actions: compute only; timeline: drawn in time; lowered: with messages",
        choices=PRINTED,
    )
    json: str | None = common.json(group="output")


LINE = CommandLine(
    options=ScheduleOptions,
    command="schedule",
    description="Show what a pipeline schedule does: its actions, drawn in time, and its costs.",
)


def run(words: Sequence[str]) -> int:
    """Print the schedule as the words say; return 0. Raises ``UserError``."""
    options = LINE.load(words)
    schedule = get_schedule(options.schedule)
    pp = options.pipeline_stages
    microbatches = options.micro_batches
    virtual = options.virtual_stages
    if virtual is None:
        virtual = schedule.default_virtual
    grid = compute_actions(schedule.name, pp, microbatches, virtual)
    placement = schedule.placement(pp, virtual)
    lowered = lower(grid, placement)
    validate(lowered, placement)
    costs = _costs(options.costs)
    simulation = simulate(grid, placement, costs)
    with JsonOutput(options.json, LINE.command) as output:
        if options.print == "summary":
            print(_summary(simulation))
        elif options.print == "timeline":
            print(timeline(simulation))
        else:
            for rank, actions in enumerate(lowered if options.print == "lowered" else grid):
                print(" ".join([f"r{rank}", *map(str, actions)]))
        found = {
            "schedule": schedule.name,
            "pipeline_stages": pp,
            "micro_batches": microbatches,
            "virtual_stages": virtual,
            "placement": placement,
            "costs": costs,
            "actions": _names(grid),
            "lowered": _names(lowered),
            "makespan": simulation.makespan,
            "bubble": simulation.bubble,
            "bubbles": simulation.bubbles,
            "busy": simulation.busy,
            "exposed": simulation.exposed,
            "peak_in_flight": simulation.peak_in_flight,
            "spans": simulation.written_spans,
        }
        output.write(found)
    return 0


def _names(grid: Grid) -> list[list[str]]:
    return [[str(action) for action in actions] for actions in grid]


def _costs(text: str) -> Costs:
    try:
        forward, input_gradient, weight_gradient = map(float, text.split(","))
    except ValueError:
        raise UserError(f"costs {text!r}", "give three numbers F,I,W, like 1,1,1") from None
    return Costs(forward, input_gradient, weight_gradient)


def _summary(simulation: Simulation) -> str:
    peaks = simulation.peak_in_flight
    return (
        f"makespan        {simulation.makespan:g}\n"
        f"bubble          {simulation.bubble:.1%}\n"
        f"peak in flight  {' '.join(map(str, peaks))}  (stage-micro-batches, ranks 0 to "
        f"{len(peaks) - 1})\n\n{timeline(simulation)}"
    )
