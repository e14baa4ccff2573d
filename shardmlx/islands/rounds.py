"""The rounds of the hub: who has joined and is present, which reports count, and when.

Any thread may call a method of ``Rounds``; one calls ``close_due``. No outer step is made while a
report of the same fragment is taken.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmlx.errors import UserError
from shardmlx.islands.aggregate import AGGREGATES, squared_norm, too_long
from shardmlx.islands.hub_options import HubOptions
from shardmlx.islands.protocol import ASYNC, FEDAVG, Join, Joined, Progress, Refusal
from shardmlx.islands.store import Differences, FragmentStore, Report, Run

if TYPE_CHECKING:
    from shardmlx.islands.secure_hub import SecureRounds

MOST_POINTS = 400
"""Losses of an island that are kept for its curve."""

SECONDS_MISSING = 60.0
"""Seconds without a sign of an island after which rounds do not wait for it."""

MOST_PENDING = 3
"""Reports of one island for a fragment that may wait at a time."""


@dataclass(slots=True)
class IslandState:
    """Facts of an island since the hub started."""

    heard: float | None = None
    progress: Progress | None = None
    leaving: bool = False
    late: int = 0
    refused: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)

    def take(self, progress: Progress) -> None:
        """Take in a heartbeat."""
        self.progress = progress
        self.leaving = progress.leaving
        if progress.loss is not None and self.losses[-1:] != [(progress.step, progress.loss)]:
            self.losses = [*self.losses, (progress.step, progress.loss)]
        if len(self.losses) > MOST_POINTS:
            self.losses = self.losses[::2]


class Rounds:
    """The state of a hub. ``clock`` returns seconds. Raises ``UserError``."""

    def __init__(self, options: HubOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.options = options
        self.run = Run(Path(options.path), options.names, options.terms, clock)
        if not self.run.tokens:
            self.run.close()
            raise UserError(f"{options.path} has no tokens", "give --islands NAME,NAME")
        self.islands = {name: IslandState() for name in self.run.tokens}
        self.strangers: Counter[str] = Counter()
        """Requests of nobody known that were refused, by reason."""
        self._clock = clock
        self._joining = threading.Lock()
        self._news = threading.Event()
        self._since: dict[int, float] = {}
        self._refused: dict[tuple[str, int], int] = {}
        """The base of an island's last refused difference of a fragment: it waits for the next
        version, and the round not for it."""
        self.secure: SecureRounds | None = None
        if options.terms.secure_sums:
            from shardmlx.islands.secure_hub import SecureRounds  # needs cryptography

            self.secure = SecureRounds(self)
        self._seeder: str | None = None
        self._random = np.random.default_rng()
        for name in self.run.lives.keys() & self.islands.keys():
            # After a restart islands have time to be heard of before a round closes without them.
            self.islands[name].heard = clock()

    def fragment(self, number: int) -> FragmentStore:
        """Return a fragment by its number. Raises ``Refusal`` if there is none."""
        if number >= len(self.run.fragments):
            raise Refusal(404, f"there is no fragment {number}", "join first")
        return self.run.fragments[number]

    def present(self) -> list[str]:
        """Return the names of islands that train: heard of lately, and not leaving."""
        least = self._clock() - SECONDS_MISSING
        return sorted(
            name
            for name, each in self.islands.items()
            if name in self.run.lives and not each.leaving
            if each.heard is not None and each.heard >= least
        )

    def hear(self, name: str) -> None:
        """Note that an island gave a sign of itself."""
        self.islands[name].heard = self._clock()

    def join(self, name: str, message: Join) -> Joined:
        """Let an island in, which has the first one's model. Raises ``UserError``."""
        if message.name != name:
            problem = f"the token is that of {name}, and --name is {message.name}"
            raise Refusal(403, problem, "give that name, or its own token")
        with self._joining:
            if self.run.first is not None:
                message.check_same(self.run.first)
            self.run.join(name, message)
            self.islands[name].leaving = False
            fragments = self.run.fragments
            versions = [each.version for each in fragments]
            if None in versions:
                if self._seeder in {*self.present()} - {name}:
                    problem = f"{self._seeder} is still uploading the first weights"
                    raise Refusal(409, problem, "wait", retry=True)
                self._seeder = name
            life = self.run.lives[name]
            return Joined(run=self.run.id, terms=self.run.terms, versions=versions, life=life)

    def seed(self, name: str, number: int, body: Path) -> None:
        """Take the first weights of a fragment from a file: of whoever comes first, for the one
        that was asked may be taken for dead. Raises ``Refusal``."""
        fragment = self.fragment(number)
        with fragment.lock:
            if fragment.version is not None:
                problem = f"fragment {number} needs no weights of {name}"
                raise Refusal(409, problem, "take the newest", version=fragment.version)
            if not all(np.isfinite(each).all() for each in fragment.decoded(body, is_seed=True)):
                raise Refusal(422, "the weights have a number that is not finite", "train anew")
            fragment.seed(body)

    def check(self, report: Report, number: int) -> None:
        """Raise ``Refusal`` for a report that cannot count."""
        fragment = self.fragment(number)
        if fragment.version is None:
            raise Refusal(409, f"fragment {number} has no weights yet", "wait", retry=True)
        if report.base > fragment.version:
            raise Refusal(409, f"version {report.base} is none of this hub's", "join anew")
        waiting = {each.place for each in fragment.pending if each.island == report.island}
        problem = ""
        if report.place <= fragment.facts.last_place(report.island):
            problem = f"a report from version {report.base} is counted already"
        elif any(place > report.place for place in waiting):
            # An island that goes on from an old checkpoint has what that one has, too.
            problem = f"a report from a version after {report.base} waits already"
        if problem:
            raise Refusal(409, problem, "take the newest first", version=fragment.version)
        if len(waiting - {report.place}) >= MOST_PENDING:
            problem = f"{MOST_PENDING} reports of {report.island} wait"
            raise Refusal(409, problem, "wait", retry=True)

    def take(self, report: Report, number: int, body: Path) -> None:
        """Take a report whose body is in a file: once this returns, it counts, once. Raises
        ``Refusal`` for what the hub will not count."""
        fragment = self.fragment(number)
        with fragment.lock:
            self.check(report, number)
            try:
                norm = math.sqrt(sum(map(squared_norm, fragment.decoded(body))))
            except ValueError as error:
                problem = f"the difference cannot be decoded: {error}"
                raise Refusal(422, problem, "use the same shardmlx") from None
            reason = too_long(
                norm, self._norms_beside(report, fragment), self.options.max_norm_ratio
            )
            if reason is not None:
                self._refused[report.island, number] = report.base
                raise Refusal(422, reason, "look at this island's losses, and join anew")
            if any(each.contains(report) for each in fragment.pending):
                return  # it was sent before that one, and is late
            self.islands[report.island].late += report.base < (fragment.version or 0)
            fragment.add(body, replace(report, norm=norm))
        self._news.set()

    def _norms_beside(self, report: Report, fragment: FragmentStore) -> list[float]:
        """Return the norms of the newest reports of other islands: of those that are present, or
        wait for a round."""
        newest = {**fragment.facts.counted, **{each.island: each for each in fragment.pending}}
        others = {*self.present(), *(each.island for each in fragment.pending)} - {report.island}
        return [each.norm for each in newest.values() if each.island in others]

    def version_for(self, name: str, number: int, after: int) -> int:
        """Return the version of a fragment that an island takes after ``after``, -1 for none: this
        one if it is to wait. In ``async`` it waits for one that counts its own report."""
        fragment = self.fragment(number)
        is_uncounted = any(each.island == name for each in fragment.pending)
        is_early = (
            after >= 0 and self.options.terms.mode == ASYNC and is_uncounted and not self.ended
        )
        return after if is_early or fragment.version is None else fragment.version

    def awake(self) -> None:
        """End a ``wait``: something has come."""
        self._news.set()

    def wait(self, seconds: float) -> bool:
        """Wait for the next report; return False if none has come in so many seconds."""
        has_come = self._news.wait(seconds)
        self._news.clear()
        return has_come

    def close_due(self) -> None:
        """Make the outer steps that are due. Raises ``OSError``, after which it can be repeated."""
        if self.secure is not None:
            self.secure.close_due()
            return
        for number, fragment in enumerate(self.run.fragments):
            with fragment.lock:
                while not self.ended and (reports := self._due(number, fragment)):
                    self._advance(fragment, reports)

    def _due(self, number: int, fragment: FragmentStore) -> list[Report]:
        """Return the reports of which an outer step is to be made now."""
        pending = fragment.pending
        if not pending:
            return []
        if self.options.terms.mode == ASYNC:
            return pending[:1]
        since = self._since.setdefault(number, self._clock())
        is_late = self._clock() - since >= self.options.deadline
        silent = {*self.present()} - {each.island for each in pending}
        awaited = [each for each in silent if self._refused.get((each, number)) != fragment.version]
        if awaited and not is_late:
            return []
        del self._since[number]
        return pending

    def _advance(self, fragment: FragmentStore, reports: Sequence[Report]) -> None:
        options = self.options
        optimizer = self.options.terms.optimizer
        of_islands = [[*own] for _, own in groupby(reports, attrgetter("island"))]
        # The norm of a sum is at most the sum of norms.
        factors = [options.privacy.factor(sum(each.norm for each in own)) for own in of_islands]
        by_rows = options.terms.mode == FEDAVG and options.privacy.clip is None
        weights = [max(1, sum(each.rows for each in own)) if by_rows else 1 for own in of_islands]
        is_async = options.terms.mode == ASYNC
        staleness = (fragment.version or 0) - reports[0].base if is_async else 0

        def step(
            now: np.ndarray, momentum: np.ndarray | None, differences: Differences
        ) -> tuple[np.ndarray, np.ndarray | None]:
            pairs = zip(differences, factors, strict=True)
            clipped = (each * np.float32(factor) for each, factor in pairs)
            mean = AGGREGATES[options.aggregate](clipped, weights, fragment.directory)
            mean = options.privacy.noisy(mean, len(factors), self._random)
            count = len(factors)
            return optimizer.step(now, momentum, mean, reports=count, staleness=staleness)

        fragment.advance(reports, step)

    @property
    def version(self) -> int:
        """Rounds that all fragments have."""
        return min((each.version or 0 for each in self.run.fragments), default=0)

    @property
    def tokens(self) -> int:
        """Tokens of all counted reports."""
        return max((each.facts.tokens for each in self.run.fragments), default=0)

    @property
    def ended(self) -> bool:
        """True once the run has the rounds, the tokens or the hours that it is to have."""
        options = self.options
        if options.rounds is not None and self.version >= options.rounds:
            return True
        if options.tokens is not None and self.tokens >= options.tokens:
            return True
        return options.hours is not None and self.run.seconds >= 3600 * options.hours

    def progress(self, name: str, message: Progress) -> dict[str, bool]:
        """Take an island's heartbeat, and answer it: the first one present validates."""
        self.islands[name].take(message)
        return {"ended": self.ended, "evaluate": self.present()[:1] == [name]}

    def status(self) -> dict[str, Any]:
        """Return all that the page shows, as JSON."""
        present = self.present()
        now = self._clock()
        fragments = [
            {"version": each.version, "reports": [report.island for report in each.pending]}
            for each in self.run.fragments
        ]
        islands = {
            name: {
                **asdict(island),
                "joined": name in self.run.lives,
                "present": name in present,
                "silent": None if island.heard is None else now - island.heard,
            }
            for name, island in self.islands.items()
        }
        return {
            "terms": self.run.terms.to_json(),
            "model": None if self.run.first is None else self.run.first.model,
            "fragments": fragments,
            "islands": islands,
            "strangers": self.strangers,
            "rounds": self.version,
            "tokens": self.tokens,
            "ended": self.ended,
            "epsilon": self.options.privacy.epsilon(self.version),
        }
