"""The starts of a job: when it starts again, on which hosts, and when launch gives up.

All that happens outside, ``Surroundings`` does: starting mpirun, asking hosts, and waiting. No
processes, no clocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardmlx.common.cli import BAD_INPUT
from shardmlx.common.formatting import plural
from shardmlx.errors import UserError, one_line
from shardmlx.hosts.findings import Finding
from shardmlx.hosts.launch_options import LaunchOptions, plan_again, replaced
from shardmlx.hosts.supervisor import STOPPED_IN_ORDER, Ended

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


class Surroundings(Protocol):
    """Hosts, mpirun and a clock, as far as the starts of a job need them."""

    @property
    def stopped_by(self) -> int | None:
        """The first signal that asked launch to stop."""

    def ask(self) -> Mapping[str, Finding]:
        """Return what keeps hosts from running ranks, by host."""

    def start(self, start: Start) -> Attempt:
        """Start the job, and wait for its end. Raises ``GaveUp`` if no rank begins."""

    def now(self) -> float:
        """Return the seconds of a clock."""

    def sleep(self, seconds: float) -> None:
        """Wait. Raises ``Stopped`` if launch is asked to stop meanwhile."""

    def say(self, text: str) -> None:
        """Tell the user."""


def job_status(ended: Ended, told: int | None, *, was_stopped: bool) -> tuple[int, str]:
    """Return the status of a job, and what is to be said of its mpirun, if anything: rank 0 has
    ``told`` the status if the job came to its end, and no other word of a good end counts."""
    if told is not None:
        return told, ""
    # mpirun returns 0 even after its login on another host was killed.
    if was_stopped or (ended.status != 0 and not ended.killed):
        return ended.status or FAILED, ""
    how = "was killed" if ended.killed else "ended as if all were well"
    return ended.status or FAILED, f"mpirun {how}, but the ranks had not come to their end"


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


def pause_before(restart: int) -> float:
    """Return the seconds before a restart, counted from 1: each time twice as many."""
    doublings = min(restart - 1, int(LONGEST_PAUSE))  # a float holds no more than 1023 of them
    return min(2.0**doublings, LONGEST_PAUSE)


class JobStarts:
    """Starts of a job, all of whose hosts answer at first, until it is done."""

    def __init__(self, launch: LaunchOptions, surroundings: Surroundings) -> None:
        self.launch = launch
        self._surroundings = surroundings
        self._say = surroundings.say
        self._resumes = launch.checkpoints is not None and launch.checkpoints.resume == "auto"
        self._attempts: list[Attempt] = []
        self._answering = launch.hosts
        """The hosts that answered before the last start."""

    def run(self) -> int:
        """Start the job as often as it makes sense; return launch's exit status. Raises ``GaveUp``
        with the reason for no further start, and ``Stopped``."""
        launch = self.launch
        start = Start(launch.in_use(launch.hosts), launch.ranks, launch.options)
        if spares := [host for host in launch.hosts if host not in start.hosts]:
            self._say(f"{' and '.join(spares)} would take the place of a host that is lost")
        while True:
            started = self._surroundings.now()
            last = self._surroundings.start(start)
            self._attempts.append(last)
            seconds = self._surroundings.now() - started
            if launch.command == "serve" and seconds > SECONDS_OF_SERVICE:
                self._attempts = [last]
            status = final_status(
                self._attempts, launch.max_restarts, self._surroundings.stopped_by
            )
            if status is not None:
                if last.status in STOPPED_IN_ORDER and self._resumes:
                    self._say("run the same command to go on")
                return status
            failed = len(self._attempts)
            pause = pause_before(failed)
            self._say(
                f"the job failed with status {last.status}: restart {failed} of "
                f"{launch.max_restarts} in {pause:g} s"
            )
            self._surroundings.sleep(pause)
            start = self._next_server(start) if launch.checkpoints is None else self._next(start)

    def _next_server(self, before: Start) -> Start:
        """Return the next start of a server, after ``before``, once there are hosts for it."""
        hosts = self._wait_for_hosts()
        self._say_who_takes_over([host for host in hosts if host not in before.hosts])
        lost = "its prefix cache is lost"
        if self.launch.of_loops:
            lost = "models and snapshots that were not saved are lost, and saved states are there"
        self._say(f"the server starts again; {lost}")
        return Start(hosts, self.launch.ranks, self.launch.options)

    def _next(self, before: Start) -> Start:
        """Return the next start, on the hosts that answer, after ``before``. Spare hosts take the
        place of those that do not."""
        launch = self.launch
        findings = self._surroundings.ask()
        first = launch.hosts[0]
        if first in findings:
            raise GaveUp(f"the host of rank 0, {findings[first]}")
        left = tuple(host for host in launch.hosts if host not in findings)
        back = self._note_changes(left, findings)
        hosts = launch.in_use(left)
        self._say_who_takes_over([host for host in hosts if host not in (*before.hosts, *back)])
        ranks = min(launch.slots_of(hosts), launch.ranks)
        options = launch.options
        if ranks < launch.ranks or launch.map_names(findings):
            try:
                options, line = plan_again(launch, ranks)
            except UserError as error:
                raise GaveUp(one_line(error)) from None
            self._say(line)
        elif before.ranks < ranks:
            all_there = "enough hosts are" if findings else "all hosts are"
            self._say(f"{all_there} there: layout as given")
        if self._resumes or any(attempt.gained for attempt in self._attempts):
            # Not if the user excludes an older run's checkpoint, and this one has none yet.
            options = replaced(options, resume="auto")
        return Start(hosts, ranks, options)

    def _note_changes(self, left: tuple[str, ...], findings: Mapping[str, Finding]) -> list[str]:
        """Say which hosts are gone, and which are back; return these."""
        for host in self._answering:
            if host in findings:
                self._say(f"goes on without {findings[host]}")
        back = [host for host in left if host not in self._answering]
        for host in back:
            self._say(f"{host} is back")
        self._answering = left
        return back

    def _wait_for_hosts(self) -> tuple[str, ...]:
        """Wait until as many hosts answer as the ranks need, the first among them; return these:
        their parts of the model were planned for so many."""
        launch = self.launch
        end = self._surroundings.now() + SECONDS_FOR_HOSTS
        missing = ""
        while findings := self._surroundings.ask():
            left = [host for host in launch.hosts if host not in findings]
            if left[:1] == [launch.hosts[0]] and launch.slots_of(left) >= launch.ranks:
                return launch.in_use(left)
            text = "; ".join(map(str, findings.values()))
            if self._surroundings.now() > end:
                raise GaveUp(text)
            if text != missing:
                self._say(f"waits for {text}")
                missing = text
            self._surroundings.sleep(SECONDS_BETWEEN_LOOKS)
        return launch.in_use(launch.hosts)

    def _say_who_takes_over(self, hosts: Sequence[str]) -> None:
        for host in hosts:
            self._say(f"{host} takes over")
