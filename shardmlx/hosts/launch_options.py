"""Options of ``shardmlx launch``, and of the launched command, also on the hosts that are left. No
MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardmlx.common.formatting import plural
from shardmlx.config import common_options as common
from shardmlx.config.command_line import CommandLine
from shardmlx.config.commands import BY_NAME, OF_RANKS
from shardmlx.config.common_options import AUTO, SIMPLEST
from shardmlx.config.options import check_options, flag_of, in_group
from shardmlx.config.specs import BatchOptions, LayoutOptions, RunSpec
from shardmlx.config.train import CheckpointOptions
from shardmlx.costmodel.hostfile import Machine, is_unnamed, read_hostfile, same_host
from shardmlx.costmodel.workload import Workload
from shardmlx.errors import UserError
from shardmlx.hosts.reachability import is_local
from shardmlx.hosts.supervisor import SECONDS_TO_SAVE, JobControl
from shardmlx.modelfiles.model_files import open_model
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.schedules import get_schedule
from shardmlx.pipeline.stage_map import StageMap, read_stage_map
from shardmlx.planning.layout import divide_batch

_MAX_RESTARTS = 3

_MPIRUN = "how they are started"

_ranks = in_group("ranks and hosts")
_mpirun = in_group(_MPIRUN)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFlags:
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

    def __post_init__(self) -> None:
        check_options(self)


LINE = CommandLine(
    options=LaunchFlags,
    command="launch",
    description="Check the hosts, print the mpirun line of a command, and run it. Training that "
    "fails starts again from its newest checkpoint, on hosts that answer; a server on the same.",
    epilog="What follows COMMAND are its own options. With a hostfile, run it on the first host.",
    refused={"--ssh": "launch uses ssh by itself: shardmlx launch --hostfile FILE train ..."},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The flags of launch, and the options of the command. ``machines`` are in mpirun's order.

    ``run``, ``checkpoints`` and ``config_file`` are those of ``train``; ``chose_directory`` is True
    if launch lets it save checkpoints, and the user did not say where.
    """

    flags: LaunchFlags
    command: str
    options: tuple[str, ...]
    ranks: int
    machines: tuple[Machine, ...]
    control: JobControl
    run: RunSpec | None = None
    checkpoints: CheckpointOptions | None = None
    config_file: str | None = None
    chose_directory: bool = False
    max_restarts: int = 0

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(machine.host for machine in self.machines)


def read_options(argv: Sequence[str]) -> LaunchOptions:
    """Read the flags of launch, then a command and its own options. Raises ``UserError``."""
    flags, command, options = LINE.load_before(argv, OF_RANKS)
    if "-n" in options:
        remedy = f"give it before: shardmlx launch -n N {command} ..."
        raise UserError(f"-n stands after {command}", remedy)
    read, given = BY_NAME[command].line.load_given(options)
    if command == "doctor" and read.by_ssh:
        raise UserError("doctor --ssh and --find start no ranks", "run it without launch")
    trains = command == "train"
    restarts = _restarts(command, flags.max_restarts)
    takes_hostfile = command not in ("export", "profile")
    if flags.hostfile is not None and takes_hostfile and "hostfile" not in given.names:
        # The hostfile that mpirun reads describes the machines, too.
        options = replaced(options, hostfile=flags.hostfile)
    chose_directory = bool(restarts and trains and read.train and read.checkpoint_dir is None)
    if chose_directory:
        directory = Path(read.adapter_path) / "checkpoints"
        options = replaced(options, checkpoint_dir=str(directory))
        read = replace(read, checkpoint_dir=str(directory))
    machines, ranks = _machines(flags.hostfile, flags.ranks)
    return LaunchOptions(
        flags=flags,
        command=command,
        options=options,
        ranks=ranks,
        machines=machines,
        control=_control(command, read, is_here=is_local(machines[0].host)),
        run=RunSpec.of(read) if trains else None,
        checkpoints=CheckpointOptions.of(read) if trains else None,
        config_file=read.config if trains else None,
        chose_directory=chose_directory,
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
    reads = command == "chat" or (command == "generate" and options.prompt == "-")
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


def plan_again(
    options: Sequence[str],
    run: RunSpec,
    machines: Sequence[Machine],
    file: str | None = None,
) -> tuple[int, tuple[str, ...], str]:
    """Return the ranks, the options of ``train`` and a line about them for ``machines``, one a
    rank: the layout as given if it suits, else one pipeline through as many as there are layers.
    Raises ``UserError`` if the user's file prevents a necessary change, or no layout suits."""
    layers, layout = _layers(run), run.layout
    stage_map = None if layout.stage_map is None else read_stage_map(layout.stage_map)
    here = plural(len(machines), "rank")
    if _suits(layout, run.batch, stage_map, machines, layers):
        return len(machines), tuple(options), f"layout for {here}: as given"
    cleared = replaced(
        options, stage_map=None, pipeline_stages=None, data_parallel=None, replica_rows=None
    )
    if stage_map is not None and cleared == tuple(options):
        raise UserError(
            f"{file}: stage_map does not suit the {here} left",
            "give it by --stage-map, and launch can plan again without it",
        )
    for ranks in range(len(machines), 0, -1):
        alone = replace(
            layout, stage_map=None, pipeline_stages=ranks, data_parallel=None, tensor_parallel=1
        )
        if _suits(alone, run.batch, None, machines[:ranks], layers):
            break
    else:
        raise UserError(
            f"no layout of {layout.schedule} for the {here} left", "leave --schedule out"
        )
    new, given = {}, str(stage_map)
    if layout.pipeline_stages is not None:
        new, given = {"pipeline_stages": ranks}, f"--pipeline-stages {layout.pipeline_stages}"
    if layout.data_parallel is not None:
        new = {"pipeline_stages": ranks, "data_parallel": 1}
        given = f"--data-parallel {layout.data_parallel}"
    if layout.tensor_parallel > 1:
        new = {**new, "pipeline_stages": ranks, "tensor_parallel": 1}
        given = f"--tensor-parallel {layout.tensor_parallel}"
    unused = f", {len(machines) - ranks} unused" if ranks < len(machines) else ""
    chosen = f"one pipeline of {ranks}" if new else "the run chooses it"
    instead = f", instead of {given}" if stage_map or new else ""
    line = f"layout for {plural(ranks, 'rank')}{unused}: {chosen}{instead}"
    return ranks, replaced(cleared, **new), line


def _suits(
    layout: LayoutOptions,
    batch: BatchOptions,
    stage_map: StageMap | None,
    machines: Sequence[Machine],
    layers: int | None,
) -> bool:
    """Tell whether the options can be used as they are on these machines, one a rank."""
    ranks, left_over = divmod(len(machines), layout.tensor_parallel)
    if left_over or not ranks:
        return False
    schedule = get_schedule(SIMPLEST if layout.schedule == AUTO else layout.schedule)
    try:
        layout = layout.for_ranks(ranks)
        pp = layout.pipeline_stages or ranks if stage_map is None else stage_map.pp
        mesh = Mesh.for_world(ranks, pp)
        rows, size = divide_batch(batch, mesh)
        if stage_map is None:
            virtual = schedule.default_virtual
            schedule.check(pp, -(-rows // size), virtual)
            return layers is None or pp * virtual <= layers
    except UserError:
        return False
    # Hosts are compared as train does, as far as the hostfile names its machines.
    pairs = ((stage_map.host_of(rank), machines[rank].host) for rank in range(pp))
    return all(not wanted or is_unnamed(host) or same_host(wanted, host) for wanted, host in pairs)


def _layers(run: RunSpec) -> int | None:
    try:
        files = open_model(run.model, run.revision)
        return Workload.of(files, run.fine_tune, run.batch).shape.num_layers
    except (UserError, OSError):
        return None
