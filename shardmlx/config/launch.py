"""The options of ``shardmlx launch`` itself. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardmlx.config import common_options as common
from shardmlx.config.command_line import CommandLine
from shardmlx.config.commands import OF_RANKS
from shardmlx.config.options import check_options, in_group

MAX_RESTARTS = 3

_RANKS = "ranks and hosts"
_MPIRUN = "how they are started"


_ranks = in_group(_RANKS)
_mpirun = in_group(_MPIRUN)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFlags:
    """The hosts and ranks of a job, and how it is started. Raises ``OptionError``, a
    ``UserError``."""

    ranks: int | None = _ranks(
        None, "ranks to start", unset="the slots of the hostfile", short="-n", minimum=1
    )
    hostfile: str | None = _ranks(
        None, "Open MPI hostfile, rank 0's host first", metavar="FILE", unset="this machine alone"
    )
    max_restarts: int | None = _ranks(
        None,
        "restarts of train and serve after a failure",
        unset=f"{MAX_RESTARTS}, 0 for other commands",
        minimum=0,
    )
    agent: str | None = common.agent(group=_MPIRUN)
    python: str = common.python(group=_MPIRUN)
    mpirun_options: str = _mpirun(
        "",
        "more options for mpirun, in one word with =: --mpirun-options='--mca btl tcp,self'",
        metavar="OPTIONS",
    )

    def __post_init__(self) -> None:
        check_options(self)


LINE = CommandLine(
    options=LaunchFlags,
    command="launch",
    description=(
        "Check the hosts, print the mpirun line that runs a command on them, and run it. A "
        "training run that fails starts again: from its newest checkpoint, on the hosts that "
        "still answer. A server that fails starts again on the same hosts."
    ),
    epilog="What follows COMMAND are its own options: shardmlx launch -n 2 train --model M "
    "--data D. With a hostfile, run it on the first host of it.",
)


def read_flags(argv: Sequence[str]) -> tuple[LaunchFlags, str, tuple[str, ...]]:
    """Return the flags of this command, the command to launch, and that command's own words.

    Raises ``UserError``.
    """
    return LINE.load_before(argv, OF_RANKS)
