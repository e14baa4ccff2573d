"""The options of ``shardmlx.doctor``."""

from __future__ import annotations

from dataclasses import dataclass

from shardmlx.config.command_line import CommandLine
from shardmlx.config.common_options import agent_option, python_option
from shardmlx.config.options import OptionError, check_options, option

_OUTPUT = "output"
_MEASURING = "measuring"
_SSH = "before mpirun"

STDOUT = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """The options of an examination. Raises ``OptionError``, a ``UserError``."""

    json: str | None = option(
        None,
        "file for all that was found, as JSON; - for stdout, without the tables",
        metavar="FILE",
        group=_OUTPUT,
    )
    write_hostfile: str | None = option(
        None,
        "hostfile to write, with what was measured, for shardmlx plan",
        metavar="FILE",
        group=_OUTPUT,
    )
    strict: bool = option(False, "end with status 1 if there are warnings", group=_OUTPUT)

    hostfile: str | None = option(
        None,
        "hostfile: the hosts to ask with --ssh; else the names, slots and users that "
        "--write-hostfile keeps",
        metavar="FILE",
        group=_MEASURING,
    )
    seconds: float = option(
        1.0,
        "time to measure each direction of a link, and matrix products",
        metavar="SECONDS",
        above=0,
        group=_MEASURING,
    )
    timeout: float = option(
        60.0,
        "time that a rank may wait for another",
        metavar="SECONDS",
        above=0,
        group=_MEASURING,
    )

    ssh: bool = option(False, "ask the hosts with ssh instead, without mpirun and MLX", group=_SSH)
    agent: str | None = agent_option(_SSH)
    python: str = python_option(_SSH)

    def __post_init__(self) -> None:
        check_options(self)
        if self.ssh and self.hostfile is None:
            raise OptionError("ssh", "has no hosts", "give --hostfile F")
        if self.ssh and self.write_hostfile is not None:
            raise OptionError(
                "write_hostfile", "is for what is measured under mpirun: leave out --ssh"
            )
        if self.agent is not None and not self.ssh:
            raise OptionError("agent", f"is {self.agent!r}", "it is for --ssh")
        if self.write_hostfile == STDOUT:
            raise OptionError("write_hostfile", "is '-'", "give the name of a file")


LINE = CommandLine(
    options=DoctorConfig,
    command="doctor",
    description=(
        "Look at the machines and the links between them: under mpirun, one rank a "
        "host; or, before that works, with --ssh."
    ),
)
