"""The commands of ``shardmlx``, by what one wants to do. No MLX, no MPI."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardmlx.config.command_line import CommandLine

TRAIN = "Train"
USE = "Use a model"
PREPARE = "Look before you run"
START = "Start ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command: ``shardmlx NAME``, or ``python -m shardmlx.NAME``.

    ``options`` is the module whose ``LINE`` is its command line, by default
    ``config.NAME``, ``run`` the function that carries
    it out, as ``module:function``; both are imported where they are needed. A command that
    ``needs_ranks`` can be launched: its ``run`` takes options, transport and BLAS. Another takes
    the words of the command line, and returns the exit status.

    ``without_ranks`` is a function that takes the words first, and returns the exit status, or None
    where ranks do the work. Ranks need not be ``alike`` in their versions where it is False.
    """

    name: str
    group: str
    help: str
    run: str
    options: str = ""
    needs_ranks: bool = False
    without_ranks: str | None = None
    alike: bool = True

    @property
    def line(self) -> CommandLine[Any]:
        """The command line."""
        module = self.options or f"config.{self.name}"
        line: CommandLine[Any] = importlib.import_module(f"shardmlx.{module}").LINE
        return line


def imported(name: str) -> Callable[..., Any]:
    """Return the function that ``module:function`` names."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"shardmlx.{module}"), function)
    return found


COMMANDS = (
    Command(
        name="train",
        group=TRAIN,
        help="fine-tune a model, with the options of mlx_lm.lora",
        run="training.command:run",
        needs_ranks=True,
    ),
    Command(
        name="report",
        group=TRAIN,
        help="show a run from its metrics, as a page",
        run="runreport.page:run",
    ),
    Command(
        name="export",
        group=TRAIN,
        help="write the finished model: fused, converted, quantised",
        run="conversion.command:run",
        needs_ranks=True,
    ),
    Command(
        name="generate",
        group=USE,
        help="answer a prompt, or a file of prompts",
        run="inference.generate:run",
        needs_ranks=True,
    ),
    Command(
        name="chat",
        group=USE,
        help="talk with a model in the terminal",
        run="inference.chat:run",
        needs_ranks=True,
    ),
    Command(
        name="serve",
        group=USE,
        help="serve OpenAI's API over HTTP, and a chat page",
        run="server.run:run",
        needs_ranks=True,
    ),
    Command(
        name="evaluate",
        group=USE,
        help="measure a model: perplexity of texts, or lm-eval tasks",
        run="evaluation.command:run",
        needs_ranks=True,
    ),
    Command(
        name="inspect",
        group=PREPARE,
        help="show what a model consists of, and what each rank needs of it",
        run="planning.inspection:run",
    ),
    Command(
        name="plan",
        group=PREPARE,
        help="divide a model over given machines; predict memory and time",
        options="planning.plan_command",
        run="planning.plan_command:run",
    ),
    Command(
        name="schedule",
        group=PREPARE,
        help="draw what a pipeline schedule does, and count its bubble",
        run="config.schedule:run",
    ),
    Command(
        name="doctor",
        group=PREPARE,
        help="examine machines and the links between them",
        run="hosts.doctor_mpi:run",
        needs_ranks=True,
        without_ranks="hosts.doctor_ssh:run",
        alike=False,
    ),
    Command(
        name="profile",
        group=PREPARE,
        help="measure the layers of a model on each machine, for plan",
        run="training.profiling:run",
        needs_ranks=True,
    ),
    Command(
        name="launch",
        group=START,
        help="run any of these on ranks: launch -n 2 train, --hostfile F train",
        run="hosts.launcher:run",
    ),
)
"""Commands in the order of the first screen of help."""

BY_NAME = {command.name: command for command in COMMANDS}

OF_RANKS = tuple(command.name for command in COMMANDS if command.needs_ranks)
"""The commands that ``shardmlx launch`` starts."""
