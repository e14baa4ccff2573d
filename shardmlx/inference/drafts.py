"""Drafts: tokens that are guessed to come next, which one step of all stages verifies together
(Leviathan et al., arXiv:2211.17192). No MLX, no MPI.

A draft is accepted where it is the token that is sampled in its place, with the key and after the
tokens that a step by itself would have: the text is the same, however the drafts are made.
"""

from __future__ import annotations

import statistics
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

LONGEST, SHORTEST = 4, 2
"""Tokens at the end of a text that are looked up in what comes before them. A single one returns in
any text, and tells little."""

MEASURED_STEPS = 9
"""Steps of each length whose median counts as its time."""

PLAIN_STEPS = 3
"""Steps that are measured before the first draft."""

SHARE = 0.005
"""Part of the time of plain steps that drafts of each kind may cost: there are at most three."""

FIRST, MOST = 0.5, 8.0
"""Plain steps that drafts of a kind may cost before one has paid, and after many have."""

NO_TIME = 1e-9
"""Seconds that no step takes less than."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed ``tokens`` that may come next. Drafts of a ``kind``, a number, are as likely."""

    tokens: tuple[int, ...] = ()
    kind: int = 0


class Drafter(Protocol):
    """A maker of drafts."""

    def draft(
        self, sequence: int, tokens: Sequence[int], most: int, pays: Callable[[int], bool]
    ) -> Draft:
        """Guess at most ``most`` tokens that follow the ``tokens`` of a sequence; none where their
        kind does not seem to pay."""
        ...

    def forget(self, sequence: int) -> None:
        """Note that a sequence has ended."""
        ...


@dataclass(slots=True)
class _Ends:
    """The place after the last of each sequence of ``SHORTEST`` to ``LONGEST`` tokens that ends
    before ``upto``."""

    upto: int = 0
    last: dict[tuple[int, ...], int] = field(default_factory=dict)


@dataclass
class LookupDrafter:
    """A drafter that repeats what followed the text's last tokens where they were before (prompt
    lookup decoding, of A. Saxena). The kind of a draft is the number of these tokens."""

    _ends: dict[int, _Ends] = field(default_factory=dict)

    def draft(
        self, sequence: int, tokens: Sequence[int], most: int, pays: Callable[[int], bool]
    ) -> Draft:
        ends = self._ends.setdefault(sequence, _Ends())
        for end in range(ends.upto, len(tokens)):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                ends.last[tuple(tokens[end - length : end])] = end
        ends.upto = len(tokens)
        for length in range(LONGEST, SHORTEST - 1, -1):
            begin = ends.last.get(tuple(tokens[-length:]))
            if begin is not None:
                if not pays(length):
                    break
                period = len(tokens) - begin
                return Draft(tuple(tokens[begin + i % period] for i in range(most)), length)
        return Draft()

    def forget(self, sequence: int) -> None:
        self._ends.pop(sequence, None)


def accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Return how many of ``drafts`` are what was sampled in their places, up to the first that is
    not. The token sampled after these is right as well."""
    pairs = enumerate(zip(drafts, sampled, strict=False))
    return next((i for i, (draft, token) in pairs if draft != token), len(drafts))


@dataclass
class BackOff:
    """Drafts of each kind go on while they pay, by measured times: what they have saved, in plain
    steps, is what they may cost."""

    _seconds: dict[int, deque[float]] = field(default_factory=dict)
    _allowances: dict[int, float] = field(default_factory=dict)

    def allows(self, kind: int) -> bool:
        is_measured = len(self._seconds.get(0, ())) >= PLAIN_STEPS
        return is_measured and self._allowances.setdefault(kind, FIRST) > 0

    def took(self, draft: Draft, came: int, seconds: float) -> None:
        """Note the ``seconds`` of a step with a ``draft``, of which ``came`` tokens."""
        measured = self._seconds.setdefault(len(draft.tokens), deque(maxlen=MEASURED_STEPS))
        is_first = not measured  # with it a GPU compiles the kernels of this length
        measured.append(seconds)
        if not draft.tokens:
            for kind, allowance in self._allowances.items():
                self._allowances[kind] = min(allowance + SHARE, MOST)
        elif not is_first and (plain := self._seconds.get(0)):
            cost = statistics.median(measured) / max(statistics.median(plain), NO_TIME)
            allowance = self._allowances.get(draft.kind, FIRST)
            self._allowances[draft.kind] = min(allowance + came - cost, MOST)


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """The ``rounds``, steps with drafts, and how many drafts these had."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def plus(self, drafted: int, accepted: int) -> DraftCounts:
        return DraftCounts(self.rounds + 1, self.drafted + drafted, self.accepted + accepted)

    def __str__(self) -> str:
        tokens = (self.rounds + self.accepted) / max(self.rounds, 1)
        return (
            f"{self.drafted} tokens in {self.rounds} rounds, {self.accepted} accepted, "
            f"{tokens:.2f} tokens a round"
        )


@dataclass
class Drafting:
    """Drafts for the sequences of a run, of ``most`` tokens each, while they pay.

    A sequence of ``cuttable`` tokens gets none, since its caches cannot give back what is rejected.
    A round that began before KV caches are ``quantised``, a number of tokens, ends before, too.
    """

    drafter: Drafter
    most: int
    _: KW_ONLY
    cuttable: int = sys.maxsize
    quantised: int = 0
    counts: DraftCounts = DraftCounts()
    """Counts of all rounds since they were taken."""
    _back_off: BackOff = field(default_factory=BackOff)

    def draft(self, sequence: int, tokens: Sequence[int], context: int) -> Draft:
        """Guess the tokens that follow those of a sequence, which may become ``context``."""
        # The last of the tokens enters with the drafts, and one more comes than are accepted.
        most = min(self.most, context - len(tokens) - 1, self.cuttable - 1 - len(tokens))
        if len(tokens) <= self.quantised:
            most = min(most, self.quantised - len(tokens))
        if most < 1:
            return Draft()
        return self.drafter.draft(sequence, tokens, most, self._back_off.allows)

    def take_counts(self) -> DraftCounts:
        counts, self.counts = self.counts, DraftCounts()
        return counts

    def took(self, draft: Draft, came: int, seconds: float) -> None:
        """Note the ``seconds`` of a step for a sequence alone, of which ``came`` tokens."""
        self._back_off.took(draft, came, seconds)
        if draft.tokens:
            self.counts = self.counts.plus(len(draft.tokens), came - 1)
