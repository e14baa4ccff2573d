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

import sys
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import cycle, islice

LONGEST, SHORTEST = 4, 2
"""Tokens at the end of a text that are looked up in what comes before them. A single one returns in
any text, and tells little."""

BEGUN = 4
"""Tokens of the first draft of a text."""

VERIFIED = 0.2
"""Plain steps that verifying one more token costs, about: on a GPU less."""

LOST = 3
"""Rounds one after the other that may be lost before drafts of their kind end."""

PAUSE, LONGEST_PAUSE = 60, 960
"""Plain steps until one is tried again; after each that is lost then twice as many, at most so
many. Long drafts that were wrong may be right in the next paragraph."""

HEAD_KIND = 0
"""The kind of all drafts of a model's head."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed ``tokens`` that may come next. Drafts of a ``kind``, a number, are as likely. One
    that ``goes_on`` follows guesses under way, and enters all at once; of another the tokens enter
    after one that is known."""

    tokens: tuple[int, ...] = ()
    kind: int = 0
    goes_on: bool = False


NO_DRAFT = Draft()


class Drafter:
    """A maker of drafts, by itself of none. A subclass need only make them."""

    cost = 0.0
    """Plain steps that making one more token takes, about."""

    def draft(
        self, sequence: int, tokens: Sequence[int], ahead: Sequence[int], pays: Callable[[int], int]
    ) -> Draft:
        """Guess what follows the ``tokens`` of a sequence and those ``ahead``, which are guessed
        too; of a kind as many tokens as it ``pays`` to guess, perhaps none."""
        return Draft()

    def read(self, sequence: int, tokens: Sequence[int]) -> None:
        """Take in the prompt of a sequence, as ``draft`` would before its first one."""
        return

    def expects(self, sequence: int, tokens: Sequence[int], pays: Callable[[int], int]) -> bool:
        """Return whether there is likely a draft when the token after these has come: for many
        drafters whenever any pays."""
        return pays(0) > 0

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
        """Add further tokens to the text."""
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
        """Note where the ends of a text are, as far as it is new."""
        ends = self._ends.setdefault(sequence, _Ends())
        ends.add(tokens[len(ends.text) :])

    def draft(
        self, sequence: int, tokens: Sequence[int], ahead: Sequence[int], pays: Callable[[int], int]
    ) -> Draft:
        """Guess what followed the longest of the last tokens that was there before."""
        self.read(sequence, tokens)
        ends = self._ends[sequence]
        last = [*ends.text[-LONGEST:], *ahead]
        for length in range(LONGEST, SHORTEST - 1, -1):
            begin = ends.last.get(tuple(last[-length:]))
            if begin is not None:
                count = pays(length)
                there = ends.text[begin : begin + count]
                # A text that repeats itself goes on so.
                period = there if len(there) == count else [*there, *ahead]
                return Draft(tuple(islice(cycle(period), count)), length)
        return Draft()

    def expects(self, sequence: int, tokens: Sequence[int], pays: Callable[[int], int]) -> bool:
        """Return whether there is a draft without the next token: then there is likely one with
        it."""
        return bool(self.draft(sequence, tokens, (), pays).tokens)

    def forget(self, sequence: int) -> None:
        """Drop the text of a sequence that has ended."""
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
        """Repeat what was guessed after exactly these tokens, once."""
        length, guessed = self._guessed.pop(sequence, (0, []))
        count = pays(HEAD_KIND) if length == len(tokens) and not ahead else 0
        return Draft(tuple(guessed[:count]), HEAD_KIND)

    def forget(self, sequence: int) -> None:
        """Drop what was guessed of a sequence that has ended."""
        self._guessed.pop(sequence, None)


def accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Return how many of ``drafts`` are what was sampled in their places, up to the first that is
    not. The token sampled after these is right as well."""
    pairs = enumerate(zip(drafts, sampled, strict=False))
    return next((i for i, (draft, token) in pairs if draft != token), len(drafts))


@dataclass(slots=True)
class _Kind:
    """Drafts of a kind in a text: the ``length`` of the next one, how many rounds were ``lost`` one
    after the other, how long they still ``pause``, in plain steps, and whether all of the last one
    ``were_right``."""

    length: int = BEGUN
    lost: int = 0
    pause: int = 0
    were_right: bool = False


@dataclass
class BackOff:
    """The rule by which drafts of each kind go on in a text, and how long they are.

    A round is lost if of its drafts fewer were right than verifying and making them ``cost``, in
    plain steps for each. After ``LOST`` of these one after the other there are no more drafts for
    ``PAUSE`` plain steps; then one is tried. A draft is twice as long as the last one if all of
    that was right, else between its length and what was right.

    With several ``stages`` rounds are drafted on while all is right: a token then comes in the time
    of the slowest stage, not of all; when one is wrong, the rounds behind it are waited for.
    ``stages`` is 1 where nobody can draft on.
    """

    cost: float = VERIFIED
    stages: int = 1
    _kinds: dict[int, _Kind] = field(default_factory=dict)

    def next_text(self) -> BackOff:
        """Return the one of a text that begins after this one's. It begins anew, but that of drafts
        which were given up here a single round may be lost."""
        given_up = {kind for kind, known in self._kinds.items() if known.lost >= LOST}
        return replace(self, _kinds={kind: _Kind(lost=LOST - 1) for kind in given_up})

    def length(self, kind: int, most: int) -> int:
        """Return how many tokens of a ``kind`` to guess, at most ``most``; 0 while it pauses."""
        return min(self._known(kind).length, most) if self.allows(kind) else 0

    def goes_on(self, kind: int) -> bool:
        """Tell whether rounds of a ``kind`` are drafted on."""
        return self.stages > 1 and self.allows(kind) and self._known(kind).were_right

    def allows(self, kind: int) -> bool:
        """Tell whether drafts of a ``kind`` are tried."""
        return self._known(kind).pause == 0

    def took(self, draft: Draft, came: int) -> None:
        """Note that ``came`` tokens came of a step with a ``draft``, or without one."""
        if draft.tokens:
            self._judge(draft, came - 1 + draft.goes_on)
            return
        for known in self._kinds.values():
            known.pause = max(known.pause - 1, 0)

    def missed(self, draft: Draft) -> None:
        """Note that a round is void since it began with a wrong guess."""
        self._judge(draft, 0)

    def _judge(self, draft: Draft, right: int) -> None:
        known = self._known(draft.kind)
        count = len(draft.tokens)
        known.were_right = right == count
        known.length = 2 * count if known.were_right else max((count + right) // 2, 1)
        if right >= self.cost * count:
            known.lost = 0
            return
        known.lost += 1
        if known.lost >= LOST:
            known.pause = min(PAUSE * 2 ** (known.lost - LOST), LONGEST_PAUSE)

    def _known(self, kind: int) -> _Kind:
        return self._kinds.setdefault(kind, _Kind())


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
        most = self._most(len(tokens), context, len(ahead), goes_on=goes_on)
        if most < 1 - goes_on:
            return Draft()
        how = self._pays_on if goes_on else self._pays
        pays = partial(how, self.back_off_of(sequence), most=most)
        return replace(self.drafter.draft(sequence, tokens, ahead, pays), goes_on=goes_on)

    def expects(self, sequence: int, tokens: Sequence[int], context: int) -> bool:
        """Return whether a draft is likely to follow the token that comes after these."""
        most = self._most(len(tokens) + 1, context, 0, goes_on=False)
        if most < 1:
            return False
        return self.drafter.expects(
            sequence, tokens, partial(self._pays, self.back_off_of(sequence), most=most)
        )

    def _most(self, tokens: int, context: int, ahead: int, *, goes_on: bool) -> int:
        # The token before the drafts, which enters with them, is known, or guessed as well; one
        # more comes than are accepted.
        known = tokens + ahead + goes_on
        most = min(self.most, context - known - 1, self.cuttable - 1 - known)
        return min(most, self.quantised - known) if tokens <= self.quantised else most

    def guesses(self, sequence: int, length: int, context: int) -> int:
        """Return how many tokens the model's head, if it drafts, is to guess with a step after
        which caches of a sequence have up to ``length`` tokens, of at most ``context``."""
        # All but the last of them enter the head's cache, for a moment.
        most = min(self.most, context - length, self.cuttable - length)
        if most < 1 or not isinstance(self.drafter, HeadDrafter):
            return 0
        return self._pays(self.back_off_of(sequence), HEAD_KIND, most)

    def _pays_on(self, back_off: BackOff, kind: int, most: int) -> int:
        return self._pays(back_off, kind, most) + 1 if back_off.goes_on(kind) else 0

    def _pays(self, back_off: BackOff, kind: int, most: int) -> int:
        if self.fixed:
            return most if back_off.allows(kind) else 0
        return back_off.length(kind, most)
