"""Signs of life between the ranks: who is lost, who has died, and who was asked to stop.

Rank 0 hears of every rank, and every rank of rank 0. ``Monitor`` judges; ``job_watch`` is the
thread that feeds it and acts. No MLX, no MPI, no messages, no threads.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from shardmlx.distributed.signals import STOPS

PERIOD = 0.5
"""Seconds between two signs of life."""

SHORTEST_SILENCE = 3.0
"""Seconds: a few signs of life may be late, as on a machine that is short of memory."""

LONGEST_SILENCE = 60.0
"""Seconds after which a silent rank is lost, whatever the time that a message may take."""

SECONDS_OF_QUIET = 5.0
"""Seconds after which a silent rank is in doubt: what needs it may wait."""

OWN_SLEEP = 2.0
"""Seconds. A process that was not run for so long cannot blame its peers that it heard nothing."""

SECONDS_TO_BE_HEARD = 0.1
"""Seconds for the last message of a process that has ended, and for answers when mpirun ends the
job."""

MPIRUN_KILLS = 1.0
"""Seconds. A SIGTERM so soon after a SIGCONT comes from mpirun, which needs 0.25 s between the two;
it ends all ranks, and 0.25 s later kills them."""

HURRY = 0.02
"""Seconds between two looks while something is going on."""

SECONDS_TO_BE_ENDED = 5.0
"""Seconds for the rank that said what failed to end the job; then each process ends itself."""


class State(Enum):
    """State of a rank, in its own words."""

    ALIVE = auto()
    LEFT = auto()  # it has done its part, and leaves in order
    SPOKEN = auto()  # it has said what failed, and ends the job


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life: what the rank does, and the signals that asked it to stop so far."""

    activity: str
    signals: tuple[int, ...] = ()
    state: State = State.ALIVE


class Fate(Enum):
    """Fate of the job, as far as a rank can tell."""

    LOST = auto()  # a rank has been silent for too long
    DIED = auto()  # a rank's process is gone
    INTERRUPTED = auto()  # signals want it to end at once
    ENDED = auto()  # the job has ended, but for this process


@dataclass(frozen=True, slots=True)
class Judgement:
    """Reason why this rank cannot go on, or must end. ``signal`` where one asked for it."""

    fate: Fate
    text: str
    signal: int | None = None


@dataclass(slots=True)
class _Peer:
    name: str
    heard: float
    last: Beat = field(default_factory=lambda: Beat("starting"))
    gone_since: float | None = None


class Monitor:
    """Judge of the ranks that one rank watches. All time comes from ``clock``, in seconds.

    ``process`` is asked for the state of a peer's process: ``gone``, ``stopped``, or None where
    it runs or cannot be seen from here; ``launched`` whether mpirun, or its daemon, is still there.
    """

    def __init__(
        self,
        rank: int,
        names: Mapping[int, str],
        limit: float,
        process: Callable[[int], str | None] = lambda peer: None,
        launched: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        now = clock()
        self.rank = rank
        self.limit = limit
        self.expects_stop = False
        """True once the run asks for signals, and will stop in order after one."""
        self.quiet: str | None = None
        """The rank that is in doubt, in words, if there is one."""
        self._process = process
        self._launched = launched
        self._clock = clock
        self._peers = {peer: _Peer(name, now) for peer, name in names.items()}
        self._looked = now
        self._own: tuple[int, ...] = ()
        self._continued = -float("inf")
        self._killed: float | None = None
        self._hushed: float | None = None

    def signalled(self, number: int) -> None:
        """Note that this process was sent a signal."""
        now = self._clock()
        if number == signal.SIGCONT:
            self._continued = now
        elif number in STOPS:
            self._own += (number,)
            if number == signal.SIGTERM and now - self._continued < MPIRUN_KILLS:
                self._killed = now

    def heard(self, peer: int, beat: Beat) -> None:
        """Note a sign of life that has come."""
        now = self._clock()
        if beat.state is State.SPOKEN:
            self._hushed = now if self._hushed is None else self._hushed
        if peer in self._peers:
            self._peers[peer].heard = now
            self._peers[peer].last = beat

    def beat(self, activity: str) -> Beat:
        """Return this rank's next sign of life."""
        return Beat(activity, self._own)

    def last_activity(self, peer: int) -> str | None:
        """Return what a rank did at its last sign of life, if this rank watches it."""
        return self._peers[peer].last.activity if peer in self._peers else None

    @property
    def hushed(self) -> bool:
        """True once another rank has said what failed."""
        return self._hushed is not None

    @property
    def in_hurry(self) -> bool:
        """True while the next look must come soon."""
        now = self._clock()
        return now - self._continued < MPIRUN_KILLS or any(
            peer.gone_since is not None for peer in self._watched()
        )

    def stop(self) -> int | None:
        """Return the first signal that asked this rank, or one it watches, to stop."""
        if self._own:
            return self._own[0]
        return next(
            (peer.last.signals[0] for peer in self._peers.values() if peer.last.signals), None
        )

    def look(self) -> Judgement | None:
        """Judge what has become of the job, as far as this rank can tell. Call it often."""
        now = self._clock()
        slept, self._looked = now - self._looked > OWN_SLEEP, now
        if slept:
            for peer in self._peers.values():
                peer.heard = now
                peer.gone_since = None
        self.quiet = self._silent_for(now, SECONDS_OF_QUIET)
        if not self._launched():
            return Judgement(Fate.ENDED, "")
        if self._hushed is not None:
            late = now - self._hushed > SECONDS_TO_BE_ENDED
            return Judgement(Fate.ENDED, "") if late else None
        return self._death(now) or self._interruption(now) or self._silence(now)

    def _watched(self) -> Iterable[_Peer]:
        return (peer for peer in self._peers.values() if peer.last.state is State.ALIVE)

    def _death(self, now: float) -> Judgement | None:
        for rank, peer in self._peers.items():
            if peer.last.state is not State.ALIVE:
                continue
            if self._process(rank) != "gone":
                peer.gone_since = None
            elif peer.gone_since is None:
                peer.gone_since = now
            elif now - peer.gone_since >= self._turn:
                return self._died(peer)
        if self._killed is not None and now >= self._killed + self._turn:
            # All ranks gave a sign of life when mpirun's signals came, except those that could not.
            for peer in self._watched():
                if peer.heard < self._continued:
                    return self._died(peer)
        return None

    @property
    def _turn(self) -> float:
        """Seconds in which others are heard first. Short: mpirun ends what is left of the job."""
        return SECONDS_TO_BE_HEARD + 1.5 * HURRY * max(0, self.rank - 1)

    def _died(self, peer: _Peer) -> Judgement:
        return Judgement(
            Fate.DIED,
            f"{peer.name} died (was it killed, or out of memory?); it was last in "
            f"{peer.last.activity}",
        )

    def _interruption(self, now: float) -> Judgement | None:
        number = self.stop()
        if self.rank != 0 or number is None:
            return None
        if self._killed is not None and now < self._killed + self._turn:
            return None  # perhaps because a rank died
        most = max(len(self._own), *(len(peer.last.signals) for peer in self._peers.values()), 0)
        if not self.expects_stop or most > 1:
            text = f"interrupted by {signal.Signals(number).name}"
            return Judgement(Fate.INTERRUPTED, text, number)
        return None

    def _silence(self, now: float) -> Judgement | None:
        text = self._silent_for(now, self.limit)
        return None if text is None else Judgement(Fate.LOST, text)

    def _silent_for(self, now: float, seconds: float) -> str | None:
        """Return in words which rank has been silent for so long."""
        for rank, peer in self._peers.items():
            if peer.last.state is not State.ALIVE or now - peer.heard < seconds:
                continue
            stopped = ": its process is stopped" if self._process(rank) == "stopped" else ""
            return (
                f"{peer.name} has given no sign of life for {seconds:g} s{stopped}; it was last in "
                f"{peer.last.activity}"
            )
        return None


def silence_limit(timeout: float) -> float:
    """Return the seconds after which a silent rank is lost, if a message may take ``timeout``.

    Less than that: else a rank might speak first that only waits for one that waits for the lost.
    """
    return min(max(timeout - 2 * PERIOD, SHORTEST_SILENCE), LONGEST_SILENCE)
