"""Lowering: messages, the frozen rule, evaluation; and what the validator refuses."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmlx.pipeline.actions import Action, Grid, Kind
from shardmlx.pipeline.lowering import ScheduleError, gradient_kinds, lower, validate
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.schedules import SCHEDULES, compute_actions, get_schedule, v_placement
from shardmlx.pipeline.simulate import Costs, simulate
from shardmlx.pipeline.stage_map import StageMap
from tests.helpers.grids import parse_grid


def arrangement(
    name: str, pp: int, microbatches: int, virtual: int
) -> tuple[Grid, tuple[int, ...]]:
    schedule = get_schedule(name)
    if schedule.virtual_choices is not None:
        virtual = schedule.default_virtual
    return schedule.order(pp, microbatches, virtual), schedule.placement(pp, virtual)


# Messages


def test_the_gradient_of_a_whole_backward_leaves_before_the_weights_are_turned_to() -> None:
    lowered = lower(compute_actions("1f1b", 3, 2, 1), (0, 1, 2))
    assert lowered == parse_grid("""
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0W0 0RECV_B1 0W1
        1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B0 1I0 1SEND_B0 1W0 \
            1RECV_B1 1I1 1SEND_B1 1W1
        2RECV_F0 2F0 2I0 2SEND_B0 2W0 2RECV_F1 2F1 2I1 2SEND_B1 2W1
    """)


def test_stages_on_the_same_rank_send_nothing_to_each_other() -> None:
    assert lower(compute_actions("zb-v", 2, 1, 2), v_placement(2, 2)) == parse_grid("""
        0F0 0SEND_F0 3RECV_F0 3F0 3I0 3SEND_B0 3W0 0RECV_B0 0W0
        1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2I0 2W0 1I0 1SEND_B0 1W0
    """)
    assert lower(compute_actions("1f1b", 1, 2, 1), (0,)) == parse_grid("0F0 0W0 0F1 0W1")


# The frozen rule


@pytest.mark.parametrize(
    ("trainable", "kinds"),
    [
        ((True, True, True), ("W", "IW", "IW")),
        ((False, True, True), ("", "W", "IW")),
        ((False, False, True), ("", "", "W")),
        ((True, False, True), ("W", "I", "IW")),
        ((True, False, False), ("W", "I", "I")),
        ((False, False, False), ("", "", "")),
    ],
)
def test_a_stage_computes_only_gradients_that_somebody_needs(
    trainable: tuple[bool, ...], kinds: tuple[str, ...]
) -> None:
    assert gradient_kinds(trainable) == tuple(frozenset(map(Kind, word)) for word in kinds)


def test_stages_below_the_first_trained_one_run_forward_only() -> None:
    lowered = lower(compute_actions("1f1b", 3, 1, 1), (0, 1, 2), (False, True, True))
    assert lowered == parse_grid("""
        0F0 0SEND_F0
        1RECV_F0 1F0 1SEND_F0 1RECV_B0 1W0
        2RECV_F0 2F0 2I0 2SEND_B0 2W0
    """)


def test_a_frozen_stage_above_a_trained_one_passes_the_gradient_on() -> None:
    for name in ("1f1b", "zb-h1"):
        lowered = lower(compute_actions(name, 3, 1, 1), (0, 1, 2), (True, False, True))
        assert lowered[1] == parse_grid("1RECV_F0 1F0 1SEND_F0 1RECV_B0 1I0 1SEND_B0")[0]


# Evaluation


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("pp", [1, 2, 3, 5])
def test_evaluation_takes_the_forwards_of_a_step_and_no_longer_than_it_must(
    name: str, pp: int
) -> None:
    """Rank p-1 starts after p-1 slots; in a V the last micro-batch then has p-1 ranks to go up."""
    schedule, microbatches = get_schedule(name), 4 * pp
    virtual = schedule.default_virtual
    placement = schedule.placement(pp, virtual)
    stage_map = StageMap.from_sizes([1] * len(placement), placement)
    plan = Plan(Mesh(1, pp), stage_map, name, 1, 1, (True,) * len(placement))
    forwards = plan.forwards(microbatches)
    validate(forwards, placement, [False] * len(placement))
    simulation = simulate(forwards, placement, Costs(virtual, 0, 0))
    up = pp - 1 if name == "zb-v" else 0
    assert simulation.makespan == microbatches * virtual + pp - 1 + up


# No (p, m, v) deadlocks


@settings(deadline=None, max_examples=300)
@given(
    data=st.data(),
    name=st.sampled_from(sorted(SCHEDULES)),
    pp=st.integers(1, 8),
    microbatches=st.integers(1, 20),
    virtual=st.integers(1, 4),
)
def test_every_schedule_lowers_to_a_grid_that_runs_whatever_is_frozen(
    data: st.DataObject, name: str, pp: int, microbatches: int, virtual: int
) -> None:
    """Every stage sees its micro-batches in ascending order, once, on its rank."""
    grid, placement = arrangement(name, pp, microbatches, virtual)
    stages = len(placement)
    trainable = data.draw(
        st.none() | st.lists(st.booleans(), min_size=stages, max_size=stages), label="trainable"
    )
    lowered = lower(grid, placement, trainable)
    validate(lowered, placement, trainable)
    simulate(lowered, placement, Costs(1, 1, 1), link=0.5)


# What the validator refuses

GOOD = """
    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0W0 0RECV_B1 0W1
    1RECV_F0 1F0 1I0 1SEND_B0 1W0 1RECV_F1 1F1 1I1 1SEND_B1 1W1
"""


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("1I0 1SEND_B0 1W0", "1W0 1I0 1SEND_B0", "rank 1, action 2: 1W0 comes without 1I0"),
        ("1I1 1SEND_B1", "1SEND_B1 1I1", "rank 1, action 7: 1SEND_B1 comes without 1I1"),
        ("0F0 0SEND_F0 0F1 0SEND_F1", "0F1 0SEND_F1 0F0 0SEND_F0", "rank 0, action 0: 0F1"),
        # Another order of the sum of gradients.
        ("0RECV_B0 0W0 0RECV_B1 0W1", "0RECV_B1 0W1 0RECV_B0 0W0", "rank 0, action 5: 0W1"),
        ("1F1 ", "", "rank 1, action 6: 1I1 comes without 1F1"),
        ("0W1", "", "rank 0: 0W1 is missing"),
        ("1W0", "1W0 1W0", "rank 1, action 5: 1W0 is done a second time"),
        ("1W0", "1W0 1B0", "rank 1, action 5: 1B0"),
        ("0W1", "1W1", "rank 0, action 7: 1W1"),
        ("0W1", "0B1", "rank 0, action 7: 0B1"),
        ("0W1", "7W1", "rank 0, action 7: 7W1"),
        ("0W1", "0W99", "rank 0, action 7: 0W99 comes without 0F99"),
        ("0SEND_F1 ", "", "deadlock: rank 0 waits for 1SEND_B1, rank 1"),
        ("1RECV_F1 ", "", "rank 1, action 5: 1F1 comes without 1RECV_F1"),
        ("0W1", "0W1 0SEND_B1", "rank 0, action 8: 0SEND_B1"),
        (
            "0F1 0SEND_F1 0RECV_B0 0W0 0RECV_B1 0W1",
            "0RECV_B0 0W0 0RECV_B1 0W1 0F1 0SEND_F1",
            "deadlock: rank 0 waits for 1SEND_B1, rank 1 waits for 0SEND_F1",
        ),
    ],
)
def test_a_broken_grid_is_refused_and_the_cell_pointed_at(old: str, new: str, fault: str) -> None:
    validate(parse_grid(GOOD), (0, 1))
    assert GOOD.count(old) == 1
    with pytest.raises(ScheduleError, match=f"^{re.escape(fault)}"):
        validate(parse_grid(GOOD.replace(old, new)), (0, 1))


def needed_before(action: Action, placement: tuple[int, ...]) -> set[Action]:
    """Return the actions that make what one reads, on any rank, and those that it must follow."""
    stage, kind, microbatch = action
    last = len(placement) - 1
    from_below = stage > 0 and placement[stage - 1] != placement[stage]
    from_above = stage < last and placement[stage + 1] != placement[stage]
    before: set[Action] = set()
    if kind in (Kind.SEND_F, Kind.I, Kind.W):
        before.add(Action(stage, Kind.F, microbatch))
    if kind is Kind.F and stage > 0:
        made = (stage, Kind.RECV_F) if from_below else (stage - 1, Kind.F)
        before.add(Action(*made, microbatch))
    if kind in (Kind.I, Kind.W) and stage < last:
        made = (stage, Kind.RECV_B) if from_above else (stage + 1, Kind.I)
        before.add(Action(*made, microbatch))
    if (kind is Kind.W and stage > 0) or kind is Kind.SEND_B:
        before.add(Action(stage, Kind.I, microbatch))
    if kind in (Kind.F, Kind.W) and microbatch > 0:
        before.add(Action(stage, kind, microbatch - 1))
    return before


@pytest.mark.parametrize(
    ("name", "pp", "microbatches", "virtual"),
    [
        ("gpipe", 2, 2, 1),
        ("gpipe", 2, 3, 2),
        ("1f1b", 3, 4, 1),
        ("zb-h1", 3, 4, 1),
        ("interleaved-1f1b", 2, 4, 2),
        ("interleaved-1f1b", 1, 2, 3),
        ("zb-v", 1, 3, 2),
        ("zb-v", 2, 4, 2),
        ("zb-v", 3, 4, 2),
    ],
)
def test_no_action_can_come_before_one_of_its_rank_that_it_needs(
    name: str, pp: int, microbatches: int, virtual: int
) -> None:
    """Neither in the place of that one, as if both were exchanged, nor right before it."""
    grid, placement = arrangement(name, pp, microbatches, virtual)
    lowered = lower(grid, placement)
    validate(lowered, placement)
    tried = 0
    for rank, actions in enumerate(lowered):
        place = {action: index for index, action in enumerate(actions)}
        for action, at in place.items():
            for before in needed_before(action, placement) & set(place):
                moved = list(actions)
                moved.insert(place[before], moved.pop(at))
                exchanged = list(actions)
                exchanged[at] = before
                exchanged[place[before]] = action
                for wrong in (moved, exchanged):
                    rows = (*lowered[:rank], tuple(wrong), *lowered[rank + 1 :])
                    with pytest.raises(ScheduleError, match=re.escape(str(action))):
                        validate(rows, placement)
                    tried += 1
    assert tried >= 4 * len(placement) * microbatches


def test_a_grid_without_actions_is_refused() -> None:
    with pytest.raises(ScheduleError):
        validate(((), ()), (0, 1))


@settings(deadline=None)
@given(
    data=st.data(),
    name=st.sampled_from(sorted(SCHEDULES)),
    pp=st.integers(1, 4),
    microbatches=st.integers(1, 6),
)
def test_no_action_can_be_lost_doubled_or_moved_to_another_rank(
    data: st.DataObject, name: str, pp: int, microbatches: int
) -> None:
    grid, placement = arrangement(name, pp, microbatches, 2)
    rows = [list(actions) for actions in lower(grid, placement)]
    rank = data.draw(st.integers(0, pp - 1), label="rank")
    index = data.draw(st.integers(0, len(rows[rank]) - 1), label="index")
    to = data.draw(st.integers(0, pp - 1), label="to")
    at = data.draw(st.integers(0, len(rows[to])), label="at")
    match data.draw(st.sampled_from(["lost", "doubled", "moved"])):
        case "lost":
            del rows[rank][index]
        case "doubled":
            rows[to].insert(at, rows[rank][index])
        case "moved" if to != rank:
            rows[to].insert(at, rows[rank].pop(index))
        case _:
            rows[rank][index] = Action(len(placement), Kind.F, 0)
    with pytest.raises(ScheduleError):
        validate(tuple(map(tuple, rows)), placement)
