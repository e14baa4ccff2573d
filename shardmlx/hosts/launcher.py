"""``python -m shardmlx.launch --hostfile F train ...``: mpirun that survives what may happen.

It looks whether the hosts answer, prints the mpirun command and runs it, and when the job fails
starts it again from the newest checkpoint, on the hosts that are left. It needs neither MLX nor
MPI itself, and belongs on the machine of rank 0, where the checkpoints are.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardmlx.checkpoint.store import MARKER, Store
from shardmlx.common.cli import OneLineParser, run_command
from shardmlx.config.profile import read_options as read_profile_options
from shardmlx.config.specs import RunSpec
from shardmlx.config.train import TrainConfig, load_given_config
from shardmlx.costmodel.hostfile import Machine, machine_of_each_rank, read_hostfile
from shardmlx.errors import Stopped, UserError, one_line
from shardmlx.hosts.degraded_layout import plan_again
from shardmlx.hosts.findings import Finding
from shardmlx.hosts.mpirun import MpirunJob, find_mpirun, replaced
from shardmlx.hosts.reachability import (
    RemoteLogin,
    addresses_of,
    check_hosts,
    is_local,
    without_hosts,
)
from shardmlx.hosts.restart_policy import FAILED, Attempt, after, changes
from shardmlx.hosts.supervisor import Supervisor

MAX_RESTARTS = 3

COMMANDS = ("train", "profile")
"""The commands that can be launched. Only ``train`` goes on where it was, when started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
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
        return tuple(machine.host for machine in self.machines)


class GaveUp(Exception):
    """No further start makes sense; the message is the reason."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 done; 2 bad input; 1 given up; 128 + n after signal n."""
    given = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: _run(given))


def _run(argv: Sequence[str]) -> int:
    launch = read_options(argv)
    supervisor = Supervisor()
    with supervisor.listening():
        try:
            return Launcher(launch, find_mpirun(), supervisor).run()
        except Stopped as stop:
            return 128 + stop.signal
        except GaveUp as error:
            print(f"shardmlx: failed: launch gives up: {error}", file=sys.stderr, flush=True)
            return FAILED


def read_options(argv: Sequence[str]) -> Launch:
    """Read flags of this command, then a command and its own options, checked as far as they can
    be. Raises ``UserError``."""
    flags = _parser().parse_args(argv)
    options = tuple(flags.options)
    config, given = _check(flags.command, options)
    restarts = flags.max_restarts
    if config is None:
        if restarts:
            raise UserError(
                f"--max-restarts {restarts}: {flags.command} cannot go on where it was: leave out"
            )
        restarts = 0
    elif restarts is None:
        restarts = MAX_RESTARTS
    for flag, number, least in (("--max-restarts", restarts, 0), ("-n", flags.n, 1)):
        if number is not None and number < least:
            raise UserError(f"{flag} is {number}: give {least} or more")
    if restarts and config is not None and config.train and config.checkpoint_dir is None:
        directory = Path(config.adapter_path) / "checkpoints"
        options = replaced(options, checkpoint_dir=str(directory))
        config = replace(config, checkpoint_dir=str(directory))
    machines, ranks = _machines(flags.hostfile, flags.n)
    return Launch(
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
            raise UserError("no hosts: give --hostfile F, or -n N for ranks on this machine")
        return (Machine(host="localhost", slots=ranks),), ranks
    machines = read_hostfile(hostfile)
    slots = sum(machine.slots for machine in machines)
    if ranks is not None and ranks > slots:
        raise UserError(
            f"-n {ranks}: {hostfile} has {slots} slots: give more slots, or fewer ranks"
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


@dataclass
class Launcher:
    """Starts of a job until it is done, or there is a reason to give up."""

    launch: Launch
    mpirun: Path
    supervisor: Supervisor
    attempts: list[Attempt] = field(default_factory=list)

    def run(self) -> int:
        """Start the job as often as it makes sense; return the status to end with."""
        launch = self.launch
        findings = self._ask()
        for finding in findings.values():
            print(f"shardmlx: error: {finding}", file=sys.stderr)
        if findings:
            return 2
        config = launch.config
        if launch.max_restarts and config and config.train and "checkpoint_dir" not in launch.given:
            _say(f"checkpoints in {config.checkpoint_dir}, to restart from")
        hosts, job = launch.hosts, self._job()
        while True:
            self.attempts.append(self._start(hosts, job))
            decision = after(self.attempts, launch.max_restarts, self.supervisor.stopped_by)
            if decision.status is not None:
                if decision.reason:
                    raise GaveUp(decision.reason)
                return decision.status
            _say(
                f"the job failed with status {self.attempts[-1].status}: restart "
                f"{len(self.attempts)} of {launch.max_restarts} in {decision.pause:g} s"
            )
            time.sleep(decision.pause)
            hosts, job = self._next(hosts)

    def _ask(self) -> dict[str, Finding]:
        launch = self.launch
        if launch.hostfile is None:
            return {}
        written = list(addresses_of(launch.hostfile_text).values())
        remote = RemoteLogin(
            agent=tuple(shlex.split(launch.agent or "ssh")),
            python=launch.python,
            daemon=str(self.mpirun.with_name("prted")),
        )
        return check_hosts(dict(zip(launch.hosts, written, strict=True)), remote)

    def _job(self) -> MpirunJob:
        launch = self.launch
        return MpirunJob(
            mpirun=self.mpirun,
            python=launch.python,
            command=launch.command,
            options=launch.options,
            ranks=launch.ranks,
            hostfile=None if launch.hostfile is None else str(launch.hostfile),
            agent=launch.agent,
            extra=launch.extra,
        )

    def _start(self, hosts: Sequence[str], job: MpirunJob) -> Attempt:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            gone, _ = changes(self.launch.hosts, hosts)
            if gone and self.launch.hostfile is not None:
                some = directory / self.launch.hostfile.name
                some.write_text(without_hosts(self.launch.hostfile_text, gone), encoding="utf-8")
                job = replace(job, hostfile=str(some))
            print(job, flush=True)
            before = self._checkpoints()
            status = self._status_of(job, directory / "all ranks have ended well")
            now = self._checkpoints()
        gained = None if before is None or now is None else bool(now - before)
        return Attempt(status, tuple(hosts), gained)

    def _status_of(self, job: MpirunJob, mark: Path) -> int:
        status = self.supervisor.run(job.words, mark)
        # mpirun says 0 too where its login on another host was killed. What rank 0 says can be seen
        # where it runs on this host.
        several = len(set(self.launch.hosts)) > 1
        if status == 0 and several and not mark.exists() and is_local(self.launch.hosts[0]):
            _say("mpirun ended as if all were well, but the ranks had not come to their end")
            return 1
        return status

    def _next(self, before: Sequence[str]) -> tuple[tuple[str, ...], MpirunJob]:
        """Return the hosts that answer, and the job for them."""
        launch, config = self.launch, self.launch.config
        assert config is not None, "only train is started again"
        findings = self._ask()
        left = tuple(host for host in launch.hosts if host not in findings)
        gone, back = changes(before, left)
        for host in gone:
            _say(f"goes on without {findings[host]}")
        for host in back:
            _say(f"{host} is back")
        first = launch.hosts[0]
        if first in findings:
            finding = findings[first]
            raise GaveUp(f"{first}, the host of rank 0: {finding.problem}: {finding.remedy}")
        job = self._job()
        if len(left) < len(launch.hosts):
            machines = [machine for machine in launch.machines if machine.host in left]
            each = machine_of_each_rank(machines)[: launch.ranks]
            try:
                layout = plan_again(
                    launch.options, RunSpec.of(config), launch.given, each, config.config
                )
            except UserError as error:
                raise GaveUp(one_line(error)) from None
            _say(layout.line)
            job = replace(job, ranks=layout.ranks, options=layout.options)
        elif back:
            _say("all hosts are there: layout as given")
        if config.resume == "auto" or any(attempt.gained for attempt in self.attempts):
            # Not where the user wants no older run's checkpoint, and this one has none yet.
            job = replace(job, options=replaced(job.options, resume="auto"))
        return left, job

    def _checkpoints(self) -> frozenset[tuple[int, int]] | None:
        """Return (step, when it was committed) of the checkpoints; None where that cannot be
        seen."""
        launch, config = self.launch, self.launch.config
        if config is None or config.checkpoint_dir is None or not is_local(launch.hosts[0]):
            return None
        store = Store(Path(config.checkpoint_dir))
        try:
            return frozenset(
                (step, (store.path(step) / MARKER).stat().st_mtime_ns) for step in store.steps()
            )
        except OSError:
            return None


def _say(text: str) -> None:
    print(f"launch: {text}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
