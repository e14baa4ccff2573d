"""Ranks as threads whose order a seed draws: of steps of the threads, and of messages.

One thread runs at a time. At each call of the transport it gives its turn back, and then one thing
happens, which the seed draws: a thread goes on; the network takes what was sent into a buffer of
its own, so that the send is done; or a message comes into the buffer of its receive. As with MPI,
messages of the same sender, receiver and tag do not overtake each other; all others do. Some
threads and some links are slow. So arrays change as late and as early as the transport allows, and
the same seed gives the same order again.

Threads that the ranks start take part from their first call of the transport. A thread that waits
for a ``threading.Event`` inside ``Activity.waiting_for`` has no turn meanwhile: whether it has the
event is read from its frame, as a debugger does, since nobody says it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, NamedTuple

from shardmlx.distributed.messages import Handle, buffer_of
from shardmlx.distributed.transport import Activity
from tests.helpers.local_transport import LocalNetwork, LocalTransport

SLOW = 0.03
"""Weight of a slow thread or link where others have 1."""

SECONDS_TO_SETTLE = 30.0
"""Limit of the time in which a thread comes to its next call of the transport, or ends."""

SECONDS_OF_SILENCE = 5.0
"""Time after which nobody can go on: until then a thread outside may notice another's failure."""

Key = tuple[int, int, int]
"""Sender, receiver and tag of a message."""


class _Choice(NamedTuple):
    """Something that can happen next."""

    weight: float
    what: str
    act: Callable[[], object]


@dataclass(eq=False)
class _Member:
    """A thread of the world: it has the turn, asks for it, or waits outside for an event."""

    name: str
    thread: threading.Thread
    weight: float = 1.0
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    can_go_on: Callable[[], bool] | None = None
    """Condition on which it takes the turn that it asks for; None unless it asks."""
    is_outside: bool = False

    def is_moving(self) -> bool:
        """Return whether it still runs, and will ask for a turn, wait or end by itself."""
        if self.can_go_on is not None:
            return False
        return not (self.is_outside and _waits_for_event(self.thread))


@dataclass
class _Link:
    """Messages of one sender, receiver and tag, in the order in which they were posted."""

    weight: float
    sends: deque[tuple[Handle, bytes | None]] = field(default_factory=deque)
    receives: deque[Handle] = field(default_factory=deque)

    @property
    def buffered(self) -> int:
        """Number of sends that are done, which are the oldest ones."""
        return sum(handle.done for handle, _ in self.sends)

    def buffer(self) -> None:
        """Take the bytes of the next send."""
        place = self.buffered
        handle, _ = self.sends[place]
        self.sends[place] = (handle, bytes(buffer_of(handle.array)))
        handle.done = True

    def deliver(self, key: Key) -> None:
        """Bring the first message to the first receive."""
        source, taken = self.sends.popleft()
        target = self.receives.popleft()
        data = buffer_of(source.array) if taken is None else taken
        if len(data) == target.array.nbytes:
            buffer_of(target.array)[:] = data
            target.done = True
        else:
            target.error = ValueError(f"message {key}: {source.array.shape}, {target.array.shape}")
        source.done = True


class SeededNetwork(LocalNetwork):
    """A ``LocalNetwork`` in which ``seed`` draws what happens next; ``trace`` says what did.

    An error of a rank, or a world that stands still, has the seed and the end of the trace as a
    note.
    """

    def __init__(self, size: int, seed: int) -> None:
        super().__init__(size)
        self.seed = seed
        self.trace: list[str] = []
        self._random = Random(seed)
        self._links: dict[Key, _Link] = {}
        self._weights: dict[tuple[int, int], float] = {}
        self._members: dict[threading.Thread, _Member] = {}
        self._known: set[threading.Thread] = set()
        self._ranks_left = size
        self._runs = ""

    def activity_of(self, name: str) -> Activity:
        return _SeededActivity(name, self)

    def run(self, work: Callable[[LocalTransport], Any]) -> list[Any]:
        def in_turn(transport: LocalTransport) -> Any:
            self.give_turn()
            try:
                return work(transport)
            finally:
                with self._changed:
                    del self._members[threading.current_thread()]
                    self._ranks_left -= 1
                    self._changed.notify_all()

        try:
            return super().run(in_turn)
        except BaseException as error:
            error.add_note(f"order {self.seed}, thing {len(self.trace)}: {self.trace[-12:]}")
            raise

    def post(self, key: Key, handle: Handle, is_send: bool) -> Handle:
        if key[0] == key[1]:
            raise ValueError(f"rank {key[0]} sends to itself")
        self.give_turn()
        if key not in self._links:
            weight = self._weights.setdefault(key[:2], self._weight())
            self._links[key] = _Link(weight)
        if is_send:
            self._links[key].sends.append((handle, None))
        else:
            self._links[key].receives.append(handle)
        return handle

    def wait(self, handle: Handle, seconds: float, failed: Callable[[], bool]) -> bool:
        """Return whether ``handle`` is done, as the base class. The time of a wait is never over:
        a world that stands still ends by itself."""
        if seconds == 0:
            self.give_turn()
        else:
            self.give_turn(lambda: handle.done or handle.error is not None or failed())
        return super().wait(handle, 0.0, failed)

    def abort(self) -> None:
        super().abort()
        with self._changed:
            for member in self._members.values():
                member.turn.release()

    def give_turn(self, can_go_on: Callable[[], bool] = lambda: True) -> None:
        """Let something else happen; return once this thread is drawn, or the world has aborted."""
        with self._changed:
            me = self._me()
            me.is_outside = False
            me.can_go_on = can_go_on
            if self._aborted:
                me.turn.release()
            self._changed.notify_all()
        me.turn.acquire()

    def leave(self) -> None:
        """Let this thread wait outside until it comes back."""
        with self._changed:
            self._me().is_outside = True

    def come_back(self) -> None:
        """Ask for a turn, unless this thread has done so since it left."""
        if self._me().is_outside:
            self.give_turn()

    def _me(self) -> _Member:
        thread = threading.current_thread()
        return self._members.setdefault(thread, _Member(thread.name, thread))

    def _weight(self) -> float:
        return self._random.choice([1.0, 1.0, SLOW])

    def _attend(self, ended: Sequence[threading.Event]) -> None:
        """Draw what happens next, until all ranks have ended or one has failed."""
        try:
            with self._changed:
                self._enrol_ranks()
                self._settle()
                while self._ranks_left and not self._aborted:
                    self._happen()
                    self._settle()
        except BaseException:
            self.abort()
            raise
        finally:
            super()._attend(ended)

    def _enrol_ranks(self) -> None:
        """Wait for all ranks; draw which are slow."""
        self._changed.wait_for(lambda: len(self._members) == self.size, SECONDS_TO_SETTLE)
        self._known = set(threading.enumerate())
        for member in self._by_name():
            member.weight = self._weight()

    def _settle(self) -> None:
        """Wait until no thread runs. New threads become members, named by the one that had the
        turn; those that have ended are none."""
        limit = time.monotonic() + SECONDS_TO_SETTLE
        while not self._aborted:
            begun = {thread for thread in threading.enumerate() if thread.is_alive()}
            for thread in begun - self._known:
                self._known.add(thread)
                member = self._members.setdefault(thread, _Member(thread.name, thread))
                member.name = f"{thread.name} of {self._runs}"
            for thread in [each for each in self._members if not each.is_alive()]:
                del self._members[thread]
            moving = [each.name for each in self._members.values() if each.is_moving()]
            if not moving:
                return
            if time.monotonic() > limit:
                raise TimeoutError(f"{moving[0]} comes to no call of the transport")
            self._changed.wait(1e-3)

    def _happen(self) -> None:
        """Let one thing happen. Raises ``TimeoutError`` if nothing can."""
        limit = time.monotonic() + SECONDS_OF_SILENCE
        while not (choices := list(self._choices())):
            if self._aborted:
                return
            if time.monotonic() > limit:
                asking = ", ".join(member.name for member in self._by_name())
                raise TimeoutError(f"a world that stands still: {asking} cannot go on")
            self._changed.wait(1e-2)
        (choice,) = self._random.choices(choices, [each.weight for each in choices])
        self.trace.append(choice.what)
        choice.act()

    def _choices(self) -> Iterator[_Choice]:
        for member in self._by_name():
            if member.can_go_on is not None and member.can_go_on():
                yield _Choice(member.weight, member.name, partial(self._go_on, member))
        for key, link in self._links.items():
            if link.buffered < len(link.sends):
                yield _Choice(link.weight * SLOW, f"buffer {key}", link.buffer)
            if link.sends and link.receives:
                yield _Choice(link.weight, f"deliver {key}", partial(self._deliver, key))

    def _deliver(self, key: Key) -> None:
        link = self._links[key]
        link.deliver(key)
        if not link.sends and not link.receives:
            del self._links[key]

    def _go_on(self, member: _Member) -> None:
        self._runs = member.name
        member.can_go_on = None
        member.turn.release()

    def _by_name(self) -> list[_Member]:
        return sorted(self._members.values(), key=lambda member: member.name)


class _SeededActivity(Activity):
    """The activity of a rank whose waits outside the transport are known to its network."""

    def __init__(self, name: str, network: SeededNetwork) -> None:
        super().__init__(name)
        self._network = network

    @contextmanager
    def waiting_for(self, what: Callable[[], str]) -> Iterator[None]:
        with super().waiting_for(what):
            self._network.leave()
            try:
                yield
            finally:
                self._network.come_back()


def _waits_for_event(thread: threading.Thread) -> bool:
    """Return whether a thread waits in ``Event.wait`` for an event that is not set."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code is threading.Event.wait.__code__:
            event = frame.f_locals["self"]
            return isinstance(event, threading.Event) and not event.is_set()
        frame = frame.f_back
    return False
