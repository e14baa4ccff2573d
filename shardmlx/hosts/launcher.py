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
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from shardmlx.checkpoint.store import MARKER
from shardmlx.common.cli import BAD_INPUT
from shardmlx.common.environment import EARLIER_END, find_home, keep_awake
from shardmlx.common.formatting import plural
from shardmlx.common.hang_up import outlive_readers
from shardmlx.common.passed_stdin import pass_stdin_on
from shardmlx.errors import Stopped, UserError, one_line
from shardmlx.hosts import probe_script
from shardmlx.hosts.findings import Finding
from shardmlx.hosts.host_faults import HostCheck, temporary_fault
from shardmlx.hosts.launch_options import (
    LaunchOptions,
    entries,
    plan_again,
    read_options,
    replaced,
)
from shardmlx.hosts.leftovers import SECONDS_FOR_A_HOST, end_here, end_there, name_of
from shardmlx.hosts.mpirun import check_path, mpirun_path, settings_for
from shardmlx.hosts.output_relay import LastWords, SaidByRank0
from shardmlx.hosts.reachability import at_once, check_hosts, is_local, local_hosts
from shardmlx.hosts.remote_login import Login, RemoteLogin
from shardmlx.hosts.supervisor import STOPPED_IN_ORDER, StartLimit, Supervisor

FAILED = 1

LONGEST_PAUSE = 60.0  # seconds before a start: about as many as a machine needs to restart
SECONDS_OF_SERVICE = 600.0  # after which a server has run well: restarts are counted anew
SECONDS_FOR_HOSTS = 300.0  # for all hosts of a server to answer again; a restart takes a minute
SECONDS_BETWEEN_LOOKS = 10.0


class GaveUp(Exception):
    """The reason for no further start."""


@dataclass(frozen=True, slots=True)
class Start:
    """Hosts, ranks and options of the command, for a start of the job."""

    hosts: tuple[str, ...]
    ranks: int
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Attempt:
    """The end of one start of a job: ``gained`` a newer checkpoint; None if that is unseen."""

    status: int
    hosts: tuple[str, ...] = ()
    gained: bool | None = None


def final_status(
    attempts: Sequence[Attempt], max_restarts: int, stopped_by: int | None
) -> int | None:
    """Return launch's exit status; None if the job is to start again. Raises ``GaveUp``."""
    last = attempts[-1]
    if last.status == 0:
        return 0
    if stopped_by is not None:
        return 128 + stopped_by
    # Beside bad input: mpirun itself was asked to stop in order.
    if last.status in (BAD_INPUT, *STOPPED_IN_ORDER):
        return last.status
    if max_restarts == 0:
        return FAILED
    if len(attempts) > max_restarts:
        raise GaveUp(f"{plural(max_restarts, 'restart')} used up (see --max-restarts)")
    two = attempts[-2:]
    if len(two) == 2 and two[0].hosts == last.hosts and all(each.gained is False for each in two):
        raise GaveUp(
            "failed twice in a row on the same hosts without a new checkpoint: fix what is said "
            "above, or save more often (--checkpoint-every)"
        )
    return None


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
    """Starts of a job until it is done, or there is a reason to give up."""

    launch: LaunchOptions
    mpirun: Path
    supervisor: Supervisor
    attempts: list[Attempt] = field(default_factory=list)
    checked: HostCheck = field(default_factory=HostCheck)
    _answering: tuple[str, ...] = ()
    """The hosts that answered before the last start."""
    _earlier_end: str = ""
    """How the last start of a server of loops ended, which the next one tells its clients."""

    def run(self) -> int:
        launch = self.launch
        if not all(map(is_local, launch.hosts)):
            check_path(self.mpirun)
        findings = self._ask()
        for finding in findings.values():
            print(f"shardmlx: error: {finding}", file=sys.stderr)
        if findings:
            return BAD_INPUT
        if launch.place:
            _say(f"each host has its own Python by the link {launch.place}")
        for note in self.checked.notes:
            _say(str(note))
        if launch.checkpoints is not None and launch.chose_directory:
            _say(f"checkpoints in {launch.checkpoints.checkpoint_dir}, to restart from")
        self._answering = launch.hosts
        start = Start(launch.in_use(launch.hosts), launch.ranks, launch.options)
        if spares := [host for host in launch.hosts if host not in start.hosts]:
            _say(f"{' and '.join(spares)} would take the place of a host that is lost")
        while True:
            started = time.monotonic()
            self.attempts.append(self._run(start))
            if launch.command == "serve" and time.monotonic() - started > SECONDS_OF_SERVICE:
                del self.attempts[:-1]
            status = final_status(self.attempts, launch.max_restarts, self.supervisor.stopped_by)
            if status is not None:
                in_order = self.attempts[-1].status in STOPPED_IN_ORDER
                if in_order and launch.checkpoints and launch.checkpoints.resume == "auto":
                    _say("run the same command to go on")
                return status
            failed = len(self.attempts)
            pause = min(2.0 ** (failed - 1), LONGEST_PAUSE)
            _say(
                f"the job failed with status {self.attempts[-1].status}: restart {failed} of "
                f"{launch.max_restarts} in {pause:g} s"
            )
            time.sleep(pause)
            start = self._next(start)

    def _ask(self) -> dict[str, Finding]:
        """Return what keeps hosts from running ranks, by host."""
        if self.launch.flags.hostfile is None:
            here = socket.gethostname()
            fault = temporary_fault(here, probe_script.temporary_fault())
            return {} if fault is None else {here: fault}
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

    def _run(self, start: Start) -> Attempt:
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
                    _say(f"{' and '.join(hosts)} have one address in {network}: it is left out")
            print(f"$ {shlex.join(words)}", flush=True)
            before = self._checkpoints()
            status = self._status_of(words, start.hosts, directory / "status")
            now = self._checkpoints()
        gained = None if before is None or now is None else bool(now - before)
        return Attempt(status, start.hosts, gained)

    def _status_of(self, words: Sequence[str], hosts: Sequence[str], mark: Path) -> int:
        """Run mpirun on ``hosts``; return the job's status. Raises ``GaveUp`` if no rank begins
        within the job's --timeout."""
        said = SaidByRank0(mark)
        own = local_hosts(hosts)
        elsewhere = [host for host in hosts if host not in own]
        seconds = self.launch.timeout
        last_words = LastWords() if self.launch.of_loops else None
        ended = self.supervisor.run(
            words,
            said,
            ranks_here=not elsewhere,
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
        if said.status is not None:
            return said.status
        # mpirun returns 0 even after its login on another host was killed.
        if self.supervisor.stopped_by is None and (ended.status == 0 or ended.killed):
            how = "was killed" if ended.killed else "ended as if all were well"
            _say(f"mpirun {how}, but the ranks had not come to their end")
        return ended.status or FAILED

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

    def _next(self, before: Start) -> Start:
        """Return the next start, on the hosts that answer, after ``before``. Spare hosts take the
        place of those that do not."""
        launch = self.launch
        if launch.checkpoints is None:
            hosts = self._wait_for_hosts()
            _say_who_takes_over([host for host in hosts if host not in before.hosts])
            lost = "its prefix cache is lost"
            if launch.of_loops:
                lost = (
                    "models and snapshots that were not saved are lost, and saved states are there"
                )
            _say(f"the server starts again; {lost}")
            return Start(hosts, launch.ranks, launch.options)
        findings = self._ask()
        first = launch.hosts[0]
        if first in findings:
            raise GaveUp(f"the host of rank 0, {findings[first]}")
        left = tuple(host for host in launch.hosts if host not in findings)
        for host in self._answering:
            if host in findings:
                _say(f"goes on without {findings[host]}")
        back = [host for host in left if host not in self._answering]
        for host in back:
            _say(f"{host} is back")
        self._answering = left
        hosts = launch.in_use(left)
        _say_who_takes_over([host for host in hosts if host not in (*before.hosts, *back)])
        ranks = min(launch.slots_of(hosts), launch.ranks)
        options = launch.options
        if ranks < launch.ranks or launch.map_names(findings):
            try:
                options, line = plan_again(launch, ranks)
            except UserError as error:
                raise GaveUp(one_line(error)) from None
            _say(line)
        elif before.ranks < ranks:
            all_there = "enough hosts are" if findings else "all hosts are"
            _say(f"{all_there} there: layout as given")
        if launch.checkpoints.resume == "auto" or any(attempt.gained for attempt in self.attempts):
            # Not if the user excludes an older run's checkpoint, and this one has none yet.
            options = replaced(options, resume="auto")
        return Start(hosts, ranks, options)

    def _wait_for_hosts(self) -> tuple[str, ...]:
        """Wait until as many hosts answer as the ranks need, the first among them; return these:
        their parts of the model were planned for so many."""
        launch = self.launch
        end = time.monotonic() + SECONDS_FOR_HOSTS
        missing = ""
        while findings := self._ask():
            left = [host for host in launch.hosts if host not in findings]
            if left[:1] == [launch.hosts[0]] and launch.slots_of(left) >= launch.ranks:
                return launch.in_use(left)
            text = "; ".join(map(str, findings.values()))
            if time.monotonic() > end:
                raise GaveUp(text)
            if text != missing:
                _say(f"waits for {text}")
                missing = text
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return launch.in_use(launch.hosts)

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


def _say_who_takes_over(hosts: Sequence[str]) -> None:
    for host in hosts:
        _say(f"{host} takes over")


def _say(text: str) -> None:
    print(f"launch: {text}", flush=True)
