"""The options of ``shardmlx.doctor``."""

from __future__ import annotations

from dataclasses import dataclass

from shardmlx.config import common_options as common
from shardmlx.config.command_line import CommandLine
from shardmlx.config.options import Options, in_group, refuse

_SSH = "before mpirun"

_output = in_group("output")
_measuring = in_group("measuring")
_ssh = in_group(_SSH)


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(Options):
    """The options of an examination. Raises ``OptionError``, a ``UserError``."""

    json: str | None = common.json(group="output")
    write_hostfile: str | None = _output(
        None, "hostfile to write, with what was measured, for shardmlx plan", metavar="FILE"
    )
    strict: bool = _output(False, "end with status 1 if there are warnings")

    hostfile: str | None = _measuring(
        None, "hosts for --ssh, or names and slots for --write-hostfile", metavar="FILE"
    )
    seconds: float = _measuring(
        1.0, "time to measure a link one way, or a matrix product", metavar="SECONDS", above=0
    )
    device: str = common.device(group="measuring")
    self_test: bool = _measuring(
        False, "compare losses and gradients of --device with the CPU's, by kind of layer"
    )
    timeout: float = _measuring(
        60.0, "time that a rank may wait for another", metavar="SECONDS", above=0
    )

    ssh: bool = _ssh(False, "ask the hosts with ssh instead, without mpirun and MLX")
    find: bool = _ssh(False, "ask machines that announce ssh here; --write-hostfile lists them")
    ssh_command: str | None = common.ssh_command(group=_SSH)
    python: str = common.python(group=_SSH)

    def __post_init__(self) -> None:
        super().__post_init__()
        written = self.write_hostfile
        program = self.ssh_command
        known = self.ssh and not self.find
        lacks = known and self.hostfile is None
        refuse("ssh", "has no hosts", "give --hostfile F, or --find instead", when=lacks)
        unneeded = self.find and self.hostfile
        refuse("find", "asks the network for hosts", "leave out --hostfile", when=unneeded)
        refuse(
            "self_test", "computes on the hosts", "leave out --ssh", when=known and self.self_test
        )
        refuse("write_hostfile", "measures under mpirun", "leave out --ssh", when=known and written)
        unused = program is not None and not self.by_ssh
        refuse("ssh_command", f"is {program!r}", "it is for --ssh and --find", when=unused)

    @property
    def by_ssh(self) -> bool:
        """True if one process asks all hosts with ssh, and no ranks look."""
        return self.ssh or self.find


LINE = CommandLine(
    options=DoctorConfig,
    command="doctor",
    description="Look at machines and links: under mpirun, one rank a host; before, with --ssh, or "
    "--find for machines on the network.",
)
