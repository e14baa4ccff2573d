"""The commands of ``shardmlx``, by what one wants to do. No MLX, no MPI."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial
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

    ``options`` is the module of its command line ``LINE``, or ``module:name``, and ``run`` that of
    the function ``run``: each is imported where it is needed. A command that ``needs_ranks`` can be
    launched: its ``run`` takes options, transport and BLAS. Another takes the words of the command
    line, and returns the exit status.

    ``without_ranks`` is a module whose ``run`` takes the words first, and returns the exit status,
    or None where ranks do the work. Ranks that need not be ``alike`` may differ in versions. One
    process may run ``alone``, whatever ranks and machines the options name.
    """

    name: str
    group: str
    help: str
    options: str
    run: str
    needs_ranks: bool = False
    without_ranks: str | None = None
    alike: bool = True
    alone: bool = False

    @property
    def line(self) -> CommandLine[Any]:
        """The command line."""
        module, _, name = self.options.partition(":")
        line: CommandLine[Any] = imported(module, name or "LINE")
        return line


def imported(module: str, name: str = "run") -> Any:
    """Return what a module of shardmlx has by this name."""
    return getattr(importlib.import_module(f"shardmlx.{module}"), name)


_of_ranks = partial(Command, needs_ranks=True)

COMMANDS = (
    _of_ranks(
        "train", TRAIN, "fine-tune a model, as mlx_lm.lora does", "config.train", "training.command"
    ),
    Command(
        "report",
        TRAIN,
        "show a run from its metrics, as a page",
        "runreport.page",
        "runreport.page",
    ),
    _of_ranks(
        *("export", TRAIN, "write the finished model: fused, converted, quantised"),
        *("config.export", "conversion.command"),
    ),
    _of_ranks(
        *("generate", USE, "answer a prompt, or a file of prompts"),
        *("config.inference:GENERATE", "inference.generate"),
    ),
    _of_ranks(
        *("chat", USE, "talk with a model in the terminal"),
        *("config.inference:CHAT", "inference.chat"),
    ),
    _of_ranks(
        "serve", USE, "serve OpenAI's API over HTTP, and a chat page", "config.serve", "server.run"
    ),
    _of_ranks(
        *("evaluate", USE, "measure a model: perplexity of texts, or lm-eval tasks"),
        *("config.inference:EVALUATE", "evaluation.command"),
    ),
    Command(
        *("inspect", PREPARE, "show what a model consists of, and what each rank needs of it"),
        *("planning.inspection", "planning.inspection"),
    ),
    Command(
        *("plan", PREPARE, "divide a model over given machines; predict memory and time"),
        *("planning.plan_command", "planning.plan_command"),
    ),
    Command(
        *("schedule", PREPARE, "draw what a pipeline schedule does, and count its bubble"),
        *("config.schedule", "config.schedule"),
    ),
    _of_ranks(
        *("doctor", PREPARE, "examine machines and the links between them"),
        *("config.doctor", "hosts.doctor_mpi"),
        without_ranks="hosts.doctor_ssh",
        alike=False,
        alone=True,
    ),
    _of_ranks(
        *("profile", PREPARE, "measure the layers of a model on each machine, for plan"),
        *("config.profile", "training.profiling"),
        alone=True,
    ),
    Command(
        *("launch", START, "run any of these on ranks: launch -n 2 train, --hostfile F train"),
        *("hosts.launch_options", "hosts.launcher"),
    ),
)
"""Commands in the order of the first screen of help."""

BY_NAME = {command.name: command for command in COMMANDS}

OF_RANKS = tuple(command.name for command in COMMANDS if command.needs_ranks)
"""The commands that ``shardmlx launch`` starts."""
