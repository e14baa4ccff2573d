"""Starts a job under mpirun on the hosts that answer; after a failure again, from the newest
checkpoint. No MLX, no MPI.
"""

from __future__ import annotations

import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from shardmlx.checkpoint.store import MARKER
from shardmlx.common.cli import BAD_INPUT
from shardmlx.common.environment import EARLIER_END, find_home, keep_awake
from shardmlx.common.hang_up import outlive_readers
from shardmlx.common.passed_stdin import pass_stdin_on
from shardmlx.errors import Stopped
from shardmlx.hosts import probe_script
from shardmlx.hosts.findings import Finding
from shardmlx.hosts.host_faults import HostCheck, temporary_fault
from shardmlx.hosts.launch_options import LaunchOptions, entries, read_options
from shardmlx.hosts.leftovers import SECONDS_FOR_A_HOST, end_here, end_there, name_of
from shardmlx.hosts.mpirun import check_path, mpirun_path, settings_for
from shardmlx.hosts.output_relay import LastWords, SaidByRank0
from shardmlx.hosts.reachability import at_once, check_hosts, is_local, local_hosts
from shardmlx.hosts.remote_login import Login, RemoteLogin
from shardmlx.hosts.restarts import FAILED, Attempt, GaveUp, JobStarts, Start, job_status
from shardmlx.hosts.supervisor import StartLimit, Supervisor


def run(words: Sequence[str]) -> int:
    """Start the job as often as it makes sense; return the exit status."""
    options = read_options(words)
    find_home()
    outlive_readers()
    with redirect_stdout(sys.stderr) if options.prints_json else nullcontext():
        return _run(options)


def _run(options: LaunchOptions) -> int:
    """Start the job; what this process says itself goes to ``sys.stdout``."""
    if options.control.reads_stdin:
        pass_stdin_on(whole=options.command == "generate")
    supervisor = Supervisor(options.control)
    keep_awake()  # between two starts, too
    with supervisor.listening():
        try:
            place = options.place
            mpirun = Path(place, "bin", "mpirun") if place else mpirun_path()
            status = Launcher(options, mpirun, supervisor).run()
            if (
                status == 0
                and supervisor.stopped_by == signal.SIGHUP
                and options.ends_with_its_terminal
            ):
                return 128 + signal.SIGHUP  # nobody has read it
            return status
        except Stopped as stop:
            return 128 + stop.signal
        except GaveUp as error:
            print(f"shardmlx: failed: launch gives up: {error}", file=sys.stderr, flush=True)
            return FAILED


@dataclass
class Launcher:
    """The hosts of a job, its mpirun, and the terminal: the ``Surroundings`` of its restarts."""

    launch: LaunchOptions
    mpirun: Path
    supervisor: Supervisor
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    checked: HostCheck = field(default_factory=HostCheck)
    _earlier_end: str = ""
    """The end of the last start of a server of loops: the next one tells its clients."""

    def run(self) -> int:
        """Start the job if all hosts answer, until it is done; return the exit status. Raises
        ``GaveUp`` and ``Stopped``."""
        launch = self.launch
        if not all(map(is_local, launch.hosts)):
            check_path(self.mpirun)
        findings = self.ask()
        for finding in findings.values():
            print(f"shardmlx: error: {finding}", file=sys.stderr)
        if findings:
            return BAD_INPUT
        if launch.place:
            self.say(f"each host has its own Python by the link {launch.place}")
        for note in self.checked.notes:
            self.say(str(note))
        if launch.checkpoints is not None and launch.chose_directory:
            self.say(f"checkpoints in {launch.checkpoints.checkpoint_dir}, to restart from")
        return JobStarts(launch, self).run()

    @property
    def stopped_by(self) -> int | None:
        """The first signal that asked launch to stop."""
        return self.supervisor.stopped_by

    def say(self, text: str) -> None:
        """Print a line of launch's own."""
        print(f"launch: {text}", flush=True)

    def ask(self) -> dict[str, Finding]:
        """Return what keeps hosts from running ranks, by host."""
        if self.launch.flags.hostfile is None:
            fault = temporary_fault(socket.gethostname(), probe_script.temporary_fault())
            return {} if fault is None else {self.launch.hosts[0]: fault}
        logins = {each.host: Login(each.login, each.port) for each in self.launch.machines}
        self.checked = check_hosts(logins, self._remote)
        return dict(self.checked.findings)

    @property
    def _remote(self) -> RemoteLogin:
        flags = self.launch.flags
        launch = self.launch
        return RemoteLogin.of(
            flags.ssh_command,
            flags.python,
            self.mpirun,
            launch.files,
            launch.pythons,
            launch.place,
        )

    def _words(self, start: Start, hostfile: Path | None) -> list[str]:
        launch, flags = self.launch, self.launch.flags
        extra, ssh = shlex.split(flags.mpirun_options), flags.ssh_command
        agent = () if ssh is None else ("--prtemca", "plm_ssh_agent", ssh)
        python = f"{launch.place}/bin/python3" if launch.place else flags.python
        return [
            str(self.mpirun),
            # mpirun would follow the link, and name its target to other hosts.
            *(("--prefix", launch.place) if launch.place else ()),
            *(() if hostfile is None else ("--hostfile", str(hostfile))),
            *("-n", str(start.ranks)),
            *agent,
            *settings_for(
                () if hostfile is None else launch.hosts,
                launch.ranks,
                extra,
                asks_for_shell=self.checked.asks_for_shell,
                without=tuple(self.checked.shared_networks),
            ),
            *extra,
            *(python, "-m", f"shardmlx.{launch.command}", *start.options),
        ]

    def start(self, start: Start) -> Attempt:
        """Run mpirun once; return what came of it. Raises ``GaveUp`` if no rank begins."""
        given = self.launch.flags.hostfile
        hostfile = None if given is None else Path(given)
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            lines = entries(self.launch.machines, start.hosts)
            if hostfile is not None and lines is not None:
                hostfile = directory / hostfile.name
                hostfile.write_text(lines, encoding="utf-8")
            words = self._words(start, hostfile)
            for network, hosts in self.checked.shared_networks.items():
                if any(network in word for word in words):
                    self.say(f"{' and '.join(hosts)} have one address in {network}: it is left out")
            print(f"$ {shlex.join(words)}", flush=True)
            said = SaidByRank0(directory / "status")
            before = self._checkpoints()
            status = self._status_of(words, start.hosts, said)
            now = self._checkpoints()
        gained = True if said.has_saved else None
        if before is not None and now is not None:
            gained = bool(now - before)
        return Attempt(status, start.hosts, gained)

    def _status_of(self, words: Sequence[str], hosts: Sequence[str], said: SaidByRank0) -> int:
        """Run mpirun on ``hosts``, whose rank 0 tells ``said`` its words; return the job's status.
        Raises ``GaveUp`` if no rank begins within the job's --timeout."""
        own = local_hosts(hosts)
        elsewhere = [host for host in hosts if host not in own]
        seconds = self.launch.timeout
        last_words = LastWords() if self.launch.of_loops else None
        ended = self.supervisor.run(
            words,
            said,
            rank_0_here=hosts[0] not in elsewhere,
            limit=StartLimit(seconds, self._why_no_rank_begins) if elsewhere else None,
            last_words=last_words,
            variables={EARLIER_END: self._earlier_end} if self._earlier_end else {},
        )
        if last_words is not None:
            self._earlier_end = last_words.why
        if elsewhere:
            name = name_of(ended.pid, socket.gethostname())
            end_here(name)  # a login on a host that is cut off would wait for it
            if not said.has_begun:
                self._clear(name, elsewhere)
        if ended.too_late:
            raise GaveUp(f"mpirun has started no rank within {seconds:g} s (see --timeout)")
        was_stopped = self.supervisor.stopped_by is not None
        status, note = job_status(ended, said.status, was_stopped=was_stopped)
        if note:
            self.say(note)
        return status

    def _why_no_rank_begins(self, waited: float) -> list[str]:
        """Return lines about what keeps mpirun from starting its ranks for ``waited`` seconds: it
        waits without limit for its daemons, which must connect to it."""
        from shardmlx.hosts.doctor_ssh import ProbedHost, probe_hosts  # for this alone

        own = local_hosts(self.launch.hosts)
        hosts = [
            ProbedHost(each.host, each.login, each.host in own) for each in self.launch.machines
        ]
        _, findings = probe_hosts(hosts, self._remote)
        found = [str(each) for each in findings] or [
            "all hosts answer, and their Pythons connect in both directions: see whether a "
            f"firewall stops {self.mpirun.with_name('prted')} or {self.mpirun}"
        ]
        until = f"it is ended after {self.launch.timeout:g} s (--timeout)"
        said = [f"mpirun has started no rank for {waited:g} s; {until}", *found]
        return [f"launch: {each}" for each in said]

    def _clear(self, name: str, hosts: Sequence[str]) -> None:
        """End what an mpirun of that name has left behind on other hosts."""
        logins = {
            each.host: Login(each.login, each.port)
            for each in self.launch.machines
            if each.host in hosts
        }
        work = {
            host: partial(end_there, name, self._remote.to(host).command(login))
            for host, login in logins.items()
        }
        at_once(work, SECONDS_FOR_A_HOST)

    def _checkpoints(self) -> frozenset[tuple[Path, int]] | None:
        """Return the checkpoints, of all runs, and when each was committed; None if unseen."""
        options, first = self.launch.checkpoints, self.launch.hosts[0]
        if options is None or options.checkpoint_dir is None or not is_local(first):
            return None
        try:
            marks = Path(options.checkpoint_dir).rglob(MARKER)
            return frozenset((mark.parent, mark.stat().st_mtime_ns) for mark in marks)
        except OSError:
            return None
