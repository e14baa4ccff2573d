"""The options of ``shardmlx.doctor``."""

from __future__ import annotations

from dataclasses import dataclass

from shardmlx.config import common_options as common
from shardmlx.config.command_line import CommandLine
from shardmlx.config.options import OptionError, check_options, in_group

STDOUT = "-"

_SSH = "before mpirun"

_output = in_group("output")
_measuring = in_group("measuring")
_ssh = in_group(_SSH)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """The options of an examination. Raises ``OptionError``, a ``UserError``."""

    json: str | None = _output(
        None,
        "file for all that was found, as JSON; - for stdout, without the tables",
        metavar="FILE",
    )
    write_hostfile: str | None = _output(
        None, "hostfile to write, with what was measured, for shardmlx plan", metavar="FILE"
    )
    strict: bool = _output(False, "end with status 1 if there are warnings")

    hostfile: str | None = _measuring(
        None,
        "hostfile: the hosts to ask with --ssh; else the names, slots and users that "
        "--write-hostfile keeps",
        metavar="FILE",
    )
    seconds: float = _measuring(
        1.0,
        "time to measure each direction of a link, and matrix products",
        metavar="SECONDS",
        above=0,
    )
    timeout: float = _measuring(
        60.0, "time that a rank may wait for another", metavar="SECONDS", above=0
    )

    ssh: bool = _ssh(False, "ask the hosts with ssh instead, without mpirun and MLX")
    agent: str | None = common.agent(group=_SSH)
    python: str = common.python(group=_SSH)

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
