"""Drafts: made by looking back, accepted where they are right, and left where they do not pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from shardmlx.inference.drafts import (
    FIRST_OF_MODEL,
    PLAIN_STEPS,
    BackOff,
    Draft,
    DraftCounts,
    Drafter,
    Drafting,
    LookupDrafter,
    accepted,
)


def looked_up(tokens: Sequence[int], most: int = 4, kinds: Sequence[int] = (2, 3, 4)) -> Draft:
    return LookupDrafter().draft(0, tokens, most, lambda kind: most * (kind in kinds))


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


def test_a_match_that_does_not_pay_gives_no_draft() -> None:
    tokens = [7, 1, 2, 3, 8, 2, 3, 9, 7, 1, 2, 3]
    assert looked_up(tokens, kinds=(2, 3)).tokens == ()


def three(kind: int) -> int:
    return 3


def test_a_text_that_grows_is_looked_up_like_a_whole_one() -> None:
    text = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1, 5, 3, 1, 4, 1, 2, 6, 3]
    drafter = LookupDrafter()
    for end in range(1, len(text) + 1):
        assert drafter.draft(7, text[:end], 3, three) == looked_up(text[:end], 3)
    drafter.forget(7)
    assert drafter.draft(7, text[:3], 3, three) == Draft()


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


class Given(Drafter):
    """A drafter of as many tokens as it may."""

    def draft(
        self, sequence: int, tokens: Sequence[int], most: int, pays: Callable[[int], int]
    ) -> Draft:
        return Draft(tuple(range(most)))


def test_a_fixed_number_of_drafts() -> None:
    class Asks(Given):
        def draft(
            self, sequence: int, tokens: Sequence[int], most: int, pays: Callable[[int], int]
        ) -> Draft:
            return Draft((7,) * pays(0))

    def lengths(fixed: bool) -> list[int]:
        drafting = Drafting(Asks(), 9, fixed=fixed)
        lengths = []
        for _ in range(PLAIN_STEPS + 1):
            lengths.append(len(drafting.draft(0, range(9), 100).tokens))
            drafting.took(Draft(), 1, 1.0)
        return lengths

    assert lengths(fixed=True) == [0, 0, 0, 9]
    assert lengths(fixed=False) == [0, 0, 0, 3]


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
    drafting = Drafting(Given(), 5, cuttable=64 if tokens < 90 else 1000)
    if context == 60:
        drafting = Drafting(Given(), 5, quantised=30)
    assert len(drafting.draft(0, range(tokens), context).tokens) == drafts


def test_a_predicted_text_is_looked_up_where_the_prompt_ends() -> None:
    """Also where the prompt ends like another message in it."""
    prompt, predicted = [8, 9, 1, 2, 3, 8, 9], [4, 5, 6, 7, 4, 5, 2]
    drafter = LookupDrafter()
    drafter.expect(0, prompt, predicted)
    drafter.read(1, prompt)
    draft = drafter.draft(0, prompt, 3, three)
    assert draft.tokens == (4, 5, 6)
    assert draft.kind not in (2, 3, 4)  # those of texts that have not paid
    assert drafter.draft(1, prompt, 3, three).tokens == (1, 2, 3)
    assert drafter.draft(0, [*prompt, 4, 5, 6, 7], 3, three).tokens == (4, 5, 2)
    assert drafter.draft(0, [*prompt, 4, 5, 6, 0, 1, 2], 3, three).tokens == (3, 8, 9)


def test_counts() -> None:
    drafting = Drafting(Given(), 5)
    drafting.took(Draft(), 1, 1.0)
    drafting.took(Draft((1, 2, 3)), 4, 1.0)
    drafting.took(Draft((1, 2, 3)), 1, 1.0)
    assert drafting.counts == DraftCounts(rounds=2, drafted=6, accepted=3)
    assert str(drafting.counts).endswith("3 accepted, 2.50 tokens a round")
