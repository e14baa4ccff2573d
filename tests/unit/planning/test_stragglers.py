"""Who slows the others down."""

import pytest

from shardmlx.planning.stragglers import Straggler, Watch

HOSTS = ("mac-studio", "mac-mini", "macbook", "old-mac")


def reports(ranks: int, *measured: tuple[float, ...]) -> list[Straggler]:
    """Whom the watch names at reports of these seconds."""
    watch, found = Watch(HOSTS[:ranks]), []
    for number, seconds in enumerate(measured, start=1):
        found += watch.observe(10 * number, seconds)
    return found


def after_usual(*measured: tuple[float, ...]) -> list[Straggler]:
    """Whom it names if all ranks take a second in the first reports."""
    ranks = len(measured[0])
    return reports(ranks, *[(1.0,) * ranks] * 3, *measured)


def test_a_rank_slower_than_usual_beside_the_others_is_named_once() -> None:
    (straggler,) = after_usual(*[(1.2, 1.9)] * 8)
    assert straggler == Straggler(60, 1, "mac-mini", 1.9, 1.2)


def test_a_hiccup_is_no_straggler() -> None:
    slow, good = (1.0, 2.0), (1.0, 1.0)
    assert after_usual(slow, slow, good, slow, slow, good, slow, slow) == []


@pytest.mark.parametrize("seconds", [(1.0, 1.2), (3.0, 3.1), (0.1, 0.1), (0.6, 1.0)])
def test_what_all_share_and_what_is_as_usual_names_nobody(seconds: tuple[float, ...]) -> None:
    assert after_usual(*[seconds] * 6) == []


def test_the_median_of_the_others_is_what_counts() -> None:
    found = after_usual(*[(1.0, 1.1, 5.0, 3.0)] * 6)
    assert [each.rank for each in found] == [2, 3]
    assert [each.expected_seconds for each in found] == pytest.approx([1.1, 1.1])


def test_one_rank_alone_and_missing_times_name_nobody() -> None:
    assert after_usual(*[(9.0,)] * 6) == []
    assert after_usual(*[(0.0, 9.0)] * 6) == []


def test_who_stays_as_it_was_is_no_straggler() -> None:
    assert reports(2, *[(1.0, 3.0)] * 9) == []
    assert reports(2, *[(2.0, 3.0)] * 3, *[(1.0, 3.0)] * 6) == []


def test_but_who_becomes_slower_than_it_was_is() -> None:
    (straggler,) = reports(2, *[(1.0, 3.0)] * 3, *[(1.0, 4.5)] * 3)
    assert (straggler.rank, straggler.step) == (1, 60)
    # A first report that warms up does not hide it.
    found = reports(2, (1.0, 9.0), *[(1.0, 3.0)] * 2, *[(1.0, 4.5)] * 3)
    assert [each.rank for each in found] == [1]
