"""The commands of ``shardmlx``, by what one wants to do. No MLX, no MPI."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial
from typing import Any

TRAIN = "Train"
USE = "Use a model"
PREPARE = "Look before you run, and start"


@dataclass(frozen=True, slots=True)
class Command:
    """A command: ``shardmlx NAME``, or ``python -m shardmlx.NAME``.

    ``options`` is the module of its command line ``LINE``, or ``module:name``, and ``run`` that of
    the function ``run``: each is imported where it is needed. ``examples`` end its help. A command
    that ``needs_ranks`` can be launched: its ``run`` takes options, transport and BLAS. Another
    takes the words of the command line, and returns the exit status.

    ``without_ranks`` is a module whose ``run`` takes the words first, and returns the exit status,
    or None where ranks do the work. Ranks that need not be ``alike`` may differ in versions. One
    process may run ``alone``, whatever ranks and machines the options name.
    """

    name: str
    group: str
    help: str
    options: str
    run: str
    examples: tuple[str, str]
    needs_ranks: bool = False
    without_ranks: str | None = None
    alike: bool = True
    alone: bool = False

    @property
    def line(self) -> Any:
        """The command line, a ``CommandLine``, whose module imports this one."""
        module, _, name = self.options.partition(":")
        return imported(module, name or "LINE")


def imported(module: str, name: str = "run") -> Any:
    """Return what a module of shardmlx has by this name."""
    return getattr(importlib.import_module(f"shardmlx.{module}"), name)


_of_ranks = partial(Command, needs_ranks=True)

COMMANDS = (
    _of_ranks(
        *("train", TRAIN, "fine-tune a model, as mlx_lm.lora does"),
        *("config.train", "training.command"),
        examples=(
            "shardmlx train --model Qwen/Qwen3-0.6B --data my-data --iters 100",
            "shardmlx launch --hostfile hosts train --config lora.yaml --dry-run",
        ),
    ),
    Command(
        *("report", TRAIN, "show a run from its metrics, as a page"),
        *("runreport.page", "runreport.page"),
        examples=(
            "shardmlx report metrics.jsonl",
            "shardmlx report metrics.jsonl --output run.html",
        ),
    ),
    Command(
        *("hub", TRAIN, "exchange weights among islands, which train alone for some steps"),
        *("islands.hub_options", "islands.hub"),
        examples=(
            "shardmlx hub --path lab --islands ann,ben --host 0.0.0.0",
            "shardmlx hub --path lab --write adapters",
        ),
    ),
    Command(
        *("export", TRAIN, "write the finished model: fused, converted, quantised"),
        *("config.export", "conversion.command"),
        examples=(
            "shardmlx export Qwen/Qwen3-0.6B --adapter-path adapters --output-dir fused",
            "shardmlx export fused --quantize 4 --output-dir fused-4bit",
        ),
    ),
    _of_ranks(
        *("generate", USE, "answer a prompt, or a file of prompts"),
        *("config.inference:GENERATE", "inference.generate"),
        examples=(
            "shardmlx generate --model fused --prompt 'Where is Tortuga?'",
            "shardmlx launch --hostfile hosts generate --model fused --prompts prompts.jsonl",
        ),
    ),
    _of_ranks(
        *("chat", USE, "talk with a model in the terminal"),
        *("config.inference:CHAT", "inference.chat"),
        examples=(
            "shardmlx chat --model Qwen/Qwen3-0.6B --adapter-path adapters",
            "shardmlx launch --hostfile hosts chat --model fused",
        ),
    ),
    _of_ranks(
        *("serve", USE, "serve OpenAI's API over HTTP, and a chat page"),
        *("config.serve", "server.run"),
        examples=(
            "shardmlx serve --model fused --port 8080",
            "shardmlx launch --hostfile hosts serve --model fused --host 0.0.0.0",
        ),
    ),
    _of_ranks(
        *("evaluate", USE, "measure a model: perplexity of texts, or lm-eval tasks"),
        *("config.inference:EVALUATE", "evaluation.command"),
        examples=(
            "shardmlx evaluate --model fused --data my-data",
            "shardmlx launch -n 2 evaluate --model fused --tasks arc_easy --limit 100",
        ),
    ),
    Command(
        *("inspect", PREPARE, "show what a model consists of, and what each rank needs of it"),
        *("planning.inspection", "planning.inspection"),
        examples=(
            "shardmlx inspect Qwen/Qwen3-0.6B",
            "shardmlx inspect fused --hostfile hosts --context 8192",
        ),
    ),
    Command(
        *("plan", PREPARE, "divide a model over given machines; predict memory and time"),
        *("planning.plan_command", "planning.plan_command"),
        examples=(
            "shardmlx plan Qwen/Qwen3-0.6B --machines 'M2 16GB, M1 Ultra 64GB'",
            "shardmlx plan fused --hostfile hosts --max-of seq",
        ),
    ),
    Command(
        *("schedule", PREPARE, "show what a pipeline schedule does, and count its bubble"),
        *("config.schedule", "config.schedule"),
        examples=(
            "shardmlx schedule --pipeline-stages 2 --micro-batches 4 --print timeline",
            "shardmlx schedule --pipeline-stages 4 --micro-batches 8 --schedule zb-v",
        ),
    ),
    _of_ranks(
        *("doctor", PREPARE, "examine machines and the links between them"),
        *("config.doctor", "hosts.doctor_mpi"),
        examples=(
            "shardmlx doctor --ssh --hostfile hosts",
            "shardmlx launch --hostfile hosts doctor --write-hostfile measured",
        ),
        without_ranks="hosts.doctor_ssh",
        alike=False,
        alone=True,
    ),
    _of_ranks(
        *("profile", PREPARE, "measure the layers of a model on each machine, for plan"),
        *("config.profile", "training.profiling"),
        examples=(
            "shardmlx profile Qwen/Qwen3-0.6B --lengths 512,2048",
            "shardmlx launch --hostfile hosts profile fused --output profile.json",
        ),
        alone=True,
    ),
    Command(
        *("launch", PREPARE, "run any of these on ranks: launch -n 2 train, --hostfile F train"),
        *("hosts.launch_options", "hosts.launcher"),
        examples=(
            "shardmlx launch -n 2 train --model Qwen/Qwen3-0.6B --data my-data",
            "shardmlx launch --hostfile hosts --max-restarts 5 train --config lora.yaml",
        ),
    ),
)
"""Commands in the order of the first screen of help."""

BY_NAME = {command.name: command for command in COMMANDS}

OF_RANKS = tuple(command.name for command in COMMANDS if command.needs_ranks)
"""The commands that ``shardmlx launch`` starts."""
