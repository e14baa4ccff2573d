"""Runs one command: ``shardmlx COMMAND``, or ``python -m shardmlx COMMAND``.

Only the module of that command is imported, so that a command that needs neither MLX nor MPI
starts neither.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence

import shardmlx
from shardmlx.common.cli import BAD_INPUT, run_command
from shardmlx.common.environment import launched_rank
from shardmlx.common.yaml_reader import did_you_mean
from shardmlx.config.commands import COMMANDS
from shardmlx.errors import UserError

_WIDTH = max(len(command.name) for command in COMMANDS)
"""Characters of the longest name of a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first word names; return its exit status, 2 for an unknown one."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else ""
    if name in {command.name for command in COMMANDS}:
        status: int = importlib.import_module(f"shardmlx.{name}").main(words[1:])
        return status
    if launched_rank() != 0:  # rank 0 speaks for all
        return 0 if name in ("-h", "--help", "--version") else BAD_INPUT
    return run_command(lambda: _without_a_command(name))


def _without_a_command(name: str) -> int:
    """Print what is asked for; return the exit status. ``UserError`` for an unknown command."""
    if name == "--version":
        print(f"shardmlx {shardmlx.__version__}")
        return 0
    if name in ("", "-h", "--help"):
        print("\n".join(_first_screen()))
        return 0 if name else BAD_INPUT
    remedy = did_you_mean(name, [command.name for command in COMMANDS]) or "see shardmlx --help"
    raise UserError(f"no command {name!r}", remedy)


def _first_screen() -> Iterator[str]:
    yield "usage: shardmlx COMMAND [OPTIONS]     (shardmlx COMMAND --help: its options)"
    yield "Fine-tune and run language models that fit on no single Mac."
    for group in dict.fromkeys(command.group for command in COMMANDS):
        yield ""
        yield f"{group}:"
        for command in COMMANDS:
            if command.group == group:
                yield f"  {command.name:{_WIDTH}}  {command.help}"


if __name__ == "__main__":
    raise SystemExit(main())
