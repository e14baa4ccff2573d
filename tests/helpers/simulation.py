"""A job in virtual time: the ``JobFate`` of each rank, its hosts, their network, and mpirun.

Each ``World`` has a seed, from which all delays are drawn, so each is the same whenever it runs.
Nothing of a real machine takes part. What the ranks, the network and mpirun do is what was seen of
real ones. A watch looks at its processes and fetches its messages at every ``pause``, or when a
signal comes. Messages of one link come in order, and wait while a host sleeps. mpirun sends
SIGCONT, SIGTERM and SIGKILL to all ranks a quarter of a second apart, once one has died.
"""

from __future__ import annotations

import heapq
import itertools
import random
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shardmlx.distributed.fate import JobFate
from shardmlx.distributed.fate_events import Action, Beat, Do, End, Fail, Look, Send, State
from shardmlx.distributed.times import (
    HURRY,
    PERIOD,
    SECONDS_FOR_LOWER_RANKS,
    SECONDS_TO_BE_HEARD,
    turn,
)

SECONDS_BETWEEN_SIGNALS = 0.25  # of mpirun, when it ends a job
SPREAD_OF_SIGNALS = 0.05  # between hosts
SECONDS_TO_REACT = (0.01, 0.3)  # from a rank's death, or MPI_Abort, to mpirun's first signal
SECONDS_TO_RAISE = 0.3  # at most, from a failure to the main thread's report, unless it computes
SPIKES = 0.01  # part of the messages that come late

Range = tuple[float, float]


@dataclass(frozen=True)
class Delays:
    """Seconds that a message takes between hosts: usually, and now and then."""

    usual: Range
    spike: Range


CABLE = Delays((0.0002, 0.005), (0.01, 0.05))
WIRELESS = Delays((0.005, 0.08), (0.08, 0.15))
ONE_HOST = Delays((0.0001, 0.005), (0.02, 0.05))


class Events:
    """Calls in the order of their virtual times, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []

    def at(self, time: float, call: Callable[..., None], *arguments: object) -> None:
        """Make a call at ``time``, after all that are to be made then already."""
        heapq.heappush(self._queue, (max(time, self.now), next(self._order), call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: object) -> None:
        """Make a call in so many seconds."""
        self.at(self.now + seconds, call, *arguments)

    def run(self, until: float, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Make all calls up to a time, or as long as something goes on."""
        while self._queue and self._queue[0][0] <= until and goes_on():
            self.now, _, call, arguments = heapq.heappop(self._queue)
            call(*arguments)


class Host:
    """A machine that can sleep, and lose its power. Its work waits while it sleeps."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.is_lost = False
        self.wakes_at = 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep from now on; a second sleep may begin before the end of the first."""
        self.wakes_at = max(self.wakes_at, self._events.now + seconds)

    def when_awake(self, call: Callable[..., None], *arguments: object) -> None:
        """Make a call now, or once this host is awake again; never if it is lost."""
        if not self.is_lost:
            if self.wakes_at > self._events.now:
                self._events.at(self.wakes_at, self.when_awake, call, *arguments)
            else:
                call(*arguments)


class Rank:
    """A process, its watch, and its main thread, which is in a step."""

    def __init__(self, world: World, number: int, host: Host) -> None:
        self.world = world
        self.number = number
        self.host = host
        self.name = world.names[number]
        self.fate = JobFate(number, world.names, world.limit, 0.0)
        self.lives = True
        self.is_stopped = False
        self.busy_until = 0.0
        self.failure: str | None = None
        self._has_reported = False  # this rank, or a peer that it heard
        self._watches = True
        self._is_in_hurry = False
        self._signals: list[signal.Signals] = []
        self._inbox: list[tuple[int, Beat]] = []
        self._next_look = 0
        world.events.after(world.random.uniform(0, PERIOD), self._look, 0)

    def send_signal(self, number: signal.Signals) -> None:
        """Take a signal, as this process's operating system does."""
        if not self.lives:
            return
        if number == signal.SIGKILL:
            self.die()
            return
        if number == signal.SIGSTOP:
            self.is_stopped = True
            return
        if number == signal.SIGCONT:
            self.is_stopped = False
        self._signals.append(number)
        if not self.is_stopped:
            self._plan_look(0.0)

    def deliver(self, peer: int, beat: Beat) -> None:
        """Take a message, which the watch fetches at its next look."""
        self._inbox.append((peer, beat))

    def die(self) -> None:
        """End this process."""
        self.lives = False

    def fail(self, reason: str) -> None:
        """Let the main thread meet a failure, and report it when it no longer computes."""
        if self.failure is None and self.lives:
            self.failure = reason
            seconds = self.world.random.uniform(0, SECONDS_TO_RAISE)
            starts = max(self.world.events.now, self.busy_until) + seconds
            self.world.events.at(starts, self.host.when_awake, self._await_turn, reason)

    def _await_turn(self, reason: str) -> None:
        """Let lower ranks report first, on the main thread."""
        if self.lives:
            self._is_in_hurry = True
            if self._watches and not self.is_stopped:
                self._plan_look(0.0)
            seconds = SECONDS_TO_BE_HEARD + turn(self.number)
            self.world.events.after(seconds, self._report, reason)

    def _plan_look(self, seconds: float) -> None:
        self._next_look += 1
        self.world.events.after(seconds, self._look, self._next_look)

    def _look(self, planned: int) -> None:
        if planned == self._next_look:
            self.host.when_awake(self._watch)

    def _watch(self) -> None:
        """Go once through the loop of ``JobWatch``."""
        if not self.lives or self.is_stopped or not self._watches:
            return
        now = self.world.events.now
        signals = self._signals
        self._signals = []
        if signals:
            self._obey(self.fate.signalled(signals, now))
        messages = self._inbox
        self._inbox = []
        for peer, beat in messages:
            self._obey(self.fate.heard(peer, beat, now))
        processes = self.world.processes_beside(self)
        look = Look("step 7", processes, failed=self.failure is not None, reports=self._is_in_hurry)
        self._obey(self.fate.looked(look, now))
        if self.lives and self._watches:
            pause = HURRY if self._is_in_hurry else self.fate.pause
            self._plan_look(pause * self.world.random.uniform(1, 1.2))

    def _obey(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if not self._watches:
                return
            match action:
                case Send(peers, beat):
                    self._send(peers, beat)
                case Do.STAY_SILENT:
                    self._has_reported = True
                case Fail(reason):
                    self.fail(reason)
                case End(_, reason):
                    self._say(reason)
                    self._abort()
                case Do.GIVE_UP:
                    self._say(self.failure or "")
                    self._abort()
                case Do.EXIT:
                    self.die()

    def _send(self, peers: Iterable[int], beat: Beat) -> None:
        for peer in peers:
            self.world.network.post(self, self.world.ranks[peer], beat)

    def _report(self, reason: str, until: float | None = None) -> None:
        """Report a failure on the main thread, unless a lower rank is about to."""
        if not self.lives or not self._watches:
            return
        now = self.world.events.now
        until = now + SECONDS_FOR_LOWER_RANKS if until is None else until
        if self.is_stopped or self.host.wakes_at > now:
            self.world.events.at(max(self.host.wakes_at, now + 0.5), self._report, reason)
        elif self.fate.leaves_report(now) and not self._has_reported and now < until:
            self.world.events.after(0.02, self._report, reason, until)
        elif self._say(reason):
            self._abort()

    def _say(self, text: str) -> bool:
        if self._has_reported:
            return False
        self._has_reported = True
        self.world.said.append((self.world.events.now, self.number, text))
        self._send(self.fate.others, Beat("step 7", (), State.REPORTED))
        return True

    def _abort(self) -> None:
        """Keep in touch for a while if a peer is on another host, then call MPI_Abort."""
        self._watches = False
        are_apart = any(rank.host is not self.host for rank in self.world.ranks)
        self.world.events.after(
            PERIOD + SECONDS_TO_BE_HEARD if are_apart else 0.0, self.host.when_awake, self._leave
        )

    def _leave(self) -> None:
        if self.lives:
            self.die()
            self.world.mpirun.abort(self.host)


class Network:
    """Links between ranks. Messages of a link come in order; none is lost while both hosts are."""

    def __init__(self, world: World, delays: Delays) -> None:
        self._world = world
        self._delays = delays
        self._last: dict[tuple[int, int], float] = {}
        self._cuts: list[tuple[Host, Host, float]] = []
        self.late: dict[int, float] = {}
        """Seconds that all messages of a rank take longer."""

    def cut(self, one: Host, other: Host, seconds: float) -> None:
        """Hold messages between two hosts back from now on."""
        self._cuts.append((one, other, self._world.events.now + seconds))

    def post(self, sender: Rank, receiver: Rank, beat: Beat) -> None:
        """Bring a message on its way."""
        if not sender.lives or sender.host.is_lost or receiver.host.is_lost:
            return
        now, draw = self._world.events.now, self._world.random
        delays = ONE_HOST if sender.host is receiver.host else self._delays
        seconds = draw.uniform(*(delays.spike if draw.random() < SPIKES else delays.usual))
        hosts = {sender.host, receiver.host}
        held = [until for one, other, until in self._cuts if hosts == {one, other}]
        link = (sender.number, receiver.number)
        arrives = max(now, *held, self._last.get(link, 0.0)) + seconds
        arrives += self.late.get(sender.number, 0.0)
        self._last[link] = arrives
        self._world.events.at(arrives, receiver.deliver, sender.number, beat)


class Mpirun:
    """mpirun on a host: it ends the job once a rank has died, or it is itself asked to end."""

    def __init__(self, world: World, host: Host, reacts: bool) -> None:
        self._world = world
        self._host = host
        self._reacts = reacts
        self._ends = False

    def learn_of_death(self, host: Host) -> None:
        """Learn that a process has ended badly, from the daemon on its host."""
        if self._reacts:
            self.abort(host)

    def abort(self, host: Host) -> None:
        """Learn that a process wants all to end."""
        if not host.is_lost:
            seconds = self._world.random.uniform(*SECONDS_TO_REACT)
            self._world.events.after(seconds, self._host.when_awake, self.end)

    def end(self) -> None:
        """Send all ranks that it reaches three signals, the last of which none survives."""
        if self._ends:
            return
        self._ends = True
        for rank in self._world.ranks:
            spread = self._world.random.uniform(0, SPREAD_OF_SIGNALS)
            self._world.events.after(spread, rank.host.when_awake, self._end_rank, rank)

    def _end_rank(self, rank: Rank) -> None:
        """Send a rank the signals, as the daemon of its host does once it is awake."""
        for count, number in enumerate((signal.SIGCONT, signal.SIGTERM, signal.SIGKILL)):
            seconds = count * SECONDS_BETWEEN_SIGNALS
            self._world.events.after(seconds, rank.host.when_awake, rank.send_signal, number)


class World:
    """A job of ranks on hosts, ``sizes`` on each, with one fault or several that tests plan.

    ``limit`` is the seconds after which a silent rank is lost. ``reacts`` tells whether mpirun ends
    the job when a rank dies, ``is_elsewhere`` whether it runs on a host that has no rank.
    """

    def __init__(
        self,
        seed: int,
        sizes: Sequence[int],
        delays: Delays,
        *,
        limit: float = 60.0,
        reacts: bool = True,
        is_elsewhere: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.events = Events()
        self.limit = limit
        self.said: list[tuple[float, int, str]] = []
        """Last lines of the job: when, of which rank, and the text."""
        self.hosts = [Host(self.events) for _ in sizes]
        places = [place for place, size in enumerate(sizes) for _ in range(size)]
        self.names = [f"rank {rank} on mac{place + 1}" for rank, place in enumerate(places)]
        self.network = Network(self, delays)
        own = Host(self.events) if is_elsewhere else self.hosts[0]
        self.mpirun = Mpirun(self, own, reacts)
        self.ranks: list[Rank] = []
        for rank, place in enumerate(places):
            self.ranks.append(Rank(self, rank, self.hosts[place]))

    def processes_beside(self, observer: Rank) -> dict[int, str | None]:
        """Return the states of the other processes on a rank's host."""
        return {
            rank.number: "stopped" if rank.is_stopped and rank.lives else _state(rank)
            for rank in self.ranks
            if rank.host is observer.host and rank is not observer
        }

    def kill(self, rank: int) -> None:
        """End a rank's process, as the operating system does when memory runs out."""
        self.ranks[rank].host.when_awake(self._kill, rank)

    def _kill(self, rank: int) -> None:
        self.ranks[rank].die()
        self.mpirun.learn_of_death(self.ranks[rank].host)

    def break_link(self, rank: int, peer: int) -> None:
        """Let the main thread of a rank meet the end of a peer's process, in a message of it."""
        self.ranks[rank].host.when_awake(
            self.ranks[rank].fail, f"{self.names[peer]} died, or the link to it broke"
        )

    def lose(self, host: int) -> None:
        """Cut a host's power."""
        self.hosts[host].is_lost = True
        for rank in self.ranks:
            if rank.host is self.hosts[host]:
                rank.die()

    def living(self) -> list[int]:
        """Return the ranks whose processes have not ended."""
        return [rank.number for rank in self.ranks if rank.lives]

    def runs(self) -> bool:
        """Return whether any process has not ended."""
        return any(rank.lives for rank in self.ranks)


def _state(rank: Rank) -> str | None:
    return None if rank.lives else "gone"
