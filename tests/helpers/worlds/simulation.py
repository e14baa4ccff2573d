"""Virtual time, hosts and links, drawn from a seed: the same seed gives the same world again.

Nothing of a real machine takes part. A ``Simulation`` makes calls in the order of their virtual
times, and remembers what happened. A room's ``play`` builds a world on it, lets it run, and raises
``AssertionError`` if an invariant does not hold.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from random import Random

SPIKES = 0.01
"""Share of the messages that come late."""

MOST_SHOWN = 60
"""Things that a failing world shows: the last ones."""

Range = tuple[float, float]
"""A lowest and a highest value, between which one is drawn."""


class Simulation:
    """The time of a world, in seconds since its beginning, what ``seed`` draws, and what happened.

    A world draws only from ``random``.
    """

    def __init__(self, seed: int | str) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.now = 0.0
        self.trace: list[tuple[object, ...]] = []
        """All that was noted: the time, and words."""
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []

    def note(self, *words: object) -> None:
        """Remember that something happens now."""
        self.trace.append((self.now, *words))

    def shown(self, most: int | None = MOST_SHOWN) -> str:
        """Return the last things that happened, a line each; all of them if ``most`` is None."""
        kept = self.trace if most is None else self.trace[-most:]
        return "\n".join(f"{time:10.3f}  {' '.join(map(str, words))}" for time, *words in kept)

    def at(self, time: float, call: Callable[..., object], *arguments: object) -> None:
        """Make a call at ``time``, or now if that is past, after all that are to be made then."""
        heapq.heappush(self._queue, (max(time, self.now), next(self._order), call, arguments))

    def after(self, seconds: float, call: Callable[..., object], *arguments: object) -> None:
        """Make a call in so many seconds."""
        self.at(self.now + seconds, call, *arguments)

    def run(self, until: float = float("inf"), goes_on: Callable[[], bool] = lambda: True) -> None:
        """Make all calls up to a time, or as long as something goes on."""
        while self._queue and self._queue[0][0] <= until and goes_on():
            self.now, _, call, arguments = heapq.heappop(self._queue)
            call(*arguments)


class Host:
    """A machine that can sleep, and lose its power. Its work waits while it sleeps."""

    def __init__(self, simulation: Simulation, name: str = "") -> None:
        self._simulation = simulation
        self.name = name
        self.is_lost = False
        self.wakes_at = 0.0

    @property
    def is_awake(self) -> bool:
        """True unless it sleeps, or has no power."""
        return not self.is_lost and self.wakes_at <= self._simulation.now

    def sleep(self, seconds: float) -> None:
        """Sleep from now on; a second sleep may begin before the end of the first."""
        self._simulation.note(self.name, "sleeps for", seconds)
        self.wakes_at = max(self.wakes_at, self._simulation.now + seconds)

    def lose(self) -> None:
        """Lose the power, for ever."""
        self._simulation.note(self.name, "is lost")
        self.is_lost = True

    def when_awake(self, call: Callable[..., object], *arguments: object) -> None:
        """Make a call now, or once this host is awake again; never if it is lost."""
        if self.is_lost:
            return
        if self.wakes_at > self._simulation.now:
            self._simulation.at(self.wakes_at, self.when_awake, call, *arguments)
        else:
            call(*arguments)


@dataclass(frozen=True)
class Delays:
    """Seconds that a message takes: usually, and now and then."""

    usual: Range
    spike: Range

    def drawn(self, random: Random) -> float:
        """Return the seconds of one message."""
        return random.uniform(*(self.spike if random.random() < SPIKES else self.usual))


CABLE = Delays((0.0002, 0.005), (0.01, 0.05))
WIRELESS = Delays((0.005, 0.08), (0.08, 0.15))
ONE_HOST = Delays((0.0001, 0.005), (0.02, 0.05))


class Links:
    """Links between places on hosts. Messages of a link come in order; they wait while it is cut,
    and none is lost while both hosts have power."""

    def __init__(self, simulation: Simulation, delays: Delays) -> None:
        self._simulation = simulation
        self._delays = delays
        self._last: dict[Hashable, float] = {}
        self._cuts: list[tuple[Host, Host, float]] = []

    def cut(self, one: Host, other: Host, seconds: float) -> None:
        """Hold messages between two hosts back from now on."""
        self._simulation.note("cut", one.name, other.name, seconds)
        self._cuts.append((one, other, self._simulation.now + seconds))

    def send(
        self,
        link: Hashable,
        hosts: tuple[Host, Host],
        call: Callable[..., object],
        *arguments: object,
        late: float = 0.0,
    ) -> None:
        """Make a call at the other end of a link, once a message has come there, ``late`` by so
        many seconds. It is made whether the receiver sleeps or not."""
        sender, receiver = hosts
        if sender.is_lost or receiver.is_lost:
            return
        delays = ONE_HOST if sender is receiver else self._delays
        seconds = delays.drawn(self._simulation.random)
        held = max(self._ends_of_cuts(hosts), default=0.0)
        begins = max(self._simulation.now, held)
        arrives = max(begins + seconds + late, self._last.get(link, 0.0))
        self._last[link] = arrives
        self._simulation.at(arrives, call, *arguments)

    def _ends_of_cuts(self, hosts: tuple[Host, Host]) -> Iterable[float]:
        return (until for one, other, until in self._cuts if {one, other} == {*hosts})
