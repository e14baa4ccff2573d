"""The options of ``shardmlx.launch``: its own, and those of the command that is launched.

No MLX, no MPI.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardmlx.common.cli import OneLineParser
from shardmlx.config.profile import read_options as read_profile_options
from shardmlx.config.train import TrainConfig, load_given_config
from shardmlx.costmodel.hostfile import Machine, read_hostfile
from shardmlx.errors import UserError
from shardmlx.hosts.mpirun import replaced

MAX_RESTARTS = 3

COMMANDS = ("train", "profile")
"""The commands that can be launched. Only ``train`` goes on where it was, when started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The options of the command. ``machines`` are in mpirun's order, rank 0's first; ``config``
    are the options of ``train``, of which ``given`` were given, and None of another command.

    The hostfile is as it was at the start: who edits it meanwhile changes the next job.
    """

    command: str
    options: tuple[str, ...]
    config: TrainConfig | None
    given: frozenset[str]
    ranks: int
    machines: tuple[Machine, ...]
    hostfile: Path | None = None
    hostfile_text: str = ""
    max_restarts: int = 0
    agent: str | None = None
    python: str = sys.executable
    extra: tuple[str, ...] = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the machines."""
        return tuple(machine.host for machine in self.machines)


def read_options(argv: Sequence[str]) -> LaunchOptions:
    """Read flags of this command, then a command and its own options, checked as far as they can
    be. Raises ``UserError``."""
    flags = _parser().parse_args(argv)
    options = tuple(flags.options)
    config, given = _check(flags.command, options)
    restarts = flags.max_restarts
    if config is None:
        if restarts:
            raise UserError(
                f"--max-restarts {restarts}: {flags.command} cannot go on where it was", "leave out"
            )
        restarts = 0
    elif restarts is None:
        restarts = MAX_RESTARTS
    for flag, number, least in (("--max-restarts", restarts, 0), ("-n", flags.n, 1)):
        if number is not None and number < least:
            raise UserError(f"{flag} is {number}", f"give {least} or more")
    if restarts and config is not None and config.train and config.checkpoint_dir is None:
        directory = Path(config.adapter_path) / "checkpoints"
        options = replaced(options, checkpoint_dir=str(directory))
        config = replace(config, checkpoint_dir=str(directory))
    machines, ranks = _machines(flags.hostfile, flags.n)
    return LaunchOptions(
        command=flags.command,
        options=options,
        config=config,
        given=given,
        ranks=ranks,
        machines=machines,
        hostfile=None if flags.hostfile is None else Path(flags.hostfile),
        hostfile_text="" if flags.hostfile is None else Path(flags.hostfile).read_text("utf-8"),
        max_restarts=restarts,
        agent=flags.ssh,
        python=flags.python,
        extra=tuple(shlex.split(flags.mpirun_options)),
    )


def _check(command: str, options: Sequence[str]) -> tuple[TrainConfig | None, frozenset[str]]:
    """Check a command's options before anything starts; return those of ``train`` if it is that,
    and the names of those that were given."""
    if command == "train":
        return load_given_config(options)
    read_profile_options(options)
    return None, frozenset()


def _machines(hostfile: str | None, ranks: int | None) -> tuple[tuple[Machine, ...], int]:
    if hostfile is None:
        if ranks is None:
            raise UserError("no hosts", "give --hostfile F, or -n N for ranks on this machine")
        return (Machine(host="localhost", slots=ranks),), ranks
    machines = read_hostfile(hostfile)
    slots = sum(machine.slots for machine in machines)
    if ranks is not None and ranks > slots:
        raise UserError(
            f"-n {ranks}: {hostfile} has {slots} slots", "give more slots, or fewer ranks"
        )
    return machines, ranks or slots


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m shardmlx.launch",
        description="Check the hosts, run a command on them under mpirun, and restart a training "
        "run that fails: from its newest checkpoint, on the hosts that still answer.",
        epilog="What follows COMMAND are its own options: python -m shardmlx.launch --hostfile F "
        "train --model M --data D. Run it on the first host of the hostfile.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--hostfile", metavar="F", help="Open MPI hostfile (default: this machine alone)"
    )
    parser.add_argument(
        "-n", type=int, metavar="N", help="ranks (default: the slots of the hostfile)"
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        metavar="R",
        help=f"restarts of train after a failure (default: {MAX_RESTARTS}; 0 for none)",
    )
    parser.add_argument(
        "--ssh",
        metavar="AGENT",
        help="what logs in on other hosts, called as AGENT HOST COMMAND (default: ssh)",
    )
    parser.add_argument(
        "--python",
        metavar="PATH",
        default=sys.executable,
        help="the Python of the ranks, the same path on all hosts (default: this one)",
    )
    parser.add_argument(
        "--mpirun-options",
        metavar="OPTIONS",
        default="",
        help="more options for mpirun, in one word with =: --mpirun-options='--mca btl tcp,self'",
    )
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=" or ".join(COMMANDS))
    parser.add_argument("options", metavar="...", nargs=argparse.REMAINDER, help="its options")
    return parser
