"""Runs one command: ``shardmlx COMMAND``, or ``python -m shardmlx.COMMAND``.

Only the modules of that command are imported, so that a command that needs neither MLX nor MPI
starts neither.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import shardmlx
from shardmlx.common.cli import BAD_INPUT, INTERRUPTED, run_command, whole_output
from shardmlx.common.environment import launched_rank
from shardmlx.common.yaml_reader import did_you_mean
from shardmlx.config.commands import BY_NAME, COMMANDS, Command, imported
from shardmlx.config.other_words import command_here
from shardmlx.errors import UserError

_WIDTH = max(len(command.name) for command in COMMANDS)
"""Characters of the longest name of a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first word names; return its exit status.

    That is 0, 2 after bad input and for an unknown command, or what the command says. A failure at
    run time ends all ranks.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else ""
    command = BY_NAME.get(name)
    if command is not None and command.needs_ranks:
        with whole_output():
            return _on_ranks(command, words[1:])
    if command is not None:
        run = imported(command.run)
        return run_command(lambda: run(words[1:]))
    if launched_rank() != 0:  # rank 0 speaks for all
        return 0 if name in ("-h", "--help", "--version") else BAD_INPUT
    return run_command(lambda: _without_a_command(name))


def run_module(name: str) -> None:
    """Run the command whose module ``shardmlx.NAME`` is the program, and exit with its status."""
    raise SystemExit(main([name, *sys.argv[1:]]))


def _on_ranks(command: Command, words: Sequence[str]) -> int:
    if command.without_ranks is not None:
        status = imported(command.without_ranks)(words)
        if status is not None:
            return int(status)

    from shardmlx.distributed.processes import under_mpirun
    from shardmlx.distributed.run_ranks import run_ranks

    def read_options(rank: int) -> Any:
        options = command.line.load(words, rank)
        if not command.alone and not under_mpirun():
            _refuse_alone(command.name, options)
        return options

    try:
        return run_ranks(
            read_options,
            lambda options: float(options.timeout),
            lambda: imported(command.run),
            alike=command.alike,
        )
    except KeyboardInterrupt:  # before anything is begun
        return INTERRUPTED


def _refuse_alone(name: str, options: Any) -> None:
    """Raise ``UserError`` if options are for several ranks: this process would do all alone."""
    given = options.flat()
    hostfile = given.get("hostfile")
    layout = ("pipeline_stages", "data_parallel")
    ranks = math.prod(given.get(each) or 1 for each in layout)
    if hostfile is not None:
        problem = f"--hostfile {hostfile} alone starts nothing on other machines"
        raise UserError(problem, f"use shardmlx launch --hostfile {hostfile} {name} ...")
    if ranks > 1:
        problem = f"the layout needs {ranks} ranks, and this is one process"
        raise UserError(problem, f"use shardmlx launch -n {ranks} {name} ...")


def _without_a_command(name: str) -> int:
    """Print what is asked for; return the exit status. ``UserError`` for an unknown command."""
    if name == "--version":
        print(f"shardmlx {shardmlx.__version__}")
        return 0
    if name in ("", "-h", "--help"):
        print("\n".join(_first_screen()))
        return 0 if name else BAD_INPUT
    remedy = command_here(name) or did_you_mean(name, [command.name for command in COMMANDS])
    raise UserError(f"no command {name!r}", remedy or "see shardmlx --help")


def _first_screen() -> Iterator[str]:
    yield "usage: shardmlx COMMAND [OPTIONS]     (shardmlx COMMAND --help: its options)"
    yield "Fine-tune and run language models that fit on no single Mac."
    for group in dict.fromkeys(command.group for command in COMMANDS):
        yield ""
        yield f"{group}:"
        for command in COMMANDS:
            if command.group == group:
                yield f"  {command.name:{_WIDTH}}  {command.help}"
