"""The options of ``shardmlx.launch``: its own, and those of the command that is launched.

No MLX, no MPI.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardmlx.config.launch import MAX_RESTARTS, read_flags
from shardmlx.config.profile import read_options as read_profile_options
from shardmlx.config.train import TrainConfig, load_given_config
from shardmlx.costmodel.hostfile import Machine, read_hostfile
from shardmlx.errors import UserError
from shardmlx.hosts.mpirun import replaced


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
    flags, command, options = read_flags(argv)
    config, given = _check(command, options)
    restarts = flags.max_restarts
    if config is None:
        if restarts:
            raise UserError(
                f"--max-restarts {restarts}: {command} cannot go on where it was", "leave out"
            )
        restarts = 0
    elif restarts is None:
        restarts = MAX_RESTARTS
    if restarts and config is not None and config.train and config.checkpoint_dir is None:
        directory = Path(config.adapter_path) / "checkpoints"
        options = replaced(options, checkpoint_dir=str(directory))
        config = replace(config, checkpoint_dir=str(directory))
    machines, ranks = _machines(flags.hostfile, flags.ranks)
    return LaunchOptions(
        command=command,
        options=options,
        config=config,
        given=given,
        ranks=ranks,
        machines=machines,
        hostfile=None if flags.hostfile is None else Path(flags.hostfile),
        hostfile_text="" if flags.hostfile is None else Path(flags.hostfile).read_text("utf-8"),
        max_restarts=restarts,
        agent=flags.agent,
        python=flags.python,
        extra=tuple(shlex.split(flags.mpirun_options)),
    )


def _check(command: str, options: Sequence[str]) -> tuple[TrainConfig | None, frozenset[str]]:
    """Check a command's options before anything starts; return those of ``train`` if it is that,
    and the names of those that were given."""
    if command == "train":
        config, given = load_given_config(options)
        return config, given.names
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
