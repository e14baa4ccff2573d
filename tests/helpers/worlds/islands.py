"""Islands that train, report to a hub, die, leave and come back, with a network between that
loses, doubles and delays messages.

An island does what ``islands/island.py`` and ``client.exchange`` do: it reports what it trained
since its base until the hub answers, and takes the version that follows. It goes on from its last
checkpoint, or has lost it.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path

from shardmlx.islands.client import HEARTBEAT_SECONDS, PATIENCE
from shardmlx.islands.protocol import Progress, Refusal
from shardmlx.islands.store import Report
from tests.helpers.worlds.hub import NAMES, SECONDS_OF_ROUND, HubAway, HubWorld
from tests.helpers.worlds.rooms import Room
from tests.helpers.worlds.saves import memory
from tests.helpers.worlds.simulation import Simulation

SECONDS = 120.0
"""Of a world, until nothing fails any more."""

SECONDS_OF_QUIET = 2 * PATIENCE + 4 * SECONDS_OF_ROUND
"""In which, then, each island that trains has taken a version, and all reports have counted."""

SECONDS_TO_ANSWER = 15.0
"""Until an island takes a message for lost."""

EVERY = 2
"""Updates between two reports."""


@dataclass(frozen=True)
class Fragment:
    """A fragment as an island has it: ``base`` is None before any weights have come, ``updates``
    is what it has trained since, of which ``sent`` are in the report that is under way."""

    life: int
    base: int | None = None
    updates: tuple[int, ...] = ()
    sent: int | None = None


@dataclass(frozen=True)
class Checkpoint:
    """What an island goes on from: the updates that it had ``done``, and its fragments."""

    done: int
    fragments: tuple[Fragment, ...]


class Island:
    """An island of a name, which joins soon."""

    def __init__(self, world: HubWorld, name: str) -> None:
        self.world = world
        self.simulation = world.simulation
        self.name = name
        self.has_stopped = False
        """True once it has heard that the run has ended, or there is nothing more to train."""
        self.taken_at = -1.0
        """When it last took a version."""
        self.life = 0
        self.fragments: list[Fragment] = []
        self._saved: Checkpoint | None = None
        self._overlap = world.random.choice([0, 0, 1])
        self._done = 0
        self._runs = 0
        self._came: dict[int, int] = {}
        self._given_up = float("inf")
        self.simulation.after(world.random.uniform(0, 5), self.start)

    def start(self, *, anew: bool = False) -> None:
        """Start its process, from its checkpoint if it has one, unless it begins ``anew``."""
        self._runs += 1
        self.has_stopped = False
        self._came.clear()
        if anew:
            self._saved = None
        self._done = 0 if self._saved is None else self._saved.done
        self.simulation.note(self.name, "starts", "anew" if anew else self._saved)
        self._join(self._runs)

    def stop(self, *, says_so: bool) -> None:
        """End its process; ``says_so`` if it leaves in order."""
        self._runs += 1
        self.has_stopped = True
        self.simulation.note(self.name, "leaves" if says_so else "dies")
        if says_so:
            self._tell(leaving=True)

    def _join(self, run: int) -> None:
        if run != self._runs:
            return
        try:
            joined = self.world.join(self.name)
        except (HubAway, Refusal):
            self.simulation.after(5.0, self._join, run)
            return
        self.life = joined.life
        self.fragments = [Fragment(joined.life) for _ in joined.versions]
        if self._saved is not None:
            self.fragments = [*self._saved.fragments]
        for each, version in zip(self.fragments, joined.versions, strict=True):
            assert each.base is None or (version is not None and each.base <= version)
        self._beat(run)
        self._begin(run)

    def _begin(self, run: int) -> None:
        """Give the hub the first weights that it lacks, or take its own; then train."""
        if run != self._runs:
            return
        for number, fragment in enumerate(self.fragments):
            if fragment.base is None and not self._take_first(number):
                self.simulation.after(2.0, self._begin, run)
                return
        self._train_on(run)

    def _take_first(self, number: int) -> bool:
        """Seed a fragment, or take its newest version; return whether there is one."""
        try:
            version = self.world.ask(self.name, lambda hub: hub.version_for(self.name, number, -1))
            if version == -1:
                self.world.seed(self.name, number)
                version = 0
        except (HubAway, Refusal):
            return False
        self._take(number, version)
        return True

    def _beat(self, run: int) -> None:
        if run == self._runs:
            self._tell(leaving=False)
            self.simulation.after(HEARTBEAT_SECONDS, self._beat, run)

    def _tell(self, *, leaving: bool) -> None:
        progress = Progress(step=0, tokens=0, leaving=leaving)
        with contextlib.suppress(HubAway):
            self.world.ask(self.name, lambda hub: hub.progress(self.name, progress))

    def _train_on(self, run: int) -> None:
        if run == self._runs:
            self.simulation.after(self.world.random.uniform(3, 12), self._update, run)

    def _update(self, run: int) -> None:
        """Make an update; exchange what is due; save now and then."""
        if run != self._runs or self.has_stopped:
            return
        update = self.world.new_update()
        if update is None:
            self.has_stopped = True
            return
        self._done += 1
        self.fragments = [replace(each, updates=(*each.updates, update)) for each in self.fragments]
        self._take_what_came()
        if self._done % EVERY == 0:
            for number, fragment in enumerate(self.fragments):
                if fragment.sent is None:
                    self._report(run, number)
        if self.world.random.random() < 0.4:
            kept = (replace(each, sent=None) for each in self.fragments)
            self._saved = Checkpoint(self._done, tuple(kept))
        if self._done % EVERY == 0 and not self._overlap:
            self._wait(run, self.simulation.now + PATIENCE)
        else:
            self._train_on(run)

    def _wait(self, run: int, until: float) -> None:
        """Wait for what is under way, but not for ever."""
        if run != self._runs:
            return
        self._take_what_came()
        is_under_way = any(each.sent is not None for each in self.fragments)
        if is_under_way and not self.has_stopped and self.simulation.now < until:
            self.simulation.after(1.0, self._wait, run, until)
        else:
            self._train_on(run)

    def _take_what_came(self) -> None:
        for number, version in [*self._came.items()]:
            del self._came[number]
            self._take(number, version)

    def _take(self, number: int, version: int) -> None:
        """Go on from a version: what was trained since the report is the rest."""
        fragment = self.fragments[number]
        rest = fragment.updates[fragment.sent or 0 :]
        self.simulation.note(self.name, "takes", number, version, "and keeps", rest)
        self.fragments = [*self.fragments]
        self.fragments[number] = Fragment(self.life, version, rest)
        self.taken_at = self.simulation.now

    def _report(self, run: int, number: int) -> None:
        """Send what was trained since the base."""
        fragment = self.fragments[number]
        count = len(fragment.updates)
        self.fragments = [*self.fragments]
        self.fragments[number] = replace(fragment, sent=count)
        assert fragment.base is not None
        report = Report(
            island=self.name, life=fragment.life, base=fragment.base, rows=count, tokens=count
        )
        self._put(run, number, report, fragment.updates)

    def _put(self, run: int, number: int, report: Report, updates: tuple[int, ...]) -> None:
        """Send a report until it is answered."""
        if not self._is_open(run, number, report):
            return
        answered: list[bool] = []
        self._send(self._arrive, run, number, report, updates, answered)

        def again() -> None:
            if not answered:
                self._put(run, number, report, updates)

        self.simulation.after(SECONDS_TO_ANSWER, again)

    def _is_open(self, run: int, number: int, report: Report) -> bool:
        """Return whether this process still waits for the version after a report."""
        if run != self._runs or self.has_stopped or number in self._came:
            return False
        fragment = self.fragments[number]
        is_this = (fragment.life, fragment.base) == report.place
        return is_this and fragment.sent is not None

    def _send(self, call: Callable[..., None], *arguments: object) -> None:
        """Bring a message on its way: the network may lose or double it, the second time late."""
        draw = self.world.random
        fails = self.world.fails
        for _ in range(draw.choice([0, 1, 1, 1, 2]) if fails else 1):
            late = draw.choice([0.01, 0.3, 30.0]) if fails else 0.0
            self.simulation.after(draw.uniform(0.001, 0.01) + late, call, *arguments)

    def _arrive(
        self,
        run: int,
        number: int,
        report: Report,
        updates: tuple[int, ...],
        answered: list[bool],
    ) -> None:
        """Let a report come to the hub, and its answer to the island."""
        after: int | None = report.base
        try:
            self.world.take(number, report, updates)
        except HubAway:
            return
        except Refusal as refusal:
            self.simulation.note("refused to", self.name, number, report.place, refusal.problem)
            if refusal.more.get("retry"):
                return
            if refusal.status == HTTPStatus.UNPROCESSABLE_ENTITY:
                after = None
            elif "version" not in refusal.more:
                raise
        is_lost = self.world.fails and self.world.random.random() < 0.2
        if not is_lost and not answered and self._is_open(run, number, report):
            answered.append(True)
            self._ask(run, number, report, after)

    def _ask(self, run: int, number: int, report: Report, after: int | None) -> None:
        """Ask for the version after the report's base until it is there."""
        if not self._is_open(run, number, report):
            return
        version = -1
        least = -1 if after is None else after
        with contextlib.suppress(HubAway):
            ended = self.world.ask(self.name, lambda hub: hub.ended)
            version = self.world.ask(
                self.name, lambda hub: hub.version_for(self.name, number, least)
            )
            if ended and version <= least:
                self.has_stopped = True
                self.simulation.note(self.name, "hears that the run has ended")
                return
        if version > least:
            self._came[number] = version
        else:
            self.simulation.after(
                self.world.random.uniform(2, 5), self._ask, run, number, report, after
            )


def play(simulation: Simulation) -> None:
    """Each report that the hub has acknowledged counts once, with the weight that its rows, its age
    and the round's other islands give it, whatever call the hub dies at, or finds its disk full,
    and however messages come; nothing counts twice. A version that was there stays what it was, and
    the newest is never lost. When nothing fails any more, all reports count, and no island waits
    for ever."""
    with tempfile.TemporaryDirectory(dir=memory()) as name:
        world = HubWorld(simulation, Path(name).resolve() / "hub")
        with contextlib.closing(world):
            islands = [Island(world, each) for each in NAMES]
            _disturb(world, islands)
            simulation.run(SECONDS)
            world.settle()
            simulation.run(SECONDS + SECONDS_OF_QUIET, lambda: any(map(_waits, islands)))
            assert not any(map(_waits, islands))
            for island in islands:
                island.stop(says_so=True)
            simulation.run(simulation.now + SECONDS_OF_QUIET, world.has_reports)
            world.check()


def _waits(island: Island) -> bool:
    """Return whether an island that trains has taken no version since nothing fails any more."""
    return not island.has_stopped and island.taken_at <= SECONDS


def _disturb(world: HubWorld, islands: list[Island]) -> None:
    """Let islands die and leave, and come back, and the hub's machine sleep."""
    draw = world.random
    for _ in range(draw.randint(0, 4)):
        at = draw.uniform(10, SECONDS - 40)
        kind = draw.choice(["dies", "leaves", "anew", "sleeps"])
        if kind == "sleeps":
            world.simulation.at(at, world.sleep, draw.uniform(5, 120))
            continue
        island = draw.choice(islands)
        world.simulation.at(at, _stop_and_start, island, kind, draw.uniform(0.1, 90))


def _stop_and_start(island: Island, kind: str, seconds: float) -> None:
    island.stop(says_so=kind == "leaves")
    island.simulation.after(seconds, _start_again, island, kind == "anew")


def _start_again(island: Island, anew: bool) -> None:
    if island.has_stopped:
        island.start(anew=anew)


ISLANDS = Room("islands", play)
