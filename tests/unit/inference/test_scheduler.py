"""The order of items: chunks of prompts, then groups of sequences by turns."""

from __future__ import annotations

import pytest

from shardmlx.inference.commands import (
    Begin,
    Border,
    Commands,
    Decode,
    Drop,
    Item,
    Keep,
    Prefill,
    PutBack,
    item_of,
)
from shardmlx.inference.prefix_cache import CachedPrefix
from shardmlx.inference.sampling_params import SamplingParams
from shardmlx.inference.scheduler import FoundPrefix, Scheduler
from tests.helpers.call_counts import calls_in


def play(
    scheduler: Scheduler, steps: int, delay: int = 1, lengths: dict[int, int] | None = None
) -> list[str]:
    """Return what is issued, as letters; the tokens of an item return ``delay`` steps after it.

    ``a3`` is a chunk of 3 tokens of prompt a, ``a!`` its only one; ``AB`` a decode step of
    sequences a and b; a dot is a step without work. A sequence ends after ``lengths`` tokens.
    """
    left = dict(lengths or {})
    under_way: list[tuple[int, Item]] = []
    out = []
    for now in range(steps):
        for at, item in list(under_way):
            if at <= now:
                under_way.remove((at, item))
                scheduler.returned(item)
                for sequence in item.sequences:
                    left[sequence] = left.get(sequence, 10**9) - 1
                    if left[sequence] == 0:
                        scheduler.finish(sequence)
        issued = item_of(scheduler.next() or ())
        out.append("." if issued is None else show(issued))
        if issued is not None and issued.samples:
            under_way.append((now + delay, issued))
    return out


def item_in(commands: Commands) -> Item:
    item = item_of(commands)
    assert item is not None
    return item


def show(item: Item) -> str:
    names = "".join(chr(ord("a") + sequence) for sequence in item.sequences)
    if isinstance(item, Decode):
        return names.upper()
    return names + ("!" if item.samples else str(item.length))


@pytest.mark.parametrize(
    ("groups", "chunk", "prompts", "delay", "items"),
    [
        (1, 3, [1], 1, "a! A"),
        (1, 3, [2], 1, "a1 A A"),
        (1, 3, [4], 1, "a3 A A"),
        (1, 3, [5], 1, "a3 a1 A A"),
        (1, 3, [8], 2, "a3 a3 a1 A . A . A ."),
        (2, 8, [1, 1, 1, 1], 2, "a! b! c! d! AC BD AC BD AC BD"),
        (2, 4, [5, 5, 5], 2, "a4 b4 c4 AC B AC B"),
    ],
)
def test_prompts_go_first_then_groups_take_turns(
    groups: int, chunk: int, prompts: list[int], delay: int, items: str
) -> None:
    """The last token of a prompt makes the first choice; a prompt joins the smallest group."""
    scheduler = Scheduler(groups, most=len(prompts), chunk=chunk)
    for sequence, tokens in enumerate(prompts):
        scheduler.add(sequence, tokens)
    assert " ".join(play(scheduler, len(items.split()), delay)) == items


@pytest.mark.parametrize(
    ("quantised", "items"),
    [(0, "a4 a3 A"), (1, "a1 a4 a2 A"), (4, "a4 a3 A"), (6, "a4 a2 a1 A"), (7, "a4 a3 A")],
)
def test_a_chunk_ends_where_caches_are_quantised(quantised: int, items: str) -> None:
    scheduler = Scheduler(groups=1, most=1, chunk=4, quantised=quantised)
    scheduler.add(0, 8)
    assert " ".join(play(scheduler, len(items.split()))) == items


def test_a_sequence_that_ends_makes_room_for_one_that_waits() -> None:
    scheduler = Scheduler(groups=1, most=2, chunk=4)
    for sequence in range(3):
        scheduler.add(sequence, 2)
    played = play(scheduler, 10, lengths={0: 2, 1: 4, 2: 2})
    assert " ".join(played) == "a1 b1 AB AB c1 BC BC . . ."
    assert scheduler.is_idle


@pytest.mark.parametrize(
    ("patience", "items"), [(1, "a! A b2 A b2 A b2 AB AB"), (2, "a! b2 A b2 b2 AB AB")]
)
def test_with_patience_prompts_do_not_hold_up_sequences(patience: int, items: str) -> None:
    scheduler = Scheduler(groups=1, most=2, chunk=2, patience=patience)
    scheduler.add(0, 1)
    scheduler.add(1, 7)
    assert " ".join(play(scheduler, len(items.split()))) == items


def test_a_dropped_sequence_is_announced_once_with_the_next_item() -> None:
    scheduler = Scheduler(groups=1, most=1, chunk=4)
    scheduler.add(0, 1)
    scheduler.add(1, 1)
    first = scheduler.next()
    assert first is not None
    scheduler.returned(item_in(first))
    scheduler.finish(0)
    second = scheduler.next()
    assert second == (Begin(1), Drop((0,)), Prefill(1, 1, samples=True))


def test_the_next_token_is_foreseen_while_nothing_else_can_come() -> None:
    scheduler = Scheduler(groups=1, most=1, chunk=4)
    scheduler.add(0, 1)
    first = scheduler.next()
    assert first is not None
    assert scheduler.foreseen() is None
    scheduler.returned(item_in(first))
    token = scheduler.next()
    assert token is not None
    assert scheduler.next() is None
    assert scheduler.foreseen() == item_in(token)


def test_with_a_capacity_as_many_sequences_as_it_has_room_for_padding_counted() -> None:
    scheduler = Scheduler(groups=1, most=8, chunk=8, capacity=1024)
    scheduler.add(0, 1, context=200)
    scheduler.add(1, 1, context=200)
    scheduler.add(2, 1, context=400)  # three sequences as long as this one have no room
    scheduler.add(3, 1, context=100)  # waits its turn
    played = play(scheduler, 9, lengths={0: 3, 1: 4})
    assert " ".join(played) == "a! b! AB AB c! BC d! CD CD"
    with pytest.raises(ValueError, match="a sequence of 1025 tokens, where 1024 are kept"):
        scheduler.add(4, 1, context=1025)
    with pytest.raises(ValueError, match="a prompt of 0 tokens"):
        scheduler.add(5, 0)


def test_what_is_there_of_a_prompt_is_not_computed_again() -> None:
    scheduler = Scheduler(groups=1, most=2, chunk=4)
    scheduler.find_prefix = lambda sequence: FoundPrefix(
        CachedPrefix(7, 9, is_whole=True) if sequence == 1 else None
    )
    scheduler.add(0, 3)
    scheduler.add(1, 12)
    items = []
    for _ in range(3):
        commands = scheduler.next()
        assert commands is not None
        begun = next((each.prefix for each in commands if isinstance(each, Begin)), None)
        items.append((show(item_in(commands)), begun))
    assert items == [
        ("a2", None),
        ("b2", CachedPrefix(7, 9, is_whole=True)),
        ("AB", None),
    ]


def test_a_sequence_may_be_finished_before_its_beginning_and_within_its_prompt() -> None:
    scheduler = Scheduler(groups=1, most=1, chunk=2)
    scheduler.add(0, 9)
    scheduler.add(1, 9)
    scheduler.add(2, 1)
    first = scheduler.next()
    assert first is not None
    assert scheduler.finish(0, keep=True)
    assert not scheduler.finish(1, keep=True)  # there is nothing of it yet
    second = scheduler.next()
    assert second == (Keep((0,), (0,)), Begin(2), Prefill(2, 1, samples=True))
    scheduler.news.drop(0)
    assert scheduler.news.take() == (Drop((0,)),)


def test_a_prompt_is_given_up_in_as_many_calls_however_many_wait() -> None:
    def calls(waiting: int) -> int:
        scheduler = Scheduler(1, most=4, chunk=8)
        for number in range(waiting):
            scheduler.add(number, tokens=5)
        counted = calls_in(lambda: scheduler.finish(waiting - 1))
        assert scheduler.next() is not None
        return counted

    assert calls(2000) == calls(20)


def test_a_sequence_takes_room_as_it_grows_and_the_last_gives_way() -> None:
    scheduler = Scheduler(groups=1, most=8, chunk=1000, capacity=1280)
    scheduler.add(0, 255, context=1280)
    scheduler.add(1, 9, context=1280)
    scheduler.add(2, 9, context=1280)  # three times 512 have no room
    played = play(scheduler, 9, lengths={0: 4})
    # Of 257 tokens the first may take 768: the second, of three tokens more, is computed again.
    assert " ".join(played) == "a254 b8 AB AB A A b10 c8 BC"
    assert scheduler.reserved == 2 * 512


def test_a_sequence_gives_way_in_the_middle_of_its_prompt() -> None:
    scheduler = Scheduler(groups=2, most=8, chunk=100, patience=1, capacity=1024)
    scheduler.add(0, 255, context=1024)
    scheduler.add(1, 250, SamplingParams(), context=1024)
    assert " ".join(play(scheduler, 7)) == "a100 a100 a54 A b100 A A"
    scheduler.finish(1)
    assert scheduler.news.take() == (Drop((1,)),)


def test_a_sequence_gives_way_that_has_its_turn_and_has_not_begun() -> None:
    scheduler = Scheduler(groups=1, most=2, chunk=1000, patience=1, capacity=1024)
    scheduler.add(0, 256, context=1024)
    scheduler.add(1, 250, context=1024)  # it has room beside 256 tokens, and not beside 257
    assert " ".join(play(scheduler, 4)) == "a255 A A A"
    assert scheduler.reserved == 768


def test_chunks_also_end_at_borders() -> None:
    scheduler = Scheduler(1, most=1, chunk=4)
    scheduler.find_prefix = lambda sequence: FoundPrefix(borders=(3, 9))
    scheduler.add(0, 12)
    told = [scheduler.next() or () for _ in range(4)]
    assert [[each for each in commands if not isinstance(each, Begin)] for commands in told] == [
        [Prefill(0, 3), Border(0, 3)],
        [Prefill(0, 4)],
        [Prefill(0, 2), Border(0, 9)],
        [Prefill(0, 2)],
    ]


@pytest.mark.parametrize(("tokens", "items"), [(9, "a255 b8 A B"), (1, "a255 b! A")])
def test_no_sequence_gives_way_while_its_token_is_under_way_and_the_stages_hear_of_it(
    tokens: int, items: str
) -> None:
    scheduler = Scheduler(groups=2, most=2, chunk=1000, capacity=1024)
    scheduler.add(0, 256, context=1024)
    scheduler.add(1, tokens, context=1024)
    issued = [item_in(scheduler.next() or ()) for _ in items.split()]
    assert " ".join(map(show, issued)) == items
    of_first, of_second = (
        next(item for item in reversed(issued) if item.sequences == (sequence,))
        for sequence in (0, 1)
    )
    scheduler.returned(of_first)  # with 257 tokens it takes more room than two have
    assert scheduler.next() is None
    scheduler.returned(of_second)
    assert scheduler.next() == (PutBack((1,)), Decode((0,), 0))


def test_a_token_of_a_sequence_that_has_left_changes_nothing() -> None:
    scheduler = Scheduler(groups=1, most=1, chunk=4)
    scheduler.add(0, 1)
    under_way = item_in(scheduler.next() or ())
    scheduler.finish(0)
    scheduler.returned(under_way)
    assert scheduler.is_idle
    assert scheduler.next() is None


@pytest.mark.parametrize("adapters", [(0, 1, 0), (1, 0, 1), (2, 1, 2)])
def test_sequences_of_another_adapter_take_turns_in_a_group_of_their_own(
    adapters: tuple[int, ...],
) -> None:
    scheduler = Scheduler(groups=1, most=3, chunk=4)
    for sequence, adapter in enumerate(adapters):
        scheduler.add(sequence, 2, adapter=adapter)
    assert " ".join(play(scheduler, 7)) == "a1 b1 c1 AC B AC B"


def test_a_prompt_may_come_next_until_all_of_it_but_its_last_token_has_entered() -> None:
    scheduler = Scheduler(groups=1, most=1, chunk=2)
    assert not scheduler.has_prompt
    scheduler.add(0, 4)
    scheduler.add(1, 2)  # waits until the first has ended
    seen = []
    for _ in range(3):
        seen.append(scheduler.has_prompt)
        scheduler.next()
    assert seen == [True, True, False]


def test_no_step_is_foreseen_of_a_group_that_grows_or_is_not_under_way() -> None:
    scheduler = Scheduler(groups=1, most=2, chunk=4)
    scheduler.add(0, 2)
    scheduler.next()
    assert scheduler.foreseen() is None  # its first step may begin now
    first = item_in(scheduler.next() or ())
    assert scheduler.foreseen() == first
    scheduler.add(1, 2)
    assert item_in(scheduler.next() or ()) == Prefill(1, 1)
    assert scheduler.foreseen() is None  # the other one joins
    scheduler.returned(first)
    assert item_in(scheduler.next() or ()).sequences == (0, 1)
