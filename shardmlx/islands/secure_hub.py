"""The hub's part of secure sums: who is a member, what each has to do next, and the sum, which
counts in a round."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardmlx.islands.hub_options import HubOptions
from shardmlx.islands.protocol import Refusal
from shardmlx.islands.secure_sums import Mask, joined, key_of, pair_mask, read_sum, threshold
from shardmlx.islands.store import Differences, FragmentStore, Report

KEYS, SHARES, NUMBERS, REVEAL, OVER = PHASES = ("keys", "shares", "numbers", "reveal", "over")
"""Phases of a sum, by what the members send in each."""


@dataclass
class SecureSum:
    """A try to sum the differences of several islands, begun at ``since``.

    ``sent`` has for each phase the messages of the members, or the files with their numbers. A
    member that sends nothing drops out; without enough members the try is over, with a ``problem``.
    """

    since: float
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    phase: str = KEYS
    problem: str = ""
    reports: dict[str, Report] = field(default_factory=dict)
    declined: set[str] = field(default_factory=set)
    """Islands with a difference that cannot be summed: they are not awaited."""
    sent: dict[str, dict[str, Any]] = field(default_factory=lambda: {phase: {} for phase in PHASES})

    def tell(self, report: Report, message: Mapping[str, Any]) -> dict[str, Any]:
        """Take what a member sends, if that is due, and answer what it needs for the next phase.
        Raises ``Refusal`` for what no member sends."""
        name = report.island
        if message.get("attempt", self.id) != self.id:
            return {"attempt": self.id, "phase": OVER, "problem": "the hub has begun anew"}
        if "declined" in message:
            self.declined.add(name)
        what = message.get(self.phase)
        if self.phase == KEYS and what is not None:
            self._check(name, what)
            self.reports[name] = report
            self.sent[KEYS][name] = what
        elif self.phase in (SHARES, REVEAL) and what is not None and name in self._members():
            self._check(name, what)
            self.sent[self.phase].setdefault(name, what)
        answer: dict[str, Any] = {
            "attempt": self.id,
            "name": name,
            "phase": self.phase,
            "problem": self.problem,
        }
        if self.phase != OVER and name not in self._members():
            return {**answer, "phase": OVER, "problem": "too late for this round"}
        if self.phase == SHARES:
            answer["keys"] = self.sent[KEYS]
        elif self.phase == NUMBERS:
            others = self.sent[SHARES].items()
            answer["sealed"] = {each: of_all[name] for each, of_all in others if each != name}
        elif self.phase == REVEAL:
            answer["survivors"] = sorted(self.sent[NUMBERS])
        return answer

    def _check(self, name: str, what: Any) -> None:
        """Raise ``Refusal`` unless it has the form of what a member sends in this phase."""
        if self.phase == KEYS:
            fits = isinstance(what, list) and [*map(_hex_digits, what)] == [64, 64]
        else:
            others = self.sent[KEYS].keys() - {name}
            names = others if self.phase == SHARES else self.sent[SHARES].keys()
            fits = isinstance(what, dict) and what.keys() == names
            fits = fits and all(map(_hex_digits, what.values()))
        if not fits:
            raise Refusal(422, f"{self.phase} of no secure sum", "use the same shardmlx")

    def put(self, name: str, body: Path) -> None:
        """Take a member's numbers, in a file. Raises ``Refusal`` if it is none, or too late."""
        if self.phase != NUMBERS or name not in self._members():
            raise Refusal(409, "too late for this round", "begin anew", is_over=True)
        self.sent[NUMBERS][name] = body

    def close_due(self, present: Collection[str], now: float, *, is_late: bool) -> None:
        """Go on to the next phase, once all have sent what is due that are there, or it is late."""
        if self.phase == OVER:
            return
        sent = self.sent[self.phase]
        members = {*present} - self.declined if self.phase == KEYS else {*self._members()}
        enough = 2 if self.phase == KEYS else threshold(len(self.sent[KEYS]))
        if (members & {*present}) - sent.keys() and not is_late:
            return
        if self.phase == KEYS and len(sent) < enough:
            return  # a sum of one is no secret
        self.phase = PHASES[PHASES.index(self.phase) + 1]
        self.since = now
        if len(sent) < enough:
            self.problem = f"{len(sent)} of {len(self.sent[KEYS])} members are left, of {enough}"
            self.phase = OVER

    def mean_into(self, file: Path) -> None:
        """Write the mean of the numbers, weighted by rows, once all is there. Raises ``ValueError``
        for shares of others."""
        survivors = self.sent[NUMBERS]
        weight = sum(max(1, self.reports[name].rows) for name in survivors)
        bodies = [survivors[name] for name in sorted(survivors)]
        with file.open("wb") as into:
            for numbers in read_sum(bodies, self._masks(), weight):
                into.write(numbers.tobytes())

    def _masks(self) -> list[Mask]:
        """Return what takes the masks away that do not cancel out."""
        keys = self.sent[KEYS]
        places = {name: place for place, name in enumerate(sorted(keys), start=1)}
        found = []
        for name in self.sent[SHARES]:
            tellers = [*self.sent[REVEAL].items()][: threshold(len(keys))]
            shares = {places[each]: bytes.fromhex(told[name]) for each, told in tellers}
            if name in self.sent[NUMBERS]:
                found.append((-1, joined(shares)))
                continue
            key = key_of(shares, keys[name][1])
            # The masks of the lost one would have cancelled out those of the others.
            found += [pair_mask(name, key, each, keys[each][1]) for each in self.sent[NUMBERS]]
        return found

    def _members(self) -> Collection[str]:
        """Return who may send something in this phase: whoever has in the one before."""
        if self.phase == KEYS:
            return self.reports
        return self.sent[PHASES[PHASES.index(self.phase) - 1]]


class HubRounds(Protocol):
    """The rounds of a hub, as far as secure sums need them (``rounds.Rounds``)."""

    options: HubOptions

    @property
    def ended(self) -> bool:
        """True once the run has ended."""

    def fragment(self, number: int) -> FragmentStore:
        """Return a fragment by its number."""

    def check(self, report: Report, number: int) -> None:
        """Raise ``Refusal`` for a report that cannot count."""

    def present(self) -> list[str]:
        """Return the names of islands that train."""

    def awake(self) -> None:
        """Let the thread that closes rounds look again."""


class SecureRounds:
    """The sum that is under way, in a hub of one fragment. Any thread may call a method."""

    def __init__(self, rounds: HubRounds) -> None:
        self._rounds = rounds
        self._lock = threading.Lock()
        self._sum: SecureSum | None = None

    def tell(self, report: Report, message: Any) -> dict[str, Any]:
        """Take what an island says of its report, and answer what is next. Raises ``Refusal``."""
        if not isinstance(message, Mapping):
            raise Refusal(400, "the message is not an object", "use the same shardmlx")
        with self._lock:
            self._rounds.check(report, 0)
            if self._rounds.ended:
                raise Refusal(410, "the run has ended", ended=True)
            begins = KEYS in message and (self._sum is None or self._sum.phase == OVER)
            if begins or self._sum is None:
                self._sum = SecureSum(since=time.monotonic())
            answer = self._sum.tell(report, message)
        self._rounds.awake()
        return answer

    def put(self, report: Report, body: Path) -> None:
        """Take the masked numbers of a report, in a file. Raises ``Refusal``."""
        with self._lock:
            if self._sum is None:
                raise Refusal(409, "the hub has begun anew", "begin anew", is_over=True)
            # Sent again, the numbers have the same masks.
            sent = self._sum.sent[NUMBERS]
            kept = sent.get(report.island) or self._rounds.fragment(0).new_file()
            self._sum.put(report.island, kept)
            os.replace(body, kept)
        self._rounds.awake()

    def close_due(self) -> None:
        """Go on with what is under way; count it if all is there."""
        with self._lock:
            under_way = self._sum
            if under_way is None or under_way.phase == OVER or self._rounds.ended:
                return
            now = time.monotonic()
            is_late = now - under_way.since >= self._rounds.options.deadline
            under_way.close_due(self._rounds.present(), now, is_late=is_late)
            if under_way.phase != OVER:
                return
            fragment = self._rounds.fragment(0)
            mean = fragment.new_file()
            try:
                if not under_way.problem:
                    under_way.mean_into(mean)
                    self._count(fragment, under_way, mean)
            except ValueError as error:
                under_way.problem = str(error)
            finally:
                for file in (mean, *under_way.sent[NUMBERS].values()):
                    file.unlink(missing_ok=True)

    def _count(self, fragment: FragmentStore, done: SecureSum, mean: Path) -> None:
        reports = [done.reports[name] for name in sorted(done.sent[NUMBERS])]
        optimizer = self._rounds.options.terms.optimizer

        def step(
            now: np.ndarray, momentum: np.ndarray | None, differences: Differences
        ) -> tuple[np.ndarray, np.ndarray | None]:
            return optimizer.step(now, momentum, next(differences), reports=len(reports))

        with fragment.lock:
            fragment.advance(reports, step, mean)


def _hex_digits(text: Any) -> int:
    """Return how many digits a text of bytes in hex has; 0 for what is none."""
    fits = isinstance(text, str) and len(text) % 2 == 0 and not text.strip("0123456789abcdef")
    return len(text) if fits else 0
