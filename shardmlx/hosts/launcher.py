"""Starts a job under mpirun, and starts it again when it fails, on the hosts that are left.

It looks whether the hosts answer, prints the mpirun command and runs it; after a failure it goes on
from the newest checkpoint. No MLX, no MPI.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardmlx.checkpoint.store import MARKER, Store
from shardmlx.costmodel.hostfile import machine_of_each_rank
from shardmlx.errors import Stopped, UserError, one_line
from shardmlx.hosts.degraded_layout import plan_again
from shardmlx.hosts.findings import Finding
from shardmlx.hosts.launch_options import LaunchOptions, read_options
from shardmlx.hosts.mpirun import MpirunJob, find_mpirun, replaced
from shardmlx.hosts.mpirun_settings import settings_for
from shardmlx.hosts.reachability import (
    RemoteLogin,
    addresses_of,
    check_hosts,
    is_local,
    without_hosts,
)
from shardmlx.hosts.restart_policy import FAILED, Attempt, after, changes
from shardmlx.hosts.supervisor import Supervisor

SECONDS_OF_SERVICE = 600.0
"""Seconds after which a server has run well: restarts are counted anew."""

SECONDS_FOR_HOSTS = 300.0
"""Seconds for all hosts of a server to answer again: a machine that restarts needs one minute."""

SECONDS_BETWEEN_LOOKS = 10.0


class GaveUp(Exception):
    """The reason for no further start."""


def run(words: Sequence[str]) -> int:
    """Start the job as often as it makes sense.

    Return the exit status: 0 done; 1 given up; 2 bad input; 128 + n after signal n.
    """
    options = read_options(words)
    supervisor = Supervisor(options.control)
    with supervisor.listening():
        try:
            return Launcher(options, find_mpirun(), supervisor).run()
        except Stopped as stop:
            return 128 + stop.signal
        except GaveUp as error:
            print(f"shardmlx: failed: launch gives up: {error}", file=sys.stderr, flush=True)
            return FAILED


@dataclass
class Launcher:
    """Starts of a job until it is done, or there is a reason to give up."""

    launch: LaunchOptions
    mpirun: Path
    supervisor: Supervisor
    attempts: list[Attempt] = field(default_factory=list)

    def run(self) -> int:
        """Start the job as often as it makes sense; return the exit status."""
        launch = self.launch
        findings = self._ask()
        for finding in findings.values():
            print(f"shardmlx: error: {finding}", file=sys.stderr)
        if findings:
            return 2
        if launch.checkpoints is not None and launch.chose_directory:
            _say(f"checkpoints in {launch.checkpoints.checkpoint_dir}, to restart from")
        hosts, job = launch.hosts, self._job()
        while True:
            started = time.monotonic()
            self.attempts.append(self._start(hosts, job))
            if launch.command == "serve" and time.monotonic() - started > SECONDS_OF_SERVICE:
                del self.attempts[:-1]
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
            settings=settings_for(
                () if launch.hostfile is None else launch.hosts, launch.ranks, launch.extra
            ),
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
            status = self._status_of(job, directory / "status")
            now = self._checkpoints()
        gained = None if before is None or now is None else bool(now - before)
        return Attempt(status, tuple(hosts), gained)

    def _status_of(self, job: MpirunJob, mark: Path) -> int:
        hosts = self.launch.hosts
        status = self.supervisor.run(job.words, mark, ranks_here=all(map(is_local, hosts)))
        if mark.exists():
            return int(mark.read_text(encoding="utf-8"))
        # mpirun returns 0 even after its login on another host was killed. Rank 0's own status can
        # be seen if it runs on this host. The doctor may end without MPI, if hosts cannot connect.
        several = len(set(hosts)) > 1 and self.launch.command != "doctor"
        if status == 0 and several and is_local(hosts[0]):
            _say("mpirun ended as if all were well, but the ranks had not come to their end")
            return 1
        return status

    def _next(self, before: Sequence[str]) -> tuple[tuple[str, ...], MpirunJob]:
        """Return the hosts that answer, and the job for them."""
        launch = self.launch
        if launch.run is None or launch.checkpoints is None:
            self._wait_for_hosts()
            _say("the server starts again; its prefix cache is lost")
            return launch.hosts, self._job()
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
                layout = plan_again(launch.options, launch.run, each, launch.config_file)
            except UserError as error:
                raise GaveUp(one_line(error)) from None
            _say(layout.line)
            job = replace(job, ranks=layout.ranks, options=layout.options)
        elif back:
            _say("all hosts are there: layout as given")
        if launch.checkpoints.resume == "auto" or any(attempt.gained for attempt in self.attempts):
            # Not if the user excludes an older run's checkpoint, and this one has none yet.
            job = replace(job, options=replaced(job.options, resume="auto"))
        return left, job

    def _wait_for_hosts(self) -> None:
        """Wait until all hosts answer: their parts of the model were planned for all of them."""
        end = time.monotonic() + SECONDS_FOR_HOSTS
        missing = ""
        while findings := self._ask():
            text = "; ".join(map(str, findings.values()))
            if time.monotonic() > end:
                raise GaveUp(text)
            if text != missing:
                _say(f"waits for {text}")
                missing = text
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _checkpoints(self) -> frozenset[tuple[int, int]] | None:
        """Return the steps of the checkpoints and when each was committed; None if unseen."""
        options, first = self.launch.checkpoints, self.launch.hosts[0]
        if options is None or options.checkpoint_dir is None or not is_local(first):
            return None
        store = Store(Path(options.checkpoint_dir))
        try:
            return frozenset(
                (step, (store.path(step) / MARKER).stat().st_mtime_ns) for step in store.steps()
            )
        except OSError:
            return None


def _say(text: str) -> None:
    print(f"launch: {text}", flush=True)
