"""The commands of ``shardmlx``, by what one wants to do. No MLX, no MPI."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardmlx.config.command_line import CommandLine

TRAIN = "Train"
USE = "Use a model"
PREPARE = "Look before you run"
START = "Start ranks"


@dataclass(frozen=True, slots=True)
class Command:
    """A command: ``shardmlx NAME``, or ``python -m shardmlx.NAME``.

    ``options`` is its command line, and ``run`` the function that carries it out, as
    ``module:name`` each, imported where they are needed. A command that ``needs_ranks`` can be
    launched: its ``run`` takes options, transport and BLAS. Another takes the words of the command
    line, and returns the exit status.

    ``without_ranks`` is a function that takes the words first, and returns the exit status, or None
    where ranks do the work. Ranks need not be ``alike`` in their versions where it is False.
    """

    name: str
    group: str
    help: str
    options: str
    run: str
    needs_ranks: bool = False
    without_ranks: str | None = None
    alike: bool = True

    @property
    def line(self) -> CommandLine[Any]:
        """The command line."""
        line: CommandLine[Any] = imported(self.options)
        return line


def imported(name: str) -> Any:
    """Return what ``module:name`` names."""
    module, _, inside = name.partition(":")
    return getattr(importlib.import_module(f"shardmlx.{module}"), inside)


COMMANDS = (
    Command(
        "train",
        TRAIN,
        "fine-tune a model, with the options of mlx_lm.lora",
        "config.train:LINE",
        "training.command:run",
        needs_ranks=True,
    ),
    Command(
        "report",
        TRAIN,
        "show a run from its metrics, as a page",
        "runreport.page:LINE",
        "runreport.page:run",
    ),
    Command(
        "export",
        TRAIN,
        "write the finished model: fused, converted, quantised",
        "config.export:LINE",
        "conversion.command:run",
        needs_ranks=True,
    ),
    Command(
        "generate",
        USE,
        "answer a prompt, or a file of prompts",
        "config.inference:GENERATE",
        "inference.generate:run",
        needs_ranks=True,
    ),
    Command(
        "chat",
        USE,
        "talk with a model in the terminal",
        "config.inference:CHAT",
        "inference.chat:run",
        needs_ranks=True,
    ),
    Command(
        "serve",
        USE,
        "serve OpenAI's API over HTTP, and a chat page",
        "config.serve:LINE",
        "server.run:run",
        needs_ranks=True,
    ),
    Command(
        "evaluate",
        USE,
        "measure a model: perplexity of texts, or lm-eval tasks",
        "config.inference:EVALUATE",
        "evaluation.command:run",
        needs_ranks=True,
    ),
    Command(
        "inspect",
        PREPARE,
        "show what a model consists of, and what each rank needs of it",
        "planning.inspection:LINE",
        "planning.inspection:run",
    ),
    Command(
        "plan",
        PREPARE,
        "divide a model over given machines; predict memory and time",
        "planning.plan_command:LINE",
        "planning.plan_command:run",
    ),
    Command(
        "schedule",
        PREPARE,
        "draw what a pipeline schedule does, and count its bubble",
        "config.schedule:LINE",
        "config.schedule:run",
    ),
    Command(
        "doctor",
        PREPARE,
        "examine machines and the links between them",
        "config.doctor:LINE",
        "hosts.doctor_mpi:run",
        needs_ranks=True,
        without_ranks="hosts.doctor_ssh:run",
        alike=False,
    ),
    Command(
        "profile",
        PREPARE,
        "measure the layers of a model on each machine, for plan",
        "config.profile:LINE",
        "training.profiling:run",
        needs_ranks=True,
    ),
    Command(
        "launch",
        START,
        "run any of these on ranks: launch -n 2 train, --hostfile F train",
        "hosts.launch_options:LINE",
        "hosts.launcher:run",
    ),
)
"""Commands in the order of the first screen of help."""

BY_NAME = {command.name: command for command in COMMANDS}

OF_RANKS = tuple(command.name for command in COMMANDS if command.needs_ranks)
"""The commands that ``shardmlx launch`` starts."""
