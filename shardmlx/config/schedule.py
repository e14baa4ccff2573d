"""The command ``shardmlx schedule`` and its options. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardmlx.config.command_line import CommandLine
from shardmlx.config.common_options import SIMPLEST
from shardmlx.config.options import REQUIRED, check_options, in_group, refuse
from shardmlx.pipeline.report import PRINTED, show_schedule
from shardmlx.pipeline.schedules import SCHEDULES

_schedule = in_group("schedule")
_output = in_group("output")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
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
    json: bool = _output(False, "print makespan, bubble and peak in flight as JSON")
    draw: str | None = _output(None, "draw it as a picture, .svg or .png", metavar="FILE")

    def __post_init__(self) -> None:
        check_options(self)
        both = self.json and self.print != PRINTED[0]
        refuse("print", f"is {self.print} with --json", "leave one out", when=both)


LINE = CommandLine(
    options=ScheduleOptions,
    command="schedule",
    description="Show what a pipeline schedule does: its actions, drawn in time, and its costs.",
)


def run(words: Sequence[str]) -> int:
    """Print the schedule as the words say; return 0. Raises ``UserError``."""
    options = LINE.load(words)
    print(
        show_schedule(
            options.schedule,
            options.pipeline_stages,
            options.micro_batches,
            virtual=options.virtual_stages,
            costs=options.costs,
            draw=options.draw,
            form="json" if options.json else options.print,
        )
    )
    return 0
