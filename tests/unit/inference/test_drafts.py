"""Drafts: made by looking back, accepted where they are right, and left where they do not pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shardmlx.inference.drafts import (
    BEGUN,
    LONGEST_PAUSE,
    LOST,
    PAUSE,
    VERIFIED,
    BackOff,
    Draft,
    DraftCounts,
    Drafter,
    Drafting,
    LookupDrafter,
    accepted,
)


def looked_up(tokens: Sequence[int], most: int = 4, kinds: Sequence[int] = (2, 3, 4)) -> Draft:
    return LookupDrafter().draft(0, tokens, (), lambda kind: most * (kind in kinds))


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 9, 1, 2], Draft((3, 4, 5, 6), 2)),
        ([1, 2, 3, 4, 5, 9, 2, 3, 4], Draft((5, 9, 2, 3), 3)),
        # The last place, and of the longest match.
        ([1, 2, 3, 1, 2, 4, 1, 2], Draft((4, 1, 2, 4), 2)),
        ([7, 1, 2, 3, 8, 2, 3, 9, 7, 1, 2, 3], Draft((8, 2, 3, 9), 4)),
        # What repeats itself goes on so.
        ([1, 2, 1, 2], Draft((1, 2, 1, 2), 2)),
        ([5, 5, 5, 5, 5, 5], Draft((5, 5, 5, 5), 4)),
        ([1, 2, 3, 4], Draft()),
        ([1, 2, 3, 2], Draft()),
        ([1], Draft()),
    ],
    ids=str,
)
def test_what_followed_the_last_tokens_before_may_follow_again(
    tokens: list[int], draft: Draft
) -> None:
    assert looked_up(tokens) == draft


def test_a_draft_goes_on_from_another() -> None:
    for text in ([1, 2, 3, 4, 5, 6, 7, 9, 1, 2], [1, 2, 3, 1, 2, 4, 1, 2], [1, 2, 1, 2]):
        drafter, begun = LookupDrafter(), looked_up(text).tokens
        for ahead in (begun[:1], begun[:2]):
            on = drafter.draft(0, text, ahead, lambda _: 2).tokens
            assert on == begun[len(ahead) : len(ahead) + 2]
        # What was guessed has not become the text.
        assert drafter.draft(0, text, (), lambda _: 4).tokens == begun


def test_a_match_that_does_not_pay_gives_no_draft() -> None:
    tokens = [7, 1, 2, 3, 8, 2, 3, 9, 7, 1, 2, 3]
    assert looked_up(tokens, kinds=(2, 3)).tokens == ()


def three(kind: int) -> int:
    return 3


def test_a_text_that_grows_is_looked_up_like_a_whole_one() -> None:
    text = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1, 5, 3, 1, 4, 1, 2, 6, 3]
    drafter = LookupDrafter()
    for end in range(1, len(text) + 1):
        assert drafter.draft(7, text[:end], (), three) == looked_up(text[:end], 3)
    drafter.forget(7)
    assert drafter.draft(7, text[:3], (), three) == Draft()


@pytest.mark.parametrize(
    ("drafts", "sampled", "right"),
    [
        ((), (4,), 0),
        ((4, 5), (4, 5, 6), 2),
        ((4, 5), (4, 6, 6), 1),
        ((4, 5), (5, 5, 6), 0),
        ((4, 5, 6), (4, 7, 6, 8), 1),
    ],
)
def test_drafts_are_accepted_up_to_the_first_wrong_one(
    drafts: tuple[int, ...], sampled: tuple[int, ...], right: int
) -> None:
    assert accepted(drafts, sampled) == right


@pytest.mark.parametrize("length", [1_000, 100_000])
def test_a_draft_takes_of_a_long_text_no_more_than_it_has(length: int) -> None:
    """Whatever the length of what follows: slices of the text are as long as the draft."""
    taken: list[int] = []

    class Text(list[int]):
        def __getitem__(self, at: Any) -> Any:
            found = super().__getitem__(at)
            taken.append(len(found) if isinstance(found, list) else 1)
            return found

    drafter = LookupDrafter()
    text = [*range(10, 10 + length), 10, 11, 12]
    drafter.read(0, text)
    drafter._ends[0].text = Text(drafter._ends[0].text)
    assert drafter.draft(0, text, (), lambda _: 5) == Draft((13, 14, 15, 16, 17), 3)
    assert sum(taken) <= 20


def steps(back_off: BackOff, count: int) -> None:
    for _ in range(count):
        back_off.took(Draft(), 1)


def lose(back_off: BackOff, kind: int = 2) -> int:
    """Have one draft be wrong; return after how many plain steps the next is tried."""
    back_off.took(Draft((1,) * back_off.length(kind, 16), kind), 1)
    count = 0
    while not back_off.allows(kind):
        steps(back_off, 1)
        count += 1
    return count


def spent(right: int, verified: float, steps: int = 2000, kind: int = 2) -> float:
    """Plain steps that a text takes a token, of whose drafts so many are right at most, where
    verifying one more takes part of a step."""
    back_off = BackOff()
    tokens, total = 0, 0.0
    for _ in range(steps):
        count = back_off.length(kind, 16)
        draft = Draft((1,) * count, kind) if count else Draft()
        came = 1 + min(right, count)
        back_off.took(draft, came)
        tokens += came
        total += 1.0 + verified * count
    return total / tokens


def test_drafts_that_fail_cost_little_and_those_that_pay_go_on() -> None:
    assert spent(right=0, verified=0.2) <= 1.01
    assert spent(right=0, verified=0.2, steps=100) <= 1.02
    assert spent(right=3, verified=0.2) <= 0.5
    assert spent(right=1, verified=0.2) <= 0.75
    # As long as pays most: of sixteen all are verified at once.
    assert spent(right=16, verified=0.05) == pytest.approx((1 + 16 * 0.05) / 17, rel=0.01)


def test_a_draft_grows_while_all_is_right_and_shrinks_to_what_was() -> None:
    back_off, lengths = BackOff(), []
    for right in (16, 16, 16, 3, 3, 3, 0, 0, 1):
        lengths.append(back_off.length(3, 16))
        back_off.took(Draft((1,) * lengths[-1], 3), 1 + min(right, lengths[-1]))
    assert lengths == [BEGUN, 8, 16, 16, 9, 6, 4, 2, 1]
    assert back_off.length(3, 16) == 2


def test_a_kind_that_fails_leaves_the_others_alone() -> None:
    back_off = BackOff()
    for _ in range(LOST):
        assert back_off.allows(2)
        back_off.took(Draft((1, 2), 2), 1)
    assert not back_off.allows(2)
    assert back_off.length(2, 16) == 0
    assert back_off.length(4, 16) == BEGUN
    steps(back_off, PAUSE)
    assert back_off.length(2, 16) == 1


def test_what_failed_is_tried_again_soon_and_then_later() -> None:
    """What follows may be a copy of what was given."""
    back_off = BackOff()
    assert [lose(back_off) for _ in range(LOST - 1)] == [0] * (LOST - 1)
    waits = [lose(back_off) for _ in range(7)]
    assert waits[:4] == [PAUSE, 2 * PAUSE, 4 * PAUSE, 8 * PAUSE]
    assert waits[-1] == LONGEST_PAUSE
    back_off.took(Draft((1,), 2), 2)
    assert lose(back_off) == 0
    assert back_off.allows(2)


def test_a_model_that_takes_as_long_as_a_plain_step_is_given_up() -> None:
    """Although all that it guesses is right. One of a quarter goes on."""
    for cost, allowed in ((1.0, False), (0.25, True)):
        back_off = BackOff(VERIFIED + cost)
        for _ in range(LOST):
            count = back_off.length(0, 16)
            back_off.took(Draft((1,) * count, 0), 1 + count)
        assert back_off.allows(0) == allowed


def test_rounds_are_drafted_on_while_all_is_right() -> None:
    back_off = BackOff(stages=2)
    assert not back_off.goes_on(2)
    back_off.took(Draft((1, 2), 2), 3)
    assert back_off.goes_on(2)
    assert not back_off.goes_on(3)
    back_off.took(Draft((1, 2, 3), 2, goes_on=True), 3)
    assert back_off.goes_on(2)
    back_off.missed(Draft((1,), 2, goes_on=True))
    assert not back_off.goes_on(2)
    back_off.took(Draft((1, 2), 2), 2)
    assert not back_off.goes_on(2)
    alone = BackOff(stages=1)
    alone.took(Draft((1, 2), 2), 3)
    assert not alone.goes_on(2)


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "auto"])
def test_a_text_in_which_all_drafts_were_wrong_takes_none_from_the_next(fixed: bool) -> None:
    """Sampled at a high temperature, say. Nor does another that is under way get fewer."""
    drafting = Drafting(Given(), 4, fixed=fixed)
    beside = drafting.draft(1, range(9), 100)
    lost = 0
    while (draft := drafting.draft(0, range(9), 100)).tokens:
        drafting.back_off_of(0).took(draft, 1)
        lost += 1
    assert lost == LOST
    assert beside.tokens
    assert len(drafting.draft(1, range(9), 100).tokens) >= len(beside.tokens)
    drafting.end(0)
    for sequence in range(2, 12):
        draft = drafting.draft(sequence, range(9), 100)
        assert len(draft.tokens) == 4
        drafting.back_off_of(sequence).took(draft, 1 + len(draft.tokens))
        assert drafting.draft(sequence, range(9), 100).tokens
        drafting.end(sequence)


def test_texts_in_which_drafts_fail_cost_little_each() -> None:
    """Ten of a hundred steps: the first may cost more."""
    drafting, rounds = Drafting(Given(), 4), []
    for sequence in range(10):
        rounds.append(0)
        for _ in range(100):
            draft = drafting.draft(sequence, range(9), 1000)
            rounds[-1] += bool(draft.tokens)
            drafting.back_off_of(sequence).took(draft, 1)
        drafting.end(sequence)
    assert rounds[0] <= 15
    assert {*rounds[1:]} <= {1, 2, 3}


class Given(Drafter):
    """A drafter of as many tokens as it may."""

    def draft(
        self, sequence: int, tokens: Sequence[int], ahead: Sequence[int], pays: Callable[[int], int]
    ) -> Draft:
        return Draft((7,) * pays(0))


def drafting_of(most: int, *, stages: int = 1, **how: Any) -> Drafting:
    return Drafting(Given(), most, back_off=BackOff(stages=stages), **how)


def test_a_fixed_number_of_drafts() -> None:
    for fixed, count in ((True, 9), (False, BEGUN)):
        drafting = drafting_of(9, fixed=fixed)
        assert len(drafting.draft(0, range(9), 100).tokens) == count


def test_a_draft_is_expected_where_there_would_be_one_after_the_next_token() -> None:
    lookup = Drafting(LookupDrafter(), 5)
    assert lookup.expects(0, [1, 2, 3, 9, 1, 2], 100)
    assert not lookup.expects(1, [1, 2, 3, 9, 8, 7], 100)
    assert drafting_of(5).expects(0, range(9), 12)
    assert not drafting_of(5).expects(0, range(9), 11)  # the one after the next is the last
    assert not Drafting(Drafter(), 5).expects(0, range(9), 9)


@pytest.mark.parametrize(
    ("tokens", "context", "drafts"),
    [
        (10, 100, 5),
        # One more token comes than are accepted.
        (94, 100, 5),
        (95, 100, 4),
        (98, 100, 1),
        (99, 100, 0),
        # A round of 20 tokens enters before a cache of 64 is full, and leaves it.
        (57, 100, 5),
        (58, 100, 5),
        (59, 100, 4),
        (63, 100, 0),
        (80, 100, 0),
        # The token at 30 is the first that sees quantised keys.
        (25, 60, 5),
        (26, 60, 4),
        (30, 60, 0),
        (31, 60, 5),
    ],
)
def test_a_round_keeps_within_the_text_and_its_caches(
    tokens: int, context: int, drafts: int
) -> None:
    limits = {"quantised": 30} if context == 60 else {"cuttable": 64 if tokens < 90 else 1000}
    drafting = drafting_of(5, stages=2, fixed=True, **limits)
    assert len(drafting.draft(0, range(tokens), context).tokens) == drafts


@pytest.mark.parametrize(
    ("tokens", "context", "guesses"),
    [
        # As above, with a guess in the place of the known token, and what is under way before it.
        (6, 100, 6),
        (90, 100, 6),
        (94, 100, 2),
        (95, 100, 1),
        (96, 100, 0),
        (54, 64, 6),
        (58, 64, 2),
        (59, 64, 1),
        (60, 64, 0),
        # The first of them may be rejected when keys are quantised.
        (22, 30, 5),
        (26, 30, 1),
        (27, 30, 0),
        (30, 30, 0),
        (31, 30, 6),
    ],
)
def test_a_round_that_is_drafted_on_keeps_within_them_too(
    tokens: int, context: int, guesses: int
) -> None:
    limits = {100: {}, 64: {"cuttable": 64}, 30: {"quantised": 30}}[context]
    drafting = drafting_of(5, stages=2, fixed=True, **limits)
    drafting.back_off_of(0).took(Draft((7,) * 5), 6)  # all of them right
    draft = drafting.draft(0, range(tokens), 100, ahead=range(3))
    assert (len(draft.tokens), draft.goes_on) == (guesses, guesses > 0)


def test_counts() -> None:
    counts = DraftCounts(1, 3, 3) + DraftCounts(1, 3, 0) + DraftCounts(drafted=2)
    assert counts == DraftCounts(rounds=2, drafted=8, accepted=3)
    assert str(counts) == "8 tokens in 2 rounds, 3 accepted"
