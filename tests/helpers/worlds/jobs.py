"""A job in virtual time: the ``JobFate`` of each rank, its hosts, their network, and mpirun.

What the ranks, the network and mpirun do is what was seen of real ones. A watch looks at its
processes and fetches its messages at every ``pause``, or when a signal comes. Messages of one link
come in order, and wait while a host sleeps. The first of a link is on its way until it has come,
for MPI connects two ranks then. TCP has taken a later one at once; memory that two processes share
has room for some, which a process that is stopped does not fetch. mpirun sends SIGCONT, SIGTERM
and SIGKILL to all ranks a quarter of a second apart, once one has died.
"""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from shardmlx.distributed.beat_queue import BeatQueue
from shardmlx.distributed.fate import JobFate
from shardmlx.distributed.fate_events import Action, Beat, Do, End, Fail, Look, Send, State
from shardmlx.distributed.times import (
    HURRY,
    PERIOD,
    SECONDS_FOR_LOWER_RANKS,
    SECONDS_TO_BE_HEARD,
    turn,
)
from tests.helpers.worlds.simulation import Delays, Host, Links, Range, Simulation

SECONDS_BETWEEN_SIGNALS = 0.25  # of mpirun, when it ends a job
SPREAD_OF_SIGNALS = 0.05  # between ranks, besides the way of a message
SECONDS_TO_REACT: Range = (0.01, 0.3)  # from a death, or MPI_Abort, to mpirun's first signal
ROOM = 32  # messages that shared memory holds of a link
SECONDS_TO_RAISE = 0.3  # at most, from a failure to the main thread's report, unless it computes


class Message:
    """A sign of life that a rank has begun to send."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.has_come = False
        self.is_fetched = False


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
        self.ended = 0.0
        self._has_reported = False  # this rank, or a peer that it heard
        self._watches = True
        self._is_in_hurry = False
        self._signals: list[signal.Signals] = []
        self._inbox: list[tuple[int, Message]] = []
        self._outgoing = BeatQueue[Callable[[], bool]](self._begin_to_send, lambda done: done())
        self._sent: dict[int, list[Message]] = {peer: [] for peer in self.fate.others}
        self._next_look = 0
        world.simulation.after(world.random.uniform(0, PERIOD), self._look, 0)

    def send_signal(self, number: signal.Signals) -> None:
        """Take a signal, as this process's operating system does."""
        if not self.lives:
            return
        self.world.simulation.note(self.name, "is sent", number.name)
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

    def deliver(self, peer: int, message: Message) -> None:
        """Take a message, which the watch fetches at its next look."""
        message.has_come = True
        self.world.simulation.note(self.name, "is sent", _unpacked(message.data), "of", peer)
        self._inbox.append((peer, message))

    def die(self) -> None:
        """End this process."""
        if self.lives:
            self.world.simulation.note(self.name, "ends")
            self.ended = self.world.simulation.now
        self.lives = False

    def fail(self, reason: str) -> None:
        """Let the main thread meet a failure, and report it when it no longer computes."""
        if self.failure is None and self.lives:
            self.world.simulation.note(self.name, "fails:", reason)
            self.failure = reason
            seconds = self.world.random.uniform(0, SECONDS_TO_RAISE)
            starts = max(self.world.simulation.now, self.busy_until) + seconds
            self.world.simulation.at(starts, self.host.when_awake, self._await_turn, reason)

    def _await_turn(self, reason: str) -> None:
        """Let lower ranks report first, on the main thread."""
        if self.lives:
            self._is_in_hurry = True
            if self._watches and not self.is_stopped:
                self._plan_look(0.0)
            seconds = SECONDS_TO_BE_HEARD + turn(self.number)
            self.world.simulation.after(seconds, self._report, reason)

    def _plan_look(self, seconds: float) -> None:
        self._next_look += 1
        self.world.simulation.after(seconds, self._look, self._next_look)

    def _look(self, planned: int) -> None:
        if planned == self._next_look:
            self.host.when_awake(self._watch)

    def _watch(self) -> None:
        """Go once through the loop of ``JobWatch``."""
        if not self.lives or self.is_stopped or not self._watches:
            return
        now = self.world.simulation.now
        signals = self._signals
        self._signals = []
        if signals:
            self._obey(self.fate.signalled(signals, now))
        for peer in self._outgoing.waiting:
            self._outgoing.send_waiting(peer)
        messages = self._inbox
        self._inbox = []
        for peer, message in messages:
            message.is_fetched = True
            self._obey(self.fate.heard(peer, _unpacked(message.data), now))
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
        data = _packed(beat)
        for peer in peers:
            self._outgoing.post(peer, data, is_repeated=beat.is_repeated)

    def _begin_to_send(self, peer: int, data: bytes) -> Callable[[], bool]:
        """Bring a message on its way; return what says whether the next may be sent."""
        sent = self._sent[peer]
        sent.append(Message(data))
        receiver = self.world.ranks[peer]
        self.world.post(self, receiver, sent[-1])
        if len(sent) == 1:
            return lambda: sent[0].has_come
        if receiver.host is not self.host or len(sent) <= ROOM:
            return lambda: True
        before = sent[-1 - ROOM]
        return lambda: before.is_fetched

    def _report(self, reason: str, until: float | None = None) -> None:
        """Report a failure on the main thread, unless a lower rank is about to."""
        if not self.lives or not self._watches:
            return
        now = self.world.simulation.now
        until = now + SECONDS_FOR_LOWER_RANKS if until is None else until
        if self.is_stopped or self.host.wakes_at > now:
            self.world.simulation.at(max(self.host.wakes_at, now + 0.5), self._report, reason)
        elif self.fate.leaves_report(now) and not self._has_reported and now < until:
            self.world.simulation.after(0.02, self._report, reason, until)
        elif self._say(reason):
            self._abort()

    def _say(self, text: str) -> bool:
        if self._has_reported:
            return False
        self._has_reported = True
        self.world.simulation.note(self.name, "says:", text)
        self.world.said.append((self.world.simulation.now, self.number, text))
        self._send(self.fate.others, Beat("step 7", (), State.REPORTED))
        return True

    def _abort(self) -> None:
        """Keep in touch for a while if a peer is on another host, then call MPI_Abort."""
        self._watches = False
        are_apart = any(rank.host is not self.host for rank in self.world.ranks)
        self.world.simulation.after(
            PERIOD + SECONDS_TO_BE_HEARD if are_apart else 0.0, self.host.when_awake, self._leave
        )

    def _leave(self) -> None:
        if self.lives:
            self.die()
            self.world.mpirun.abort(self.host)


class Mpirun:
    """mpirun on a host: it ends the job once a rank has died, or it is itself asked to end. Its
    daemons on other hosts reach it over the links that the ranks have, too."""

    def __init__(self, world: World, host: Host, reacts: bool) -> None:
        self._world = world
        self.host = host
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
            self._world.simulation.after(seconds, self._send, host, self.host, self.end)

    def end(self) -> None:
        """Send all ranks that it reaches three signals, the last of which none survives."""
        if self._ends:
            return
        self._ends = True
        self._world.simulation.note("mpirun ends the job")
        for rank in self._world.ranks:
            spread = self._world.random.uniform(0, SPREAD_OF_SIGNALS)
            call = (self._send, self.host, rank.host, self._end_rank, rank)
            self._world.simulation.after(spread, *call)

    def _send(self, sender: Host, receiver: Host, call: Callable[..., None], *args: object) -> None:
        """Make a call on a host, once another host has told it so, and it is awake."""
        link = ("mpirun", sender.name, receiver.name)
        self._world.links.send(link, (sender, receiver), receiver.when_awake, call, *args)

    def _end_rank(self, rank: Rank) -> None:
        """Send a rank the signals, as the daemon of its host does once it is awake."""
        for count, number in enumerate((signal.SIGCONT, signal.SIGTERM, signal.SIGKILL)):
            seconds = count * SECONDS_BETWEEN_SIGNALS
            self._world.simulation.after(seconds, rank.host.when_awake, rank.send_signal, number)


class World:
    """A job of ranks on hosts, ``sizes`` on each, with one fault or several.

    ``limit`` is the seconds after which a silent rank is lost. ``reacts`` tells whether mpirun ends
    the job when a rank dies, ``is_elsewhere`` whether it runs on a host that has no rank.
    """

    def __init__(
        self,
        simulation: Simulation,
        sizes: Sequence[int],
        delays: Delays,
        *,
        limit: float,
        reacts: bool = True,
        is_elsewhere: bool = False,
    ) -> None:
        self.simulation = simulation
        self.random = simulation.random
        self.limit = limit
        self.said: list[tuple[float, int, str]] = []
        """Last lines of the job: when, of which rank, and the text."""
        self.hosts = [Host(simulation, f"mac{place + 1}") for place in range(len(sizes))]
        places = [place for place, size in enumerate(sizes) for _ in range(size)]
        self.names = [f"rank {rank} on mac{place + 1}" for rank, place in enumerate(places)]
        self.links = Links(simulation, delays)
        self.late: dict[int, float] = {}
        """Seconds that all messages of a rank take longer."""
        own = Host(simulation, "another") if is_elsewhere else self.hosts[0]
        self.mpirun = Mpirun(self, own, reacts)
        self.ranks: list[Rank] = []
        for rank, place in enumerate(places):
            self.ranks.append(Rank(self, rank, self.hosts[place]))

    def post(self, sender: Rank, receiver: Rank, message: Message) -> None:
        """Bring a message of a process on its way."""
        if sender.lives:
            link = (sender.number, receiver.number)
            late = self.late.get(sender.number, 0.0)
            hosts = (sender.host, receiver.host)
            self.links.send(link, hosts, receiver.deliver, sender.number, message, late=late)

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
        self.hosts[host].lose()
        for rank in self.ranks:
            if rank.host is self.hosts[host]:
                rank.die()

    def living(self) -> list[int]:
        """Return the ranks whose processes have not ended."""
        return [rank.number for rank in self.ranks if rank.lives]

    def runs(self) -> bool:
        """Return whether any process has not ended."""
        return any(rank.lives for rank in self.ranks)


@lru_cache(maxsize=1000)
def _packed(beat: Beat) -> bytes:
    return pickle.dumps(beat)


@lru_cache(maxsize=1000)
def _unpacked(data: bytes) -> Beat:
    beat: Beat = pickle.loads(data)
    return beat


def _state(rank: Rank) -> str | None:
    return None if rank.lives else "gone"
