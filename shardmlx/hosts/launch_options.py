"""Options of ``shardmlx launch``, and of the launched command, also on the hosts that are left. No
MLX, no MPI."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardmlx.common.formatting import plural
from shardmlx.common.json_output import STDOUT
from shardmlx.common.passed_stdin import DASH
from shardmlx.config import common_options as common
from shardmlx.config.command_line import CommandLine
from shardmlx.config.commands import BY_NAME, OF_RANKS
from shardmlx.config.common_options import AUTO
from shardmlx.config.options import Options, declared, flag_of, in_group
from shardmlx.config.train import CheckpointOptions
from shardmlx.errors import UserError, file_access
from shardmlx.hosts.mpirun import knows_as_own
from shardmlx.hosts.reachability import is_local, local_hosts
from shardmlx.hosts.supervisor import SECONDS_TO_SAVE, JobControl
from shardmlx.pipeline.stage_map import read_stage_map
from shardmlx.planning.facts.hostfile import Machine, read_hostfile, same_host

_MAX_RESTARTS = 3

_MPIRUN = "how they are started"

_OF_A_PROCESS = (("/", "dev"), ("/", "proc"))
"""Directories of files that one process alone can read, as /dev/fd/63 and /dev/stdin."""

_LAYOUT = (
    *("stage_map", "pipeline_stages", "data_parallel", "tensor_parallel"),
    *("replica_rows", "schedule"),
)
"""Options of ``train`` that may not suit fewer ranks."""

_OF_HOSTS = {
    "stage_map": "give it by --stage-map, and launch can plan again without it",
    **dict.fromkeys(
        ("tensor_shares", "expert_parallel"), "leave it out, and launch can plan again"
    ),
}
"""Keys of a file that suit its hosts alone, and what to do instead."""

_ranks = in_group("ranks and hosts")
_mpirun = in_group(_MPIRUN)


@dataclass(frozen=True, kw_only=True)
class LaunchFlags(Options):
    """The hosts and ranks of a job, and how it starts. Raises ``OptionError``, a ``UserError``."""

    ranks: int | None = _ranks(
        None, "ranks to start", unset="the slots of the hostfile", short="-n", minimum=1
    )
    hostfile: str | None = _ranks(
        None, "Open MPI hostfile, rank 0's host first", metavar="FILE", unset="this machine alone"
    )
    max_restarts: int | None = _ranks(
        None, "restarts of train or serve", unset=f"{_MAX_RESTARTS}; 0 for others", minimum=0
    )
    ssh_command: str | None = common.ssh_command(group=_MPIRUN)
    python: str = common.python(group=_MPIRUN)
    mpirun_options: str = _mpirun(
        "", "more for mpirun, as --mpirun-options='--mca btl tcp,self'", metavar="OPTIONS"
    )


LINE = CommandLine(
    options=LaunchFlags,
    command="launch",
    description="Check the hosts, print the mpirun line of a command, and run it. Training that "
    "fails starts again from its newest checkpoint, on hosts that answer; a server on the same.",
    commands=OF_RANKS,
    epilog=f"COMMAND is one of {', '.join(OF_RANKS)}. With a hostfile, run it on the first host.",
    refused={"--ssh": "launch uses ssh by itself: shardmlx launch --hostfile FILE train ..."},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The flags of launch, and the options of the command. ``machines`` are in mpirun's order.

    ``timeout`` is the command's, in seconds. ``checkpoints``, ``config_file``, the names of the
    options ``in_file`` and ``stage_map`` are those of ``train``; ``chose_directory`` is True if
    launch lets it save checkpoints, and the user did not say where. A command that ``prints_json``
    needs stdout for itself. A server whose clients train is one ``of_loops``.
    """

    flags: LaunchFlags
    command: str
    options: tuple[str, ...]
    ranks: int
    machines: tuple[Machine, ...]
    control: JobControl
    timeout: float
    checkpoints: CheckpointOptions | None = None
    config_file: str | None = None
    in_file: Collection[str] = ()
    stage_map: str | None = None
    chose_directory: bool = False
    of_loops: bool = False
    prints_json: bool = False
    max_restarts: int = 0

    @property
    def ends_with_its_terminal(self) -> bool:
        """True if the command is for who sits at its terminal: what it shows or serves is all that
        it is for."""
        return self.command != "train"

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(machine.host for machine in self.machines)

    @property
    def pythons(self) -> dict[str, str]:
        """The Pythons of hosts that the hostfile names, and that are not ``--python``."""
        own = self.flags.python
        return {m.host: m.python for m in self.machines if m.python not in (None, own)}

    @property
    def place(self) -> str:
        """The path at which each host links its Python's environment, if these differ, or "". The
        user and the Pythons choose it, so that each host finds its own link again. It lies in
        /tmp, which Linux and macOS have alike."""
        if not self.pythons:
            return ""
        what = repr((os.getuid(), self.flags.python, sorted(self.pythons.items())))
        return f"/tmp/shardmlx-{hashlib.sha256(what.encode()).hexdigest()[:12]}"

    def slots_of(self, hosts: Collection[str]) -> int:
        """Return how many ranks can run on some of the hosts."""
        return sum(machine.slots for machine in self.machines if machine.host in hosts)

    def in_use(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """Return the first of these hosts that have slots for all ranks; the others are spares."""
        ends = range(1, len(hosts) + 1)
        used = (hosts[:end] for end in ends if self.slots_of(hosts[:end]) >= self.ranks)
        return tuple(next(used, hosts))

    def map_names(self, hosts: Collection[str]) -> bool:
        """Tell whether the stage map, if one is given, wants one of these hosts."""
        if self.stage_map is None:
            return False
        with suppress(UserError):  # the run will say what is wrong with it
            wanted = read_stage_map(self.stage_map).hosts
            return any(name and same_host(name, host) for name in wanted for host in hosts)
        return False

    @property
    def files(self) -> tuple[str, ...]:
        """Files that rank 0 reads, but for those that the user has given to the command: the
        hostfile, if launch has added it."""
        name = self.flags.hostfile
        return (name,) if name is not None and name in self.options else ()


def read_options(argv: Sequence[str]) -> LaunchOptions:
    """Read the flags of launch, then a command and its own options. Raises ``UserError``."""
    flags, command, options = LINE.load_before(argv)
    if flags.hostfile is not None:
        flags = replace(flags, hostfile=_lasting(flags.hostfile))
    line = BY_NAME[command].line
    taken = {flag for each in declared(line.options) for flag in each.flags}
    late = {word.partition("=")[0] for word in options} - taken
    for each in declared(LaunchFlags):
        for flag in late.intersection(each.flags):
            remedy = f"give it before: shardmlx launch {flag} {each.metavar} {command} ..."
            raise UserError(f"{flag} stands after {command}", remedy)
    read, given = line.load_given(options, on_ranks=True)
    if command == "doctor" and read.by_ssh:
        raise UserError("doctor --ssh and --find start no ranks", "run it without launch")
    trains = command == "train"
    restarts = _restarts(command, flags.max_restarts)
    takes_hostfile = command != "profile"
    if flags.hostfile is not None and takes_hostfile and "hostfile" not in given.names:
        # The hostfile that mpirun reads describes the machines, too.
        options = replaced(options, hostfile=flags.hostfile)
    chose_directory = bool(
        restarts and trains and read.tune.train and read.checkpoints.checkpoint_dir is None
    )
    if chose_directory:
        directory = Path(read.adapter_path) / "checkpoints"
        options = replaced(options, checkpoint_dir=str(directory))
        read = read.changed(checkpoint_dir=str(directory))
    machines, ranks = _machines(flags.hostfile, flags.ranks)
    return LaunchOptions(
        flags=flags,
        command=command,
        options=options,
        ranks=ranks,
        machines=machines,
        control=_control(command, read, is_here=is_local(machines[0].host)),
        timeout=read.timeout,
        checkpoints=read.checkpoints if trains else None,
        config_file=read.config if trains else None,
        in_file=given.file.keys(),
        stage_map=read.layout.stage_map if trains else None,
        chose_directory=chose_directory,
        of_loops=command == "serve" and read.train,
        prints_json=getattr(read, "json", None) == STDOUT,
        max_restarts=restarts,
    )


def _restarts(command: str, asked: int | None) -> int:
    """Return the number of restarts: ``train`` resumes, ``serve`` answers again."""
    if command in ("train", "serve"):
        return _MAX_RESTARTS if asked is None else asked
    if asked:
        raise UserError(f"--max-restarts {asked}: {command} cannot go on where it was", "leave out")
    return 0


def _control(command: str, options: Any, *, is_here: bool) -> JobControl:
    """Return how a job is stopped, and how it uses this terminal; rank 0 may run here."""
    if command == "train":
        return JobControl(in_order=True)
    if command == "serve":
        return JobControl(in_order=True, seconds=options.grace + SECONDS_TO_SAVE)
    answers = command in ("chat", "generate")
    reads = command == "chat" or (
        command == "generate" and DASH in (options.prompt, options.prompts)
    )
    return JobControl(in_order=False, reads_stdin=reads, streams=answers and is_here)


def _machines(hostfile: str | None, ranks: int | None) -> tuple[tuple[Machine, ...], int]:
    if hostfile is None:
        if ranks is None:
            raise UserError("no hosts", "give --hostfile F, or -n N for ranks on this machine")
        return (Machine(host="localhost", slots=ranks),), ranks
    machines = read_hostfile(hostfile)
    slots = sum(machine.slots for machine in machines)
    if ranks is not None and ranks > slots:
        raise UserError(f"-n {ranks}: {hostfile} has {slots} slots", "give fewer ranks")
    return machines, ranks or slots


def _lasting(hostfile: str) -> str:
    """Return the path of a hostfile that launch, mpirun and rank 0 can each read: of a copy, until
    this process ends, if the file can be read once, as that of ``<(...)``."""
    path = Path(hostfile)
    if not path.exists() or (path.is_file() and path.parts[:2] not in _OF_A_PROCESS):
        return hostfile
    with file_access("read hostfile", hostfile):
        content = path.read_bytes()
    with file_access("copy", hostfile, "free some space, or set TMPDIR"):
        directory = tempfile.mkdtemp(prefix="shardmlx-launch-")
        copy = Path(directory, "hosts")
        copy.write_bytes(content)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return str(copy)


def entries(machines: Sequence[Machine], hosts: Collection[str]) -> str | None:
    """Return a hostfile of the machines that are some of the ``hosts``; None if mpirun can read the
    user's own. mpirun logs in to its own machine where it knows it by another name: not so with
    ``localhost``."""
    left = [each for each in machines if each.host in hosts]
    unknown = [each.host for each in left if not knows_as_own(each.host)]
    local = local_hosts(unknown)
    own = [each for each in left if each.host in local]
    if len(left) == len(machines) and not own:
        return None
    named = [replace(each, login="localhost", port=None) if each in own else each for each in left]
    return "".join(f"{each.entry}\n" for each in named)


def replaced(options: Sequence[str], **new: str | int | None) -> tuple[str, ...]:
    """Return options with other values (pipeline_stages=2), at the end; None removes one."""
    flags = {flag_of(name): value for name, value in new.items()}
    words: list[str] = []
    is_value = False
    for word in options:
        name, equals, _ = word.partition("=")
        if name in flags:
            is_value = not equals
        elif is_value:
            is_value = False
        else:
            words.append(word)
    for flag, value in flags.items():
        words += [] if value is None else [flag, str(value)]
    return tuple(words)


def plan_again(launch: LaunchOptions, ranks: int) -> tuple[tuple[str, ...], str]:
    """Return the options of ``train`` for fewer ``ranks``, and a line about them: the run chooses
    its layout, or where the user's file settles one, takes one pipeline. Raises ``UserError`` for a
    stage map in the file."""
    here = plural(ranks, "rank")
    for name, remedy in _OF_HOSTS.items():
        if name in launch.in_file:
            fault = f"{launch.config_file}: {name} does not suit the {here} left"
            raise UserError(fault, remedy)
    options = replaced(launch.options, **dict.fromkeys(_LAYOUT))
    alone: dict[str, int | str] = {
        "pipeline_stages": ranks,
        "data_parallel": 1,
        "tensor_parallel": 1,
        "schedule": AUTO,
    }
    settled = {name: value for name, value in alone.items() if name in launch.in_file}
    is_one = not settled.keys().isdisjoint(("pipeline_stages", "data_parallel"))
    chosen = "one pipeline" if is_one else "the run chooses it"
    return replaced(options, **settled), f"layout for {here}: {chosen}"
