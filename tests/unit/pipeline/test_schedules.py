"""Schedules: golden grids, order of the micro-batches, arguments."""

import re
from itertools import pairwise

import pytest

from shardmlx.pipeline.actions import Kind
from shardmlx.pipeline.figure import timeline
from shardmlx.pipeline.schedules import (
    SCHEDULES,
    compute_actions,
    get_schedule,
    loop_placement,
    v_placement,
)
from shardmlx.pipeline.simulate import Costs, simulate
from tests.helpers.grids import parse_grid
from tests.helpers.refusals import refusal

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W


def test_gpipe_runs_all_forwards_then_all_backwards() -> None:
    assert compute_actions("gpipe", pp=2, microbatches=3, virtual=1) == parse_grid("""
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1F1 1F2 1B0 1B1 1B2
    """)


def test_gpipe_with_two_stages_a_rank_goes_breadth_first() -> None:
    assert compute_actions("gpipe", pp=2, microbatches=2, virtual=2) == parse_grid("""
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """)


def test_1f1b() -> None:
    assert compute_actions("1f1b", pp=4, microbatches=8, virtual=1) == parse_grid("""
        0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7
        1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5 1B6 1B7
        2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6 2B7
        3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7
    """)


def test_interleaved_1f1b_is_the_order_of_megatron_lm() -> None:
    assert compute_actions("interleaved-1f1b", pp=2, microbatches=4, virtual=2) == parse_grid("""
        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """)
    assert compute_actions("interleaved-1f1b", pp=4, microbatches=8, virtual=2) == parse_grid("""
        0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 4F7 0B1 0B2 0B3 4B4 4B5 4B6 4B7 0B4 0B5 0B6 0B7
        1F0 1F1 1F2 1F3 5F0 5F1 5F2 5F3 1F4 5B0 1F5 5B1 1F6 5B2 1F7 5B3 5F4 1B0 5F5 1B1 5F6 1B2 5F7 1B3 5B4 5B5 5B6 5B7 1B4 1B5 1B6 1B7
        2F0 2F1 2F2 2F3 6F0 6F1 6F2 6B0 6F3 6B1 2F4 6B2 2F5 6B3 2F6 2B0 2F7 2B1 6F4 2B2 6F5 2B3 6F6 6B4 6F7 6B5 6B6 6B7 2B4 2B5 2B6 2B7
        3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1 3F6 3B2 3F7 3B3 7F4 7B4 7F5 7B5 7F6 7B6 7F7 7B7 3B4 3B5 3B6 3B7
    """)  # noqa: E501


def test_interleaved_1f1b_deals_other_microbatches_to_groups_of_at_least_p() -> None:
    assert compute_actions("interleaved-1f1b", pp=2, microbatches=5, virtual=2) == parse_grid("""
        0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1 0B2 2B3 2B4 0B3 0B4
        1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4
    """)


def test_interleaved_1f1b_with_one_stage_a_rank_is_1f1b() -> None:
    assert compute_actions("interleaved-1f1b", 4, 7, 1) == compute_actions("1f1b", 4, 7, 1)


def test_zb_h1() -> None:
    assert compute_actions("zb-h1", pp=4, microbatches=8, virtual=1) == parse_grid("""
        0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0F5 0I2 0W2 0F6 0I3 0W3 0F7 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7
        1F0 1F1 1F2 1I0 1F3 1I1 1W0 1F4 1I2 1W1 1F5 1I3 1W2 1F6 1I4 1W3 1F7 1I5 1W4 1I6 1W5 1I7 1W6 1W7
        2F0 2F1 2I0 2F2 2I1 2F3 2I2 2W0 2F4 2I3 2W1 2F5 2I4 2W2 2F6 2I5 2W3 2F7 2I6 2W4 2I7 2W5 2W6 2W7
        3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3F5 3I5 3W2 3F6 3I6 3W3 3F7 3I7 3W4 3W5 3W6 3W7
    """)  # noqa: E501


def test_zb_v() -> None:
    assert compute_actions("zb-v", pp=2, microbatches=4, virtual=2) == parse_grid("""
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
    """)  # noqa: E501


def test_placements_go_round_or_down_and_up_again() -> None:
    assert loop_placement(3, 2) == (0, 1, 2, 0, 1, 2)
    assert v_placement(3, 2) == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize("microbatches", range(1, 20))
def test_groups_of_interleaved_1f1b_are_even_and_no_smaller_than_they_must(
    microbatches: int,
) -> None:
    forwards = [
        a for a in compute_actions("interleaved-1f1b", 4, microbatches, 2)[0] if a.kind is F
    ]
    turns = [i for i, (a, b) in enumerate(pairwise(forwards), 1) if a.stage != b.stage]
    sizes = [b - a for a, b in pairwise([0, *turns, len(forwards)])]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(4, microbatches)


def test_an_unknown_schedule_is_refused_with_the_names() -> None:
    error = refusal(get_schedule, "2f2b")
    assert "2f2b" in error.problem
    assert all(name in error.remedy for name in SCHEDULES)


@pytest.mark.parametrize(
    ("name", "pp", "microbatches", "virtual"),
    [("1f1b", 0, 8, 1), ("gpipe", 4, -1, 1), ("interleaved-1f1b", 4, 8, 0), ("zb-h1", 4, 8, 2)],
)
def test_numbers_that_do_not_fit_are_refused(
    name: str, pp: int, microbatches: int, virtual: int
) -> None:
    assert name in refusal(compute_actions, name, pp, microbatches, virtual).problem


@pytest.mark.parametrize(
    ("name", "pp", "microbatches", "costs"),
    [
        ("gpipe", 3, 3, Costs(1, 0.5, 0.5)),
        ("1f1b", 3, 3, Costs(1, 0.5, 0.5)),
        ("interleaved-1f1b", 2, 4, Costs(2, 1, 1)),
        ("zb-h1", 3, 4, Costs(1, 1, 1)),
        ("zb-v", 2, 3, Costs(2, 2, 2)),
    ],
)
def test_the_grid_beside_a_schedule_is_the_one_that_is_drawn(
    name: str, pp: int, microbatches: int, costs: Costs
) -> None:
    schedule = get_schedule(name)
    placement = schedule.placement(pp, schedule.default_virtual)
    grid = compute_actions(name, pp, microbatches)
    lines = [line.strip() for line in (schedule.order.__doc__ or "").splitlines()]
    beside = [line for line in lines if re.match(r"r\d ", line)]
    assert beside == timeline(simulate(grid, placement, costs)).splitlines()


@pytest.mark.parametrize(
    ("schedule", "microbatches", "fewest"),
    [
        ("gpipe", 100, 100),
        *(
            (name, count, min(count, 16))
            for name in ("1f1b", "zb-h1", "zb-v")
            for count in (9, 100)
        ),
        ("interleaved-1f1b", 100, 16),
        ("interleaved-1f1b", 101, 17),
        ("interleaved-1f1b", 102, 22),
        ("interleaved-1f1b", 103, 27),
        ("interleaved-1f1b", 26, 22),
        ("interleaved-1f1b", 14, 14),
    ],
)
def test_a_long_step_holds_the_same_as_one_of_so_many_microbatches(
    schedule: str, microbatches: int, fewest: int
) -> None:
    """On 4 ranks: two rounds of the pipeline to fill and to drain it, or larger groups among
    others."""
    assert get_schedule(schedule).fewest_alike(4, microbatches) == fewest
    assert _held(schedule, microbatches) == _held(schedule, fewest)


def _held(schedule: str, microbatches: int) -> list[set[tuple[int, ...]]]:
    """Return of each of 4 ranks how many micro-batches of each of its stages it holds at a time."""
    virtual = get_schedule(schedule).default_virtual
    held = []
    for actions in compute_actions(schedule, 4, microbatches):
        counts = dict.fromkeys(sorted({action.stage for action in actions}), 0)
        assert len(counts) == virtual
        seen = set()
        for action in actions:
            counts[action.stage] += {F: 1, B: -1, W: -1}.get(action.kind, 0)
            seen.add(tuple(counts.values()))
        held.append(seen)
    return held


def test_the_order_repeats_itself_with_each_microbatch_or_with_each_group() -> None:
    periods = {name: schedule.period(4) for name, schedule in SCHEDULES.items()}
    assert periods == {"gpipe": 1, "1f1b": 1, "interleaved-1f1b": 4, "zb-h1": 1, "zb-v": 1}
