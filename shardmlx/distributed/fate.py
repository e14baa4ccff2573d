"""The fate of a job, as one rank sees it: events go in, actions come out.

Rank 0 hears every rank, and every rank hears rank 0. ``JobFate`` decides: each event is a call, at
a time in seconds of any clock. The thread of ``job_watch`` makes the calls, and carries out the
actions. No MLX, no MPI, no messages, no threads, no clocks.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from shardmlx.distributed.signals import STOPS

# Seconds.
PERIOD = 0.5  # between two signs of life
SHORTEST_SILENCE = 3.0  # at least: signs of life may be late on a machine short of memory
LONGEST_SILENCE = 60.0  # until a silent rank is lost, however long a message may take
SECONDS_OF_QUIET = 5.0  # until a silent rank is in doubt, and requests that need it may wait
OWN_SLEEP = 2.0  # asleep, after which a process cannot blame its peers for hearing nothing
SECONDS_TO_BE_HEARD = 0.1  # for the last message of an ended process, and for answers to mpirun
HURRY = 0.02  # between two looks while something is going on
SECONDS_TO_RAISE = 4.0  # for the main thread, after a failure, to reach a wait and report it
SECONDS_TO_BE_ENDED = 5.0  # for the reporting rank to end the job; then each process ends itself
# After a SIGCONT, in which a SIGTERM comes from mpirun: it ends all ranks with both, 0.25 s apart,
# and kills them 0.25 s later.
MPIRUN_KILLS = 1.0


class State(Enum):
    """State of a rank, as it reports itself."""

    ALIVE = auto()
    LEFT = auto()  # it has done its part, and leaves in order
    REPORTED = auto()  # it has reported the failure, and ends the job


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life: the rank's activity, and the signals that asked it to stop so far."""

    activity: str
    signals: tuple[int, ...] = ()
    state: State = State.ALIVE


@dataclass(frozen=True, slots=True)
class Look:
    """The state of this host.

    ``processes`` has the peers' processes that are ``gone`` or ``stopped``; ``launched`` tells
    whether mpirun, or its daemon, still runs, and ``failed`` whether this rank cannot go on, which
    its main thread is to report.
    """

    activity: str
    processes: Mapping[int, str | None] = field(default_factory=dict)
    launched: bool = True
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """Action: give a sign of life."""

    peers: tuple[int, ...]
    beat: Beat


@dataclass(frozen=True, slots=True)
class Fail:
    """Action: make the main thread's next wait raise that a peer is lost."""

    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """Action: report the reason, and end all ranks with status ``code``. If a peer has ``died``,
    also report where this rank was."""

    code: int
    reason: str
    died: bool = False


class Do(Enum):
    """Actions without arguments."""

    STAY_SILENT = auto()  # report nothing more of the end of the job: a peer has
    GIVE_UP = auto()  # report the failure that the main thread has not raised, and end all ranks
    EXIT = auto()  # end this process: the job has ended without it


Action = Send | Fail | End | Do


@dataclass(slots=True)
class _Peer:
    name: str
    heard: float
    last: Beat = field(default_factory=lambda: Beat("starting"))
    gone_since: float | None = None


class JobFate:
    """State of the job whose ranks are called ``names``, as ``rank`` knows it since ``now``.

    ``limit`` is the seconds after which a silent rank is lost.
    """

    def __init__(self, rank: int, names: Sequence[str], limit: float, now: float) -> None:
        self.rank = rank
        self.limit = limit
        self.quiet: str | None = None
        """The rank in doubt, in words, if there is one."""
        self.pause = PERIOD
        """Seconds until the next look."""
        self.others = tuple(peer for peer in range(len(names)) if peer != rank)
        self.watched = self.others if rank == 0 else (0,)
        """Ranks that this one hears."""
        self._peers = {peer: _Peer(names[peer], now) for peer in self.watched}
        self._looked = now
        self._sent: float | None = None
        self._own: tuple[int, ...] = ()
        self._continued = -float("inf")
        self._killed: float | None = None
        self._expects_stop = False
        self._failure_reported_at: float | None = None
        self._failed: float | None = None
        self._over = False
        self._activity = "starting"

    def last_activity(self, peer: int) -> str | None:
        """Return a rank's activity at its last sign of life, if this rank watches it."""
        return self._peers[peer].last.activity if peer in self._peers else None

    def stop_requested(self) -> int | None:
        """Return the first signal that asked a rank to stop. The run is then expected to stop in
        order, so a first signal no longer interrupts it."""
        self._expects_stop = True
        return self._stop()

    def _stop(self) -> int | None:
        if self._own:
            return self._own[0]
        return next(
            (peer.last.signals[0] for peer in self._peers.values() if peer.last.signals), None
        )

    def signalled(self, numbers: Iterable[int], now: float) -> list[Action]:
        """Return the actions after this process was sent signals."""
        for number in numbers:
            if number == signal.SIGCONT:
                self._continued = now
            elif number in STOPS:
                self._own += (number,)
                if number == signal.SIGTERM and now - self._continued < MPIRUN_KILLS:
                    self._killed = now
        return [self._send(now)]

    def heard(self, peer: int, beat: Beat, now: float) -> list[Action]:
        """Return the actions after a sign of life has come."""
        if peer in self._peers:
            self._peers[peer].heard = now
            self._peers[peer].last = beat
        if beat.state is not State.REPORTED or self._failure_reported_at is not None:
            return []
        self._failure_reported_at = now
        return [Do.STAY_SILENT]

    def looked(self, look: Look, now: float) -> list[Action]:
        """Return the actions after a look at this host, when time has passed."""
        if self._over:
            return []
        self._activity = look.activity
        if look.failed and self._failed is None:
            self._failed = now
        slept, self._looked = now - self._looked > OWN_SLEEP, now
        for rank, peer in self._peers.items():
            if slept:
                peer.heard, peer.gone_since = now, None
            if look.processes.get(rank) != "gone":
                peer.gone_since = None
            elif peer.gone_since is None:
                peer.gone_since = now
        self.quiet = self._silent_for(now, SECONDS_OF_QUIET, look)
        actions: list[Action] = []
        if self._sent is None or now - self._sent >= PERIOD / 2:
            actions.append(self._send(now))
        verdict = self._verdict(look, now)
        if verdict is not None:
            actions.append(verdict)
            self._over = not isinstance(verdict, Fail)
        hurried = now - self._continued < MPIRUN_KILLS
        dying = any(peer.gone_since is not None for peer in self._alive())
        self.pause = HURRY if hurried or dying else PERIOD
        return actions

    def _send(self, now: float) -> Send:
        # To all ranks on the first time: when a rank has died, connecting takes too long.
        peers = self.others if self._sent is None else self.watched
        self._sent = now
        return Send(peers, Beat(self._activity, self._own))

    def _verdict(self, look: Look, now: float) -> Action | None:
        if not look.launched:
            return Do.EXIT
        if self._failed is not None and now - self._failed >= SECONDS_TO_RAISE:
            return Do.GIVE_UP
        if self._failure_reported_at is not None:
            return Do.EXIT if now - self._failure_reported_at > SECONDS_TO_BE_ENDED else None
        return self._death(now) or self._interruption(now) or self._silence(look, now)

    def _alive(self) -> Iterable[_Peer]:
        return (peer for peer in self._peers.values() if peer.last.state is State.ALIVE)

    def _death(self, now: float) -> Action | None:
        for peer in self._alive():
            if peer.gone_since is not None and now - peer.gone_since >= self._turn:
                return _died(peer)
        if self._killed is not None and now >= self._killed + self._turn:
            # All ranks gave a sign of life at mpirun's signals, except those that could not.
            for peer in self._alive():
                if peer.heard < self._continued:
                    return _died(peer)
        return None

    @property
    def _turn(self) -> float:
        """Seconds in which other ranks may report first; few, since mpirun soon ends the job."""
        return SECONDS_TO_BE_HEARD + 1.5 * HURRY * max(0, self.rank - 1)

    def _interruption(self, now: float) -> Action | None:
        number = self._stop()
        if self.rank != 0 or number is None:
            return None
        if self._killed is not None and now < self._killed + self._turn:
            return None  # perhaps because a rank died
        most = max(len(self._own), *(len(peer.last.signals) for peer in self._peers.values()), 0)
        if not self._expects_stop or most > 1:
            return End(128 + number, f"interrupted by {signal.Signals(number).name}")
        return None

    def _silence(self, look: Look, now: float) -> Action | None:
        text = self._silent_for(now, self.limit, look)
        return None if text is None or look.failed else Fail(text)

    def _silent_for(self, now: float, seconds: float, look: Look) -> str | None:
        """Return in words which rank has been silent for so long."""
        for rank, peer in self._peers.items():
            if peer.last.state is not State.ALIVE or now - peer.heard < seconds:
                continue
            stopped = look.processes.get(rank) == "stopped"
            return (
                f"{peer.name} has given no sign of life for {seconds:g} s"
                f"{': its process is stopped' if stopped else ''}; it was last in "
                f"{peer.last.activity}"
            )
        return None


def _died(peer: _Peer) -> End:
    text = f"{peer.name} died (was it killed, or out of memory?); it was last in "
    return End(1, text + peer.last.activity, died=True)


def silence_limit(timeout: float) -> float:
    """Return the seconds after which a silent rank is lost, if a message may take ``timeout``.

    The limit is below the timeout: otherwise a rank could first blame one that itself waits for the
    lost rank.
    """
    return min(max(timeout - 2 * PERIOD, SHORTEST_SILENCE), LONGEST_SILENCE)
