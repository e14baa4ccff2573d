"""The commands of ``shardmlx``, by what one wants to do. No MLX, no MPI."""

from __future__ import annotations

from dataclasses import dataclass

TRAIN = "Train"
USE = "Use a model"
PREPARE = "Look before you run"
START = "Start ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command: ``shardmlx NAME``, whose ``main`` is in the module ``shardmlx.NAME``.

    ``options`` names the module that builds its command line. A command of several ``ranks`` can
    be launched.
    """

    name: str
    group: str
    help: str
    options: str
    ranks: bool = False


COMMANDS = (
    Command(
        name="train",
        group=TRAIN,
        help="fine-tune a model, with the options of mlx_lm.lora",
        options="config.train",
        ranks=True,
    ),
    Command(
        name="report",
        group=TRAIN,
        help="show a run from its metrics, as a page",
        options="config.report",
    ),
    Command(
        name="export",
        group=TRAIN,
        help="write the finished model: fused, converted, quantised",
        options="config.export",
        ranks=True,
    ),
    Command(
        name="generate",
        group=USE,
        help="answer a prompt, or a file of prompts",
        options="config.generate",
        ranks=True,
    ),
    Command(
        name="chat",
        group=USE,
        help="talk with a model in the terminal",
        options="config.chat",
        ranks=True,
    ),
    Command(
        name="serve",
        group=USE,
        help="serve OpenAI's API over HTTP, and a chat page",
        options="config.serve",
        ranks=True,
    ),
    Command(
        name="evaluate",
        group=USE,
        help="measure a model: perplexity of texts, or lm-eval tasks",
        options="config.evaluate",
        ranks=True,
    ),
    Command(
        name="inspect",
        group=PREPARE,
        help="show what a model consists of, and what each rank needs of it",
        options="config.inspect",
    ),
    Command(
        name="plan",
        group=PREPARE,
        help="divide a model over given machines; predict memory and time",
        options="planning.plan_options",
    ),
    Command(
        name="schedule",
        group=PREPARE,
        help="draw what a pipeline schedule does, and count its bubble",
        options="config.schedule",
    ),
    Command(
        name="doctor",
        group=PREPARE,
        help="examine machines and the links between them",
        options="config.doctor",
        ranks=True,
    ),
    Command(
        name="profile",
        group=PREPARE,
        help="measure the layers of a model on each machine, for plan",
        options="config.profile",
        ranks=True,
    ),
    Command(
        name="launch",
        group=START,
        help="run any of these on ranks: launch -n 2 train, --hostfile F train",
        options="config.launch",
    ),
)
"""Commands in the order of the first screen of help."""

OF_RANKS = tuple(command.name for command in COMMANDS if command.ranks)
"""The commands that ``shardmlx launch`` starts."""
