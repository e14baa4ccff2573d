"""Drafts: tokens that are guessed to come next, which one step of all stages verifies together
(Leviathan et al., arXiv:2211.17192). No MLX, no MPI.

A draft is accepted where it is the token that is sampled in its place, with the key and after the
tokens that a step by itself would have: the text is the same, however the drafts are made.

While later stages verify a round, rank 0 may draft on as if all of it were accepted, and a token
more (PipeInfer, arXiv:2407.11798), so that a round enters each stage at a time::

    stage 0   a b c D E f       a: a round whose first token is known
    stage 1     a b c D E       b: begins with a guess; C, of which a token is wrong, comes back
                                   when D has entered, so that D is void: e begins anew
"""

from __future__ import annotations

import statistics
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import cycle, islice

LONGEST, SHORTEST = 4, 2
"""Tokens at the end of a text that are looked up in what comes before them. A single one returns in
any text, and tells little."""

MEASURED_STEPS = 9
"""Steps whose median counts as their time."""

PLAIN_STEPS = 3
"""Steps that are measured before the first draft."""

SHARE = 0.005
"""Part of the time of plain steps that drafts of each kind may cost: a text has at most three."""

WAIT = 60
"""Plain steps for which a kind at most gets no drafts after a round that did not pay; after each
next one twice as many. Long drafts that were wrong once may be right in the next paragraph."""

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

STREAM = 0.9
"""Rounds are drafted on if they take less than this part of the time of rounds by themselves. There
is some time that is not counted: on three stages rounds counted as 0.91 took 1.04."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed ``tokens`` that may come next, and the ``seconds`` that it took to make them. Drafts
    of a ``kind``, a number, are as likely. One that ``goes_on`` follows guesses under way, and
    enters all at once; of another the tokens enter after one that is known."""

    tokens: tuple[int, ...] = ()
    kind: int = 0
    seconds: float = 0.0
    goes_on: bool = False


class Drafter:
    """A maker of drafts, by itself of none. A subclass need only make them."""

    def draft(
        self, sequence: int, tokens: Sequence[int], ahead: Sequence[int], pays: Callable[[int], int]
    ) -> Draft:
        """Guess what follows the ``tokens`` of a sequence and those ``ahead``, which are guessed
        too; of a kind as many tokens as it ``pays`` to guess, perhaps none."""
        return Draft()

    def read(self, sequence: int, tokens: Sequence[int]) -> None:
        """Take in the prompt of a sequence, as ``draft`` would before its first one."""
        return

    def forget(self, sequence: int) -> None:
        """Note that a sequence has ended."""
        return


@dataclass(slots=True)
class _Ends:
    """A ``text``, and the place after the last of each sequence of ``SHORTEST`` to ``LONGEST``
    tokens that something follows in it."""

    text: list[int] = field(default_factory=list)
    last: dict[tuple[int, ...], int] = field(default_factory=dict)

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
        ends.add(tokens[len(ends.text) :])

    def draft(
        self, sequence: int, tokens: Sequence[int], ahead: Sequence[int], pays: Callable[[int], int]
    ) -> Draft:
        self.read(sequence, tokens)
        ends = self._ends[sequence]
        last = [*ends.text[-LONGEST:], *ahead]
        for length in range(LONGEST, SHORTEST - 1, -1):
            begin = ends.last.get(tuple(last[-length:]))
            if begin is not None:
                period = [*ends.text[begin:], *ahead]
                return Draft(tuple(islice(cycle(period), pays(length))), length)
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
        self, sequence: int, tokens: Sequence[int], ahead: Sequence[int], pays: Callable[[int], int]
    ) -> Draft:
        length, guessed = self._guessed.pop(sequence, (0, []))
        count = pays(HEAD_KIND) if length == len(tokens) and not ahead else 0
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
    """Measurements of the drafts of a kind in a text: plain steps that they still may cost, how
    many were ``accepted``, how many rounds met one to be ``rejected``, and how many one after the
    other were ``unpaid``: took longer than plain steps."""

    allowance: float
    accepted: float = ACCEPTED
    rejected: float = REJECTED
    unpaid: int = 0

    def count(self, accepted: int, has_rejected: bool) -> None:
        self.accepted = FADING * self.accepted + accepted
        self.rejected = FADING * self.rejected + has_rejected

    def save(self, steps: float) -> None:
        """Note that a round has saved so many plain steps, or cost them."""
        self.unpaid = 0 if steps > 0 else self.unpaid + 1
        longest = WAIT * 2.0 ** max(self.unpaid - 1, 0)
        self.allowance = min(max(self.allowance + steps, -SHARE * longest), MOST)


@dataclass(slots=True)
class _Measured:
    """Seconds that are the machines', whatever the text: of ``plain`` steps, of these those
    ``on_rank_0``, to have one more token ``verified``, and by kind to make one."""

    plain: deque[float] = field(default_factory=_window)
    on_rank_0: deque[float] = field(default_factory=_window)
    verified: deque[float] = field(default_factory=_window)
    made: dict[int, deque[float]] = field(default_factory=dict)
    has_begun: bool = False


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of a ``plain`` step, of these ``on_rank_0``, to have one more token ``verified`` by
    all stages, and to have a draft ``made``, which is right at a ``rate``."""

    stages: int
    rate: float
    plain: float
    on_rank_0: float
    verified: float
    made: float

    def goes_on(self, count: int) -> bool:
        """Tell whether it pays to draft on with rounds of a token and ``count`` more."""
        return self.stages > 1 and self._in_stream(count) < STREAM * self.alone(count)

    def alone(self, count: int) -> float:
        """Return the seconds of a round by itself."""
        return self.plain + count * (self.verified + self.made)

    def slowest(self, count: int) -> float:
        """Return the seconds of the slowest stage for a round, if those after rank 0's are equal
        and have the messages' time."""
        whole, own = self.plain + count * self.verified, min(self.on_rank_0 / self.plain, 1.0)
        drafting = (count + 1) * self.made
        return max(own * whole + drafting, (1 - own) * whole / (self.stages - 1))

    def _in_stream(self, count: int) -> float:
        """Return the seconds of a round among rounds that are drafted on."""
        rounds = self.stages - (self.stages - 1) * self.rate ** (count + 1)
        return rounds * self.slowest(count)

    def tokens_a_second(self, count: int) -> float:
        seconds = self._in_stream(count) if self.goes_on(count) else self.alone(count)
        return expected(self.rate, count) / seconds


@dataclass
class BackOff:
    """Drafts of each kind go on in a text while they pay, by measured times: what they have saved,
    in plain steps, is what they may cost; at the ``first`` they may cost so many. A draft has the
    length that gives most tokens a second, by what is accepted and what times were measured.

    With several ``stages`` rounds may be drafted on. While all tokens are right one comes in the
    time of the slowest stage, not of all; when one is wrong, the rounds behind it are waited for.
    It is 1 where nobody can draft on.
    """

    first: float = FIRST
    stages: int = 1
    _measured: _Measured = field(default_factory=_Measured)
    _kinds: dict[int, _Kind] = field(default_factory=dict)

    def next_text(self) -> BackOff:
        """Return the one of a text that begins after this one's. It begins anew, but that drafts
        which have failed here may cost no more than ``FIRST`` there."""
        kinds = {
            kind: _Kind(min(max(known.allowance, FIRST), self.first))
            for kind, known in self._kinds.items()
        }
        return replace(self, _kinds=kinds)

    def length(self, kind: int, most: int) -> int:
        """Return how many tokens of a ``kind`` to guess after one that is known, at most ``most``;
        0 while none pays, or none but those of rounds that begin with a guess."""
        if not self.allows(kind):
            return 0
        times = self._times(kind)
        fewest = 0 if most == 0 or times.goes_on(0) else 1
        return max(range(fewest, most + 1), key=times.tokens_a_second)

    def goes_on(self, kind: int, count: int) -> bool:
        """Tell whether it pays to draft on with rounds of a token and ``count`` more."""
        return self.allows(kind) and self._times(kind).goes_on(count)

    def allows(self, kind: int) -> bool:
        known = self._known(kind)
        return len(self._measured.plain) >= PLAIN_STEPS and known.allowance > 0

    def took(self, draft: Draft, came: int, seconds: float, on_rank_0: float = 0.0) -> None:
        """Note the ``seconds`` of a step with a ``draft``, and of these the ones ``on_rank_0``;
        ``came`` tokens of it."""
        count = len(draft.tokens) - draft.goes_on
        on_rank_0 = seconds if self.stages == 1 else on_rank_0
        measured = self._measured
        if not draft.tokens:
            measured.plain.append(seconds)
            measured.on_rank_0.append(on_rank_0)
            for known in self._kinds.values():
                known.allowance = min(known.allowance + SHARE, MOST)
            return
        known = self._known(draft.kind)
        known.count(came - 1 + draft.goes_on, came <= count)
        if not measured.plain:
            return
        if measured.has_begun:  # with the first round a GPU compiles its kernels
            if count:  # a round may wait for another, but not on rank 0
                more = on_rank_0 - draft.seconds - statistics.median_low(measured.on_rank_0)
                measured.verified.append(self.stages * max(more, 0.0) / count)
            made = measured.made.setdefault(draft.kind, _window())
            made.append(draft.seconds / len(draft.tokens))
        measured.has_begun = True
        times = self._times(draft.kind)
        spent = times.slowest(count) if draft.goes_on else times.alone(count)
        known.save(came - spent / times.plain)

    def missed(self, draft: Draft) -> None:
        """Note that a round is void since it began with a wrong guess."""
        self._known(draft.kind).count(0, True)

    def _known(self, kind: int) -> _Kind:
        return self._kinds.setdefault(kind, _Kind(self.first))

    def _times(self, kind: int) -> _Times:
        known, measured, middle = self._known(kind), self._measured, statistics.median_low
        plain = max(middle(measured.plain), NO_TIME)
        return _Times(
            self.stages,
            known.accepted / (known.accepted + known.rejected),
            plain,
            middle(measured.on_rank_0),
            middle(measured.verified or (VERIFIED * plain,)),
            middle(measured.made.get(kind) or (0.0,)),
        )


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """The ``rounds``, steps with drafts, and how many drafts these had. A void round is none, but
    its drafts count."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(
            self.rounds + other.rounds,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
        )

    def __str__(self) -> str:
        return f"{self.drafted} tokens in {self.rounds} rounds, {self.accepted} accepted"


NO_DRAFTS = DraftCounts()


@dataclass
class Drafting:
    """Drafts for the sequences of a run, of at most ``most`` tokens each, while they pay: of so
    many if their number is ``fixed``.

    A sequence of ``cuttable`` tokens gets none, since its caches cannot give back what is rejected.
    A round that began before KV caches are ``quantised``, a number of tokens, ends before, too.
    Whether drafts pay is judged for each text by itself, from ``back_off`` on.
    """

    drafter: Drafter
    most: int
    _: KW_ONLY
    fixed: bool = False
    cuttable: int = sys.maxsize
    quantised: int = 0
    back_off: BackOff = field(default_factory=BackOff)
    _of_texts: dict[int, BackOff] = field(default_factory=dict)

    def back_off_of(self, sequence: int) -> BackOff:
        """Return that of a text, which begins with the first call."""
        known = self._of_texts.get(sequence)
        if known is None:
            known = self._of_texts[sequence] = self.back_off.next_text()
        return known

    def end(self, sequence: int) -> None:
        """Note that a text has ended."""
        self.drafter.forget(sequence)
        self.back_off = self._of_texts.pop(sequence, self.back_off)

    def read(self, sequence: int, tokens: Sequence[int]) -> None:
        """Take in a prompt, unless it gets no drafts."""
        if len(tokens) < self.cuttable:
            self.drafter.read(sequence, tokens)

    def draft(
        self, sequence: int, tokens: Sequence[int], context: int, ahead: Sequence[int] | None = None
    ) -> Draft:
        """Guess the tokens that follow those of a sequence, which may become ``context``; with
        ``ahead`` those that follow these drafts under way, and all tokens are guesses."""
        goes_on = ahead is not None
        ahead = () if ahead is None else ahead
        # The token before the drafts, which enters with them, is known, or guessed as well; one
        # more comes than are accepted.
        known = len(tokens) + len(ahead) + goes_on
        most = min(self.most, context - known - 1, self.cuttable - 1 - known)
        if len(tokens) <= self.quantised:
            most = min(most, self.quantised - known)
        if most < 1 - goes_on:
            return Draft()

        back_off = self.back_off_of(sequence)

        def pays(kind: int) -> int:
            count = self._pays(back_off, kind, most)
            if not goes_on:
                return count
            return count + 1 if back_off.goes_on(kind, count) else 0

        return replace(self.drafter.draft(sequence, tokens, ahead, pays), goes_on=goes_on)

    def guesses(self, sequence: int, length: int, context: int) -> int:
        """Return how many tokens the model's head, if it drafts, is to guess with a step after
        which caches of a sequence have up to ``length`` tokens, of at most ``context``."""
        # All but the last of them enter the head's cache, for a moment.
        most = min(self.most, context - length, self.cuttable - length)
        if most < 1 or not isinstance(self.drafter, HeadDrafter):
            return 0
        return self._pays(self.back_off_of(sequence), HEAD_KIND, most)

    def _pays(self, back_off: BackOff, kind: int, most: int) -> int:
        if self.fixed:
            return most if back_off.allows(kind) else 0
        return back_off.length(kind, most)
