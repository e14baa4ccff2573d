"""Drafts: made by looking back, accepted where they are right, and left where they do not pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shardmlx.inference.drafts import (
    FIRST,
    FIRST_OF_MODEL,
    PLAIN_STEPS,
    WAIT,
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


def steps(back_off: BackOff, count: int) -> None:
    for _ in range(count):
        back_off.took(Draft(), 1, 1.0)


def spent(accepted: int, seconds: float, steps: int = 2000, kind: int = 2) -> float:
    """Seconds that a text takes a token, where drafts of four are as good as this."""
    back_off, draft = BackOff(), Draft((1, 2, 3, 4), kind)
    tokens, total = 0, 0.0
    for _ in range(steps):
        is_round = back_off.length(kind, 4) > 0
        took, came = (seconds, accepted + 1) if is_round else (1.0, 1)
        back_off.took(draft if is_round else Draft(), came, took)
        tokens, total = tokens + came, total + took
    return total / tokens


def test_drafts_begin_when_a_plain_step_is_measured() -> None:
    back_off = BackOff()
    steps(back_off, PLAIN_STEPS - 1)
    assert not back_off.allows(2)
    steps(back_off, 1)
    assert back_off.allows(2)


def test_drafts_that_fail_cost_less_than_three_per_cent_and_those_that_pay_go_on() -> None:
    assert spent(accepted=0, seconds=1.5) <= 1.01
    assert spent(accepted=0, seconds=4.0) <= 1.01
    assert spent(accepted=0, seconds=1.5, steps=100) <= 1.02
    assert spent(accepted=3, seconds=1.5) == pytest.approx(1.5 / 4, rel=0.01)
    assert spent(accepted=1, seconds=2.5) <= 1.01


def test_a_kind_that_fails_leaves_the_others_alone() -> None:
    back_off = BackOff()
    steps(back_off, PLAIN_STEPS)
    for _ in range(3):
        assert back_off.allows(2)
        back_off.took(Draft((1, 2), 2), 1, 1.4)
        if not back_off.allows(2):
            break
    assert back_off.allows(4)
    # It may try again when it has been paid for by plain steps.
    steps(back_off, 200)
    assert back_off.allows(2)


@pytest.mark.parametrize("count", [4, 8, 16, 64])
def test_a_long_draft_that_was_wrong_is_tried_again_soon_and_then_later(count: int) -> None:
    """Whatever it has cost: what follows may be a copy of what was given."""
    back_off = BackOff()
    steps(back_off, PLAIN_STEPS)
    draft = Draft((1,) * count, 4)
    waits = []
    for _ in range(4):
        back_off.took(draft, 1, 1.0 + count)
        wait = 0
        while not back_off.allows(4):
            steps(back_off, 1)
            wait += 1
        waits.append(wait)
    assert waits == pytest.approx([WAIT, 2 * WAIT, 4 * WAIT, 8 * WAIT], abs=2)
    back_off.took(draft, count + 1, 2.0)
    assert back_off.allows(4)


def test_what_drafts_have_saved_is_spent_within_few_steps_where_they_fail() -> None:
    back_off = BackOff()
    steps(back_off, PLAIN_STEPS)
    for _ in range(100):
        back_off.allows(3)
        back_off.took(Draft((1, 2, 3), 3), 4, 1.2)
    rounds = 0
    while back_off.allows(3):
        back_off.took(Draft((1, 2, 3), 3), 1, 1.5)
        rounds += 1
    assert rounds in range(10, 41)


def test_the_time_of_the_first_round_is_not_counted() -> None:
    """With it a GPU compiles."""
    back_off = BackOff()
    steps(back_off, PLAIN_STEPS)
    assert back_off.allows(2)
    back_off.took(Draft((1, 2), 2), 1, 100.0)
    assert back_off.allows(2)
    back_off.took(Draft((1, 2, 3), 2), 1, 100.0)
    assert not back_off.allows(2)


def test_a_model_that_takes_as_long_as_a_plain_step_is_found_out_soon() -> None:
    """Although all that it guesses is right."""
    back_off = BackOff(FIRST_OF_MODEL)
    steps(back_off, PLAIN_STEPS)
    lengths = []
    while (count := back_off.length(0, 16)) > 0:
        back_off.took(Draft((1,) * count, 0, float(count)), count + 1, 1.0 + 1.2 * count)
        lengths.append(count)
    assert sum(lengths[:2]) <= 16
    assert {*lengths[2:]} == {1}
    assert len(lengths) <= 40


def test_a_draft_is_as_long_as_pays_most() -> None:
    """By the rate at which drafts are accepted, and the times of a plain step, of a token that is
    verified, and of one that is made."""

    def length(seconds: float, made: float, right: int) -> int:
        back_off = BackOff(first=8.0)
        steps(back_off, PLAIN_STEPS)
        for _ in range(7):
            draft = Draft((1, 2, 3, 4, 5), 0, 5 * made)
            back_off.took(draft, 1 + right, 1.0 + 5 * (seconds + made))
        return back_off.length(0, 16)

    assert length(0.01, 0.0, right=5) == 16
    assert length(0.1, 0.0, right=4) == 6
    assert length(0.1, 0.1, right=4) == 4
    assert length(0.1, 0.3, right=1) == 1
    assert BackOff().length(0, 16) == 0  # nothing is measured


def measured(stages: int, own: float, verified: float = 0.2, made: float = 0.0) -> BackOff:
    """Rank 0 takes so much ``own`` time of a plain step, a second; two of three are accepted."""
    back_off = BackOff(first=8.0, stages=stages)
    for _ in range(PLAIN_STEPS):
        back_off.took(Draft(), 1, 1.0, own)
    for _ in range(9):
        more = own + verified / stages + made
        back_off.took(Draft((1,), 2, made), 2, 1.0 + verified, more)
    back_off._known(2).accepted, back_off._known(2).rejected = 2.0, 1.0
    return back_off


def test_rounds_are_drafted_on_where_that_makes_a_token_sooner() -> None:
    # With two equal stages a round whose guesses are right takes half the time.
    assert measured(2, 0.5).goes_on(2, 0)
    assert measured(2, 0.5).goes_on(2, 2)
    # By these times it makes a tenth at most, and a miss takes some time that is not counted.
    assert not measured(2, 0.5).goes_on(2, 3)
    assert not measured(1, 1.0).goes_on(2, 0)
    # Few guesses are right.
    assert not measured(2, 0.5).goes_on(2, 8)
    # Rounds that are void keep the slower stage.
    assert not measured(2, 0.9).goes_on(2, 0)
    assert not measured(2, 0.1).goes_on(2, 0)
    assert measured(3, 0.3).goes_on(2, 2)
    # Rank 0 makes the drafts.
    assert not measured(2, 0.5, made=0.5).goes_on(2, 2)
    # Nothing is measured.
    assert not BackOff(stages=2).goes_on(2, 0)


def test_rounds_that_are_drafted_on_are_shorter() -> None:
    """Of a token alone, where verifying another takes as long."""
    assert [measured(1, 1.0, each).length(2, 16) for each in (0.1, 0.2, 0.7)] == [4, 2, 1]
    assert [measured(2, 0.5, each).length(2, 16) for each in (0.1, 0.2, 0.7)] == [2, 1, 0]


def test_wrong_guesses_end_what_is_drafted_on() -> None:
    back_off, misses = measured(2, 0.5), 0
    while back_off.goes_on(2, 0):
        back_off.missed(Draft((1,), 2, goes_on=True))
        misses += 1
    assert misses in range(5, 20)


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "auto"])
@pytest.mark.parametrize("first", [FIRST, FIRST_OF_MODEL])
def test_a_text_in_which_all_drafts_were_wrong_takes_none_from_the_next(
    first: float, fixed: bool
) -> None:
    """Sampled at a high temperature, say. Nor does another that is under way get fewer."""
    drafting = Drafting(Given(), 4, fixed=fixed, back_off=BackOff(first))
    steps(drafting.back_off_of(0), PLAIN_STEPS)
    beside = drafting.draft(1, range(9), 100)
    lost = 0
    while (draft := drafting.draft(0, range(9), 100)).tokens:
        drafting.back_off_of(0).took(draft, 1, 1.0 + 0.2 * len(draft.tokens))
        lost += 1
    assert 1 <= lost <= 20
    assert beside.tokens
    assert len(drafting.draft(1, range(9), 100).tokens) >= len(beside.tokens)
    drafting.end(0)
    for sequence in range(2, 12):
        draft = drafting.draft(sequence, range(9), 100)
        assert len(draft.tokens) >= (4 if fixed else 2)
        drafting.back_off_of(sequence).took(draft, 1 + len(draft.tokens), 1.5)
        assert drafting.draft(sequence, range(9), 100).tokens
        drafting.end(sequence)


def test_texts_in_which_drafts_fail_cost_little_each() -> None:
    """Ten of a hundred steps, of a model that was named: the first may cost more."""
    drafting, rounds = Drafting(Given(), 4, back_off=BackOff(FIRST_OF_MODEL)), []
    for sequence in range(10):
        rounds.append(0)
        for _ in range(100):
            draft = drafting.draft(sequence, range(9), 1000)
            rounds[-1] += bool(draft.tokens)
            drafting.back_off_of(sequence).took(draft, 1, 1.0 + 0.3 * len(draft.tokens))
        drafting.end(sequence)
    assert rounds[0] <= 15
    assert {*rounds[1:]} <= {1, 2, 3}


def test_times_of_a_machine_are_known_to_the_next_text() -> None:
    drafting = Drafting(Given(), 16, back_off=BackOff(8.0))
    steps(drafting.back_off_of(0), PLAIN_STEPS)
    for _ in range(5):
        drafting.back_off_of(0).took(Draft((1,) * 4, 0, 2.0), 5, 1.0 + 4.0)
    drafting.end(0)
    assert len(drafting.draft(1, range(9), 100).tokens) <= 2
    assert len(Drafting(Given(), 16, back_off=fresh()).draft(1, range(9), 100).tokens) >= 3


def fresh() -> BackOff:
    back_off = BackOff(8.0)
    steps(back_off, PLAIN_STEPS)
    return back_off


class Given(Drafter):
    """A drafter of as many tokens as it may."""

    def draft(
        self, sequence: int, tokens: Sequence[int], ahead: Sequence[int], pays: Callable[[int], int]
    ) -> Draft:
        return Draft((7,) * pays(0))


def drafting_of(most: int, *, stages: int = 1, **how: Any) -> Drafting:
    """Plain steps are measured."""
    drafting = Drafting(Given(), most, back_off=BackOff(stages=stages), **how)
    for _ in range(PLAIN_STEPS):
        drafting.back_off.took(Draft(), 1, 1.0, 1 / stages)
    return drafting


def test_a_fixed_number_of_drafts() -> None:
    for fixed, count in ((True, 9), (False, 3)):
        assert Drafting(Given(), 9, fixed=fixed).draft(0, range(9), 100) == Draft()
        drafting = drafting_of(9, fixed=fixed)
        assert len(drafting.draft(0, range(9), 100).tokens) == count


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
    drafting.back_off_of(0).took(Draft((7,) * 5), 6, 1.0, 0.5)  # all of them right
    draft = drafting.draft(0, range(tokens), 100, ahead=range(3))
    assert (len(draft.tokens), draft.goes_on) == (guesses, guesses > 0)


def test_counts() -> None:
    counts = DraftCounts(1, 3, 3) + DraftCounts(1, 3, 0) + DraftCounts(drafted=2)
    assert counts == DraftCounts(rounds=2, drafted=8, accepted=3)
    assert str(counts) == "8 tokens in 2 rounds, 3 accepted"
