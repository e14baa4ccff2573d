"""The plan of a step: rows and micro-batches of replicas, and each rank's actions."""

from dataclasses import replace

import pytest

from shardmlx.errors import UserError
from shardmlx.pipeline.actions import COMPUTE, Action, Kind
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import Plan, suits
from shardmlx.pipeline.schedules import SCHEDULES
from shardmlx.pipeline.stage_map import StageMap
from tests.helpers.call_counts import calls_by_name
from tests.helpers.grids import parse_grid

TWO = StageMap.from_sizes([2, 2])

PLAN = Plan(Mesh(2, 2), TWO, "1f1b", 5, 2, (True, True))
"""Two replicas of two ranks, each with five rows."""


def test_a_step_has_as_many_micro_batches_as_its_busiest_replica_needs() -> None:
    assert PLAN.shares == (5, 5)
    assert PLAN.starts == (0, 5, 10)
    assert PLAN.microbatches == 3
    unequal = replace(PLAN, replica_rows=(5, 2))
    assert unequal.shares == (5, 2)
    assert unequal.starts == (0, 5, 7)
    assert [unequal.microbatches_of(replica) for replica in range(2)] == [3, 1]


def test_the_last_micro_batch_takes_the_rest_and_runs_follow_each_other() -> None:
    first, second = PLAN.actions
    assert len([action for action in first if action.kind is Kind.F]) == 3
    assert second[-1] == Action(1, Kind.W, 2)
    together = replace(PLAN, runs=2)
    assert len([action for action in together.actions[0] if action.kind is Kind.F]) == 6
    assert together.unproved_actions == together.actions


def test_a_plan_is_proved_by_its_shortest_step_alike_and_its_prediction_without() -> None:
    trains = (True, False, True, True, False, True, True)  # no other test has asked for it
    plan = Plan(Mesh(1, 7), StageMap.from_sizes([1] * 7), "1f1b", 41, 1, trains)
    asked = (lambda: plan.unproved_actions, plan.prove, lambda: plan.grid(28), lambda: plan.actions)
    assert [calls_by_name(each)["validate"] for each in asked] == [0, 1, 0, 1]


def test_forwards_are_the_actions_that_an_evaluation_takes() -> None:
    assert PLAN.forwards(2) == parse_grid("""
        0F0 0SEND_F0 0F1 0SEND_F1
        1RECV_F0 1F0 1RECV_F1 1F1
    """)


def test_a_rank_runs_the_stages_of_its_place_in_the_pipeline() -> None:
    assert [PLAN.stages_of(rank) for rank in range(4)] == [(0,), (1,), (0,), (1,)]
    stage_map = StageMap.from_sizes([1] * 4, (0, 1, 1, 0))
    v = Plan(Mesh(1, 2), stage_map, "zb-v", 2, 1, (True,) * 4)
    assert [v.stages_of(rank) for rank in range(2)] == [(0, 3), (1, 2)]


def test_a_map_may_number_its_ranks_freely() -> None:
    """The actions are those of the ranks in order, each at its own place."""
    turned = Plan(Mesh(1, 2), StageMap.from_sizes([2, 2], (1, 0)), "1f1b", 2, 1, (True, True))
    assert (
        turned.actions == replace(PLAN, mesh=Mesh(1, 2), rows=2, micro_batch_rows=1).actions[::-1]
    )
    three = StageMap.from_sizes([1, 1, 1], (2, 0, 1))
    plan = Plan(Mesh(1, 3), three, "gpipe", 2, 1, (True,) * 3)
    assert [actions[0].stage for actions in plan.actions] == [1, 2, 0]


def test_stages_below_the_first_trained_one_have_no_backward() -> None:
    frozen = replace(PLAN, trainable=(False, True)).actions
    assert {action.kind for action in frozen[0]} == {Kind.F, Kind.SEND_F}
    assert {action.kind for action in frozen[1]} == {Kind.RECV_F, Kind.F, Kind.W}


def test_the_shortest_step_alike_has_one_of_all_and_as_few_rows_as_it_needs() -> None:
    long = Plan(
        Mesh(2, 2), TWO, "1f1b", 40, 4, (True, True),
        pack=True, replica_rows=(40, 20), widths=(8, 16), together=2, runs=2,
    )  # fmt: skip
    ones = StageMap.from_sizes([1, 1])
    assert long.shortest_alike == Plan(Mesh(1, 2), ones, "1f1b", 16, 2, (True, True), together=2)
    short = Plan(Mesh(1, 2), ones, "1f1b", 1, 1, (True, True))
    assert short.shortest_alike == short
    assert replace(short, runs=2).shortest_alike == replace(short, rows=2)
    assert replace(short, rows=3, schedule="gpipe").shortest_alike.rows == 3


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"trainable": (True,)}, "1 flags for 2 stages"),
        ({"mesh": Mesh(2, 1)}, "1 pipeline ranks, 2 in the map"),
        ({"replica_rows": (5, 5, 5)}, "for 2 replicas"),
        ({"replica_rows": (4, 3)}, "5 at most"),
        ({"together": 2}, "not 2s"),
        ({"together": 2, "rows": 6, "micro_batch_rows": 3}, "not 2s"),
        ({"together": 2, "rows": 6, "replica_rows": (6, 3)}, "not 2s"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(change: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        replace(PLAN, **change)  # type: ignore[arg-type]


def test_a_schedule_that_cannot_run_so_is_refused() -> None:
    with pytest.raises(UserError, match="with 0 micro-batches"):
        replace(PLAN, replica_rows=(5, 0))
    with pytest.raises(UserError, match="with 0 micro-batches"):
        PLAN.grid(0)
    with pytest.raises(UserError, match="zb-v runs 2 stages a rank, not 1"):
        replace(PLAN, schedule="zb-v")
    loop = StageMap.from_sizes([1] * 4, (0, 1, 0, 1))
    with pytest.raises(UserError, match=r"puts stage 2 on rank 0, but .* ranks 0, 1, 1, 0"):
        Plan(Mesh(1, 2), loop, "zb-v", 2, 1, (True,) * 4)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("trainable", [(True,) * 4, (False, True, True, True), (False,) * 4])
def test_a_simulation_gets_a_step_without_its_messages(
    name: str, trainable: tuple[bool, ...]
) -> None:
    schedule = SCHEDULES[name]
    pp = 4 // schedule.default_virtual
    stage_map = StageMap.from_sizes([1] * 4, schedule.placement(pp, schedule.default_virtual))
    plan = Plan(Mesh(1, pp), stage_map, name, 8, 1, trainable)
    assert plan.computing(8) == tuple(
        tuple(action for action in actions if action.kind in COMPUTE) for actions in plan.grid(8)
    )


def test_a_schedule_suits_maps_of_its_own_form() -> None:
    loop, v = (StageMap.from_sizes([1] * 4, ranks) for ranks in ((0, 1, 0, 1), (0, 1, 1, 0)))
    found = {
        name: (suits(TWO, schedule), suits(loop, schedule), suits(v, schedule))
        for name, schedule in SCHEDULES.items()
    }
    assert found == {
        "gpipe": (True, True, False),
        "1f1b": (True, False, False),
        "interleaved-1f1b": (True, True, False),
        "zb-h1": (True, False, False),
        "zb-v": (False, False, True),
    }
