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
"""Steps whose median counts as their time."""

PLAIN_STEPS = 3
"""Steps that are measured before the first draft."""

SHARE = 0.005
"""Part of the time of plain steps that drafts of each kind may cost: a text has at most three."""

FIRST, FIRST_OF_MODEL, MOST = 0.5, 4.0, 8.0
"""Plain steps that drafts of a kind may cost before one has paid (a user who names a model counts
on it), and after many have."""

ACCEPTED, REJECTED, FADING = 1.4, 0.6, 0.95
"""Drafts of a kind that count as accepted and rejected before the first, and the part of the count
that stays after each round."""

VERIFIED = 0.2
"""Plain steps that verifying one more token takes, before it is measured."""

HEAD_KIND = 0
"""The kind of all drafts of a model's head."""

NO_TIME = 1e-9
"""Seconds that no step takes less than."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed ``tokens`` that may come next, and the ``seconds`` that it took to make them. Drafts
    of a ``kind``, a number, are as likely."""

    tokens: tuple[int, ...] = ()
    kind: int = 0
    seconds: float = 0.0


class Drafter(Protocol):
    """A maker of drafts. A subclass need only make them."""

    def draft(
        self, sequence: int, tokens: Sequence[int], most: int, pays: Callable[[int], int]
    ) -> Draft:
        """Guess at most ``most`` tokens that follow the ``tokens`` of a sequence; of a kind as many
        as it ``pays`` to guess, perhaps none."""
        ...

    def read(self, sequence: int, tokens: Sequence[int]) -> None:
        """Take in the prompt of a sequence, as ``draft`` would before its first one."""
        return

    def expect(self, sequence: int, prompt: Sequence[int], predicted: Sequence[int]) -> None:
        """Note what a client predicts to come after a prompt."""
        return

    def forget(self, sequence: int) -> None:
        """Note that a sequence has ended."""
        return


@dataclass(slots=True)
class _Ends:
    """A ``text``, and the place after the last of each sequence of ``SHORTEST`` to ``LONGEST``
    tokens that something follows in it. So many tokens of the sequence are ``read``. If a client
    ``predicts`` others, drafts are of kinds of their own."""

    text: list[int] = field(default_factory=list)
    last: dict[tuple[int, ...], int] = field(default_factory=dict)
    read: int = 0
    predicts: bool = False

    def add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self.text)
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self.last[tuple(self.text[end - length : end])] = end
            self.text.append(token)


@dataclass
class LookupDrafter(Drafter):
    """A drafter that repeats what followed the text's last tokens where they were before (prompt
    lookup decoding, of A. Saxena). The kind of a draft is the number of these tokens."""

    _ends: dict[int, _Ends] = field(default_factory=dict)

    def read(self, sequence: int, tokens: Sequence[int]) -> None:
        ends = self._ends.setdefault(sequence, _Ends())
        ends.add(tokens[ends.read :])
        ends.read = len(tokens)

    def expect(self, sequence: int, prompt: Sequence[int], predicted: Sequence[int]) -> None:
        self.read(sequence, prompt)
        # The prompt's end, behind which it stands, is repeated for the answer to stand behind it.
        self._ends[sequence].add([*predicted, *prompt[-LONGEST:]])
        self._ends[sequence].predicts = True

    def draft(
        self, sequence: int, tokens: Sequence[int], most: int, pays: Callable[[int], int]
    ) -> Draft:
        self.read(sequence, tokens)
        ends = self._ends[sequence]
        text = ends.text
        for length in range(LONGEST, SHORTEST - 1, -1):
            begin = ends.last.get(tuple(text[-length:]))
            if begin is not None:
                kind = length + LONGEST * ends.predicts
                period, count = len(text) - begin, min(most, pays(kind))
                return Draft(tuple(text[begin + i % period] for i in range(count)), kind)
        return Draft()

    def forget(self, sequence: int) -> None:
        self._ends.pop(sequence, None)


@dataclass
class HeadDrafter(Drafter):
    """A drafter that repeats what the model's own head, on the last stage, has guessed: it comes
    with the tokens after which it stands."""

    _guessed: dict[int, tuple[int, list[int]]] = field(default_factory=dict)

    def take(self, sequence: int, length: int, guessed: list[int]) -> None:
        """Take in what may come after the first ``length`` tokens of a sequence."""
        self._guessed[sequence] = length, guessed

    def draft(
        self, sequence: int, tokens: Sequence[int], most: int, pays: Callable[[int], int]
    ) -> Draft:
        length, guessed = self._guessed.pop(sequence, (0, []))
        count = min(most, pays(HEAD_KIND)) if length == len(tokens) else 0
        return Draft(tuple(guessed[:count]), HEAD_KIND)

    def forget(self, sequence: int) -> None:
        self._guessed.pop(sequence, None)


def accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Return how many of ``drafts`` are what was sampled in their places, up to the first that is
    not. The token sampled after these is right as well."""
    pairs = enumerate(zip(drafts, sampled, strict=False))
    return next((i for i, (draft, token) in pairs if draft != token), len(drafts))


def expected(rate: float, length: int) -> float:
    """Return how many tokens come of a draft of so many, each accepted at a ``rate`` if those
    before it are."""
    return sum(rate**i for i in range(length + 1))


def _window() -> deque[float]:
    return deque(maxlen=MEASURED_STEPS)


@dataclass(slots=True)
class _Kind:
    """Measurements of the drafts of a kind: plain steps that they still may cost, how many were
    ``accepted``, how many rounds met one to be ``rejected``, and ``seconds`` to make a token."""

    allowance: float
    accepted: float = ACCEPTED
    rejected: float = REJECTED
    seconds: deque[float] = field(default_factory=_window)


@dataclass
class BackOff:
    """Drafts of each kind go on while they pay, by measured times: what they have saved, in plain
    steps, is what they may cost; at the ``first`` they may cost so many. A draft has the length
    that gives most tokens a second, by what is accepted and what times were measured."""

    first: float = FIRST
    _plain: deque[float] = field(default_factory=_window)
    _verified: deque[float] = field(default_factory=_window)
    _kinds: dict[int, _Kind] = field(default_factory=dict)
    _has_begun: bool = False

    def length(self, kind: int, most: int) -> int:
        """Return how many tokens of a ``kind`` to guess, at most ``most``; 0 while none pays."""
        if not self.allows(kind):
            return 0
        known, each = self._kinds[kind], self._seconds_each(kind)
        rate = known.accepted / (known.accepted + known.rejected)
        return max(
            range(1, most + 1),
            key=lambda count: expected(rate, count) / (self._plain_seconds + count * each),
        )

    @property
    def is_off(self) -> bool:
        """True if drafts of no kind have paid of late."""
        return bool(self._kinds) and all(known.allowance <= 0 for known in self._kinds.values())

    def allows(self, kind: int) -> bool:
        known = self._known(kind)
        return len(self._plain) >= PLAIN_STEPS and known.allowance > 0

    def took(self, draft: Draft, came: int, seconds: float) -> None:
        """Note the ``seconds`` of a step with a ``draft``, of which ``came`` tokens."""
        count = len(draft.tokens)
        if not count:
            self._plain.append(seconds)
            for known in self._kinds.values():
                known.allowance = min(known.allowance + SHARE, MOST)
            return
        known = self._known(draft.kind)
        known.accepted = FADING * known.accepted + came - 1
        known.rejected = FADING * known.rejected + (came <= count)
        if not self._plain:
            return
        if self._has_begun:  # with the first round a GPU compiles its kernels
            more = seconds - draft.seconds - self._plain_seconds
            self._verified.append(max(more, 0.0) / count)
            known.seconds.append(draft.seconds / count)
        self._has_begun = True
        cost = 1 + count * self._seconds_each(draft.kind) / self._plain_seconds
        known.allowance = min(known.allowance + came - cost, MOST)

    def _known(self, kind: int) -> _Kind:
        return self._kinds.setdefault(kind, _Kind(self.first))

    @property
    def _plain_seconds(self) -> float:
        return max(statistics.median_low(self._plain), NO_TIME)

    def _seconds_each(self, kind: int) -> float:
        """Return the seconds to make and to verify one more token."""
        made = self._kinds[kind].seconds
        verified = self._verified or (VERIFIED * self._plain_seconds,)
        return statistics.median_low(verified) + (statistics.median_low(made) if made else 0.0)


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """The ``rounds``, steps with drafts, and how many drafts these had."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def plus(self, drafted: int, accepted: int) -> DraftCounts:
        """Return the counts with those of a step, which may have been one without drafts."""
        rounds = self.rounds + (drafted > 0)
        return DraftCounts(rounds, self.drafted + drafted, self.accepted + accepted)

    def __str__(self) -> str:
        tokens = (self.rounds + self.accepted) / max(self.rounds, 1)
        return (
            f"{self.drafted} tokens in {self.rounds} rounds, {self.accepted} accepted, "
            f"{tokens:.2f} tokens a round"
        )


NO_DRAFTS = DraftCounts()


@dataclass
class Drafting:
    """Drafts for the sequences of a run, of at most ``most`` tokens each, while they pay: of so
    many if their number is ``fixed``.

    A sequence of ``cuttable`` tokens gets none, since its caches cannot give back what is rejected.
    A round that began before KV caches are ``quantised``, a number of tokens, ends before, too.
    """

    drafter: Drafter
    most: int
    _: KW_ONLY
    fixed: bool = False
    cuttable: int = sys.maxsize
    quantised: int = 0
    back_off: BackOff = field(default_factory=BackOff)
    counts: DraftCounts = NO_DRAFTS
    """Counts of all rounds since they were taken."""

    def read(self, sequence: int, tokens: Sequence[int]) -> None:
        """Take in a prompt, unless no drafts seem to come of it."""
        if len(tokens) < self.cuttable and not self.back_off.is_off:
            self.drafter.read(sequence, tokens)

    def draft(self, sequence: int, tokens: Sequence[int], context: int) -> Draft:
        """Guess the tokens that follow those of a sequence, which may become ``context``."""
        # The last of the tokens enters with the drafts, and one more comes than are accepted.
        most = min(self.most, context - len(tokens) - 1, self.cuttable - 1 - len(tokens))
        if len(tokens) <= self.quantised:
            most = min(most, self.quantised - len(tokens))
        if most < 1:
            return Draft()
        return self.drafter.draft(sequence, tokens, most, lambda kind: self._pays(kind, most))

    def guesses(self, length: int, context: int) -> int:
        """Return how many tokens the model's head, if it drafts, is to guess with a step after
        which caches have up to ``length`` tokens, of at most ``context``."""
        # All but the last of them enter the head's cache, for a moment.
        most = min(self.most, context - length, self.cuttable - length)
        if most < 1 or not isinstance(self.drafter, HeadDrafter):
            return 0
        return self._pays(HEAD_KIND, most)

    def _pays(self, kind: int, most: int) -> int:
        if self.fixed:
            return most if self.back_off.allows(kind) else 0
        return self.back_off.length(kind, most)

    def take_counts(self) -> DraftCounts:
        counts, self.counts = self.counts, NO_DRAFTS
        return counts

    def took(self, draft: Draft, came: int, seconds: float) -> None:
        """Note the ``seconds`` of a step for a sequence alone, of which ``came`` tokens."""
        self.back_off.took(draft, came, seconds)
        self.counts = self.counts.plus(len(draft.tokens), came - 1)
