"""A hub in virtual time: the real rounds and their real directory, on a disk that fails.

The hub's process dies, loses power or finds its disk full, and starts again; its clock begins
anywhere then, and jumps while its machine sleeps. What it acknowledges, and each version that it
makes, is remembered: ``check`` says whether each report counted once, with its weight.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np

from shardmlx.islands.encodings import encoding_named
from shardmlx.islands.hub import SECONDS_TO_RETRY
from shardmlx.islands.hub_options import HubOptions
from shardmlx.islands.protocol import ASYNC, FEDAVG, Join, Joined, Refusal, SharedTensor
from shardmlx.islands.rounds import Rounds
from shardmlx.islands.store import FACTS, OUTER, PUBLISHED, Report
from tests.helpers.worlds.disk import Crash, FailingDisk, Faults
from tests.helpers.worlds.simulation import Simulation

T = TypeVar("T")

MOST_PIECES = 256
"""Updates of all islands in a world: each is a number of the weights, which its report lowers."""

NAMES = ("ann", "ben", "cid")

SECONDS_OF_ROUND = 20.0
"""The hub's --deadline."""

SECONDS_TO_LOOK = 2.0
"""Between two looks at what is due, besides one after each report."""

Place = tuple[str, int, int]
"""An island, its life, and the base of a report."""


class HubAway(Exception):
    """The lack of an answer."""


@dataclass(frozen=True)
class Version:
    """What a fragment's version has on the disk: its weights, and the base of the last report of
    each island that it counts."""

    weights: np.ndarray
    bases: dict[str, int]
    tokens: int


class Ledger:
    """What a hub has acknowledged of one fragment, and the versions that it has made."""

    def __init__(self) -> None:
        self.taken: dict[Place, list[tuple[int, ...]]] = {}
        """The updates of each report that the hub may have, in the order in which they came."""
        self.acknowledged: dict[Place, int] = {}
        """The most updates of a report that were acknowledged."""
        self.owners: dict[int, str] = {}
        self.versions: dict[int, Version] = {}

    def add(self, report: Report, updates: Sequence[int]) -> None:
        """Take note that a report came to the hub."""
        place = (report.island, *report.place)
        self.taken.setdefault(place, []).append(tuple(updates))
        self.owners.update(dict.fromkeys(updates, report.island))

    def acknowledge(self, report: Report, updates: Sequence[int]) -> None:
        """Take note that the hub has said that a report counts."""
        place = (report.island, *report.place)
        self.acknowledged[place] = max(self.acknowledged.get(place, 0), len(updates))

    def see(self, number: int, directory: Path) -> None:
        """Take note of a version, which must be what it was."""
        facts = json.loads((directory / FACTS).read_bytes())
        bases = {name: each["base"] for name, each in facts["counted"].items()}
        is_lossy = (directory / OUTER).exists()
        weights = np.fromfile(directory / (OUTER if is_lossy else PUBLISHED), np.float32)
        seen = self.versions.setdefault(number, Version(weights, bases, facts["tokens"]))
        assert np.array_equal(seen.weights, weights), f"version {number} has changed"

    def check(self, mode: str) -> None:
        """Check that each report that was acknowledged counts once, and with its weight."""
        for number, after in pairwise(sorted(self.versions)):
            self._check_step(mode, number, after)
        weights = self.versions[max(self.versions)].weights
        counted = {int(each) for each in np.flatnonzero(weights)}
        assert self.versions[max(self.versions)].tokens == len(counted)
        for place, reports in self.taken.items():
            of_place = {update for updates in reports for update in updates} & counted
            least = self.acknowledged.get(place)
            if least is not None or of_place:
                found = [each for each in reports if {*each} == of_place]
                assert found, f"{place}: {sorted(of_place)} of {reports}"
                assert len(found[0]) >= (least or 0), f"{place}: {found[0]} of {reports}"
            counted -= of_place
        assert not counted, f"{counted} were never taken"

    def _check_step(self, mode: str, number: int, after: int) -> None:
        """Check one outer step, or several of which the middle ones were not seen."""
        before = self.versions[number].weights
        change = before - self.versions[after].weights
        updates = [int(each) for each in np.flatnonzero(change)]
        assert not before[updates].any(), f"version {after} counts what {number} has counted"
        if after != number + 1:
            return
        rows: dict[str, int] = {}
        for update in updates:
            rows[self.owners[update]] = rows.get(self.owners[update], 0) + 1
        for update in updates:
            owner = self.owners[update]
            expected = np.float32(1) / np.float32(len(rows))
            if mode == FEDAVG:
                expected = np.float32(rows[owner]) / np.float32(sum(rows.values()))
            if mode == ASYNC:
                base = self.versions[after].bases[owner]
                expected = np.float32(1 / (1 + number - base))
            assert change[update] == expected, (after, update, change[update], expected)


@cache
def options_of(
    mode: str, fragments: int, *, encoding: str, ratio: float | None, rounds: int | None
) -> HubOptions:
    """Return the options of a hub, but for its directory."""
    return HubOptions.from_flat(
        path="nowhere",
        islands=",".join(NAMES),
        fragments=fragments,
        mode=mode,
        deadline=SECONDS_OF_ROUND,
        encoding=encoding,
        outer_optimizer="sgd:1",
        max_norm_ratio=ratio,
        rounds=rounds,
    )


class HubWorld:
    """A hub whose process starts again whenever it has died, as long as the world ``fails``."""

    def __init__(self, simulation: Simulation, directory: Path) -> None:
        self.simulation = simulation
        self.random = simulation.random
        self.fails = True
        self.mode = self.random.choice(["diloco", "diloco", ASYNC, FEDAVG])
        fragments = self.random.choice([1, 1, 2])
        options = options_of(
            self.mode,
            fragments,
            encoding=self.random.choice(["float32", "bfloat16"]),
            ratio=self.random.choice([None, None, 1.5]),
            rounds=self.random.choice([None, None, 8]),
        )
        self.options = replace(options, path=str(directory))
        self.ledgers = [Ledger() for _ in range(fragments)]
        self.rounds: Rounds | None = None
        self._updates = 0
        self._wakes_at = 0.0
        self._clock = 0.0
        self._seen: list[int | None] = []
        """The newest version of each fragment when the disk was last looked at."""
        self._disk = FailingDisk(directory, self.random)
        self._life = contextlib.ExitStack()
        tensors = [SharedTensor(f"layers.{k}.a", (MOST_PIECES,)) for k in range(fragments)]
        self._join = Join(name="ann", model={}, tensors=tuple(tensors), adapter_config={})
        self.simulation.note(self.mode, fragments, self.options.rounds)
        self._start()
        self._look()

    def new_update(self) -> int | None:
        """Return the number of an update that an island makes; None if there are no more."""
        if self._updates == MOST_PIECES:
            return None
        self._updates += 1
        return self._updates - 1

    def sleep(self, seconds: float) -> None:
        """Let the hub's machine sleep from now on: its clock goes on, and it hears nothing."""
        self.simulation.note("the hub sleeps for", seconds)
        self._wakes_at = self.simulation.now + seconds

    def ask(self, name: str, question: Callable[[Rounds], T]) -> T:
        """Return the hub's answer to an island. Raises ``HubAway`` and ``Refusal``."""
        if self.rounds is None or self.simulation.now < self._wakes_at:
            raise HubAway
        self.rounds.hear(name)
        return self._asked(self.rounds, question)

    def _asked(self, rounds: Rounds, question: Callable[[Rounds], T]) -> T:
        try:
            return question(rounds)
        except Crash:
            self._die()
            raise HubAway from None
        except OSError as error:
            self.simulation.note("the hub's disk:", error)
            raise HubAway from None  # status 500, which asks to try again

    def join(self, name: str) -> Joined:
        """Let an island join. Raises ``HubAway`` and ``Refusal``."""
        return self.ask(name, lambda rounds: rounds.join(name, replace(self._join, name=name)))

    def seed(self, name: str, number: int) -> None:
        """Take an island's first weights. Raises ``HubAway`` and ``Refusal``."""
        self.ask(
            name, lambda rounds: _upload(rounds, number, (), lambda b: rounds.seed(name, number, b))
        )

    def take(self, number: int, report: Report, updates: Sequence[int]) -> None:
        """Take a report with the work of these updates. Raises ``HubAway`` and ``Refusal``."""
        ledger = self.ledgers[number]

        def take(rounds: Rounds) -> None:
            def put(body: Path) -> None:
                rounds.check(report, number)  # a refused report is none that may count
                ledger.add(report, updates)
                try:
                    rounds.take(report, number, body)
                except Refusal:
                    ledger.taken[report.island, *report.place].pop()
                    raise

            _upload(rounds, number, updates, put)

        self.ask(report.island, take)
        self.simulation.note("taken of", report.island, number, report.place, updates)
        ledger.acknowledge(report, updates)
        self.simulation.after(0.01, self._close_due)

    def _start(self) -> None:
        """Start the hub's process, whose clock begins anywhere."""
        self._clock = self.random.uniform(0, 1e6)
        self._seen = []
        self._life.enter_context(self._disk.life(self._faults()))
        try:
            self.rounds = Rounds(self.options, lambda: self.simulation.now + self._clock)
        except (Crash, OSError) as error:
            self._die(repr(error))
            return
        versions = [each.version for each in self.rounds.run.fragments]
        self.simulation.note("the hub starts with versions", *versions)
        for fragment, ledger in zip(self.rounds.run.fragments, self.ledgers, strict=False):
            newest = max(ledger.versions, default=-1)
            assert (-1 if fragment.version is None else fragment.version) >= newest
        self._see_versions()

    def _faults(self) -> Faults:
        if not self.fails or self.random.random() < 0.2:
            return Faults()
        at = int(200 * self.random.random() ** 2)
        if self.random.random() < 0.3:
            return Faults(full=at, emptied=at + self.random.randint(1, 9))
        return Faults(death=at, cuts_power=self.random.random() < 0.5)

    def _die(self, why: str = "") -> None:
        self.simulation.note("the hub dies", why, *self._disk.calls[-3:])
        if self.rounds is not None:
            self.rounds.run.close()
        self.rounds = None
        self._life.close()
        self.simulation.after(self.random.uniform(1, 40) if self.fails else 1.0, self._start)

    def _look(self) -> None:
        """Look at what is due, as the hub's main thread does."""
        pause = SECONDS_TO_LOOK if self._close_due() else SECONDS_TO_RETRY
        self.simulation.after(pause, self._look)

    def _close_due(self) -> bool:
        """Make the outer steps that are due; return whether the disk let it."""
        rounds = self.rounds
        if rounds is None or self.simulation.now < self._wakes_at:
            return True
        try:
            rounds.close_due()
        except Crash:
            self._die()
            return True
        except OSError as error:
            self.simulation.note("no outer step:", error)
            return False
        self._see_versions()
        return True

    def _see_versions(self) -> None:
        """Take note of all versions that are on the disk."""
        if self.rounds is None:
            return
        versions = [each.version for each in self.rounds.run.fragments]
        if versions == self._seen:
            return
        self._seen = versions
        for fragment, ledger in zip(self.rounds.run.fragments, self.ledgers, strict=False):
            newest = -1 if fragment.version is None else fragment.version
            for version in newest - 1, newest:
                directory = fragment.path(FACTS, version).parent
                if version not in ledger.versions and (directory / FACTS).exists():
                    self.simulation.note("version", version)
                    ledger.see(version, directory)

    def settle(self) -> None:
        """Start the hub once more, in a run without an end, on a disk that does not fail."""
        self.fails = False
        self.options = replace(self.options, rounds=None)
        self._wakes_at = 0.0
        if self.rounds is not None:
            self._die("to go on without an end")

    def has_reports(self) -> bool:
        """Return whether a report does not count yet."""
        return self.rounds is None or any(each.pending for each in self.rounds.run.fragments)

    def check(self) -> None:
        """Check that all reports that were acknowledged have counted, each once."""
        assert self.rounds is not None
        for fragment, ledger in zip(self.rounds.run.fragments, self.ledgers, strict=True):
            assert fragment.pending == []
            for version in (fragment.version or 0) - 1, fragment.version or 0:
                if version >= 0:
                    ledger.see(version, fragment.path(FACTS, version).parent)
            ledger.check(self.mode)

    def close(self) -> None:
        """End the hub's process."""
        if self.rounds is not None:
            self.rounds.run.close()
        self._life.close()


def _upload(
    rounds: Rounds, number: int, updates: Sequence[int], take: Callable[[Path], None]
) -> None:
    """Write a body to the disk, let ``take`` have it, and remove what is left of it."""
    numbers = np.zeros(MOST_PIECES, np.float32)
    numbers[[*updates]] = 1
    encoding = encoding_named(rounds.options.terms.encoding if updates else "float32")
    body = rounds.fragment(number).new_file()
    try:
        body.write_bytes(encoding.encode(numbers, None).tobytes())
        take(body)
    finally:
        body.unlink(missing_ok=True)
