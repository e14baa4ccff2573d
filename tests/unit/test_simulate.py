"""The simulator, held against the closed forms of the literature."""

from itertools import product

import pytest

from shardmlx.actions import Action, Kind, parse_grid
from shardmlx.draw import timeline
from shardmlx.errors import UserError
from shardmlx.lowering import lower
from shardmlx.schedules import compute_actions, get_schedule
from shardmlx.simulate import Costs, Simulation, simulate

EQUAL = Costs(1, 1, 1)
SIZES = [
    (pp, microbatches) for pp, microbatches in product((1, 2, 3, 4, 8), (1, 2, 3, 4, 7, 8, 16))
]


def simulated(
    name: str, pp: int, microbatches: int, costs: Costs, virtual: int | None = None
) -> Simulation:
    schedule = get_schedule(name)
    grid = compute_actions(name, pp, microbatches, virtual)
    return simulate(grid, schedule.placement(pp, virtual or schedule.default_virtual), costs)


def bubble_times(simulation: Simulation) -> list[float]:
    return [fraction * simulation.makespan for fraction in simulation.bubbles]


# Closed forms


@pytest.mark.parametrize(("pp", "microbatches"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("costs", [EQUAL, Costs(2, 1, 3), Costs(0.5, 4, 0)])
def test_bubble_of_gpipe_and_1f1b(name: str, pp: int, microbatches: int, costs: Costs) -> None:
    simulation = simulated(name, pp, microbatches, costs)
    assert simulation.bubble == pytest.approx((pp - 1) / (microbatches + pp - 1))
    assert simulation.bubbles == pytest.approx([simulation.bubble] * pp)


@pytest.mark.parametrize(("pp", "microbatches"), SIZES)
def test_peak_in_flight_of_gpipe_and_1f1b(pp: int, microbatches: int) -> None:
    gpipe = simulated("gpipe", pp, microbatches, EQUAL)
    assert gpipe.peak_in_flight == (microbatches,) * pp
    one_f_one_b = simulated("1f1b", pp, microbatches, EQUAL)
    assert one_f_one_b.peak_in_flight == tuple(min(microbatches, pp - s) for s in range(pp))


@pytest.mark.parametrize("virtual", [2, 3, 4])
@pytest.mark.parametrize("costs", [EQUAL, Costs(3, 1, 1), Costs(1, 2, 2)])
def test_interleaving_divides_the_bubble_by_the_stages_a_rank(costs: Costs, virtual: int) -> None:
    for pp, rounds in product((1, 2, 3, 4, 8), (1, 2, 5)):
        simulation = simulated("interleaved-1f1b", pp, rounds * pp, costs, virtual)
        expected = (pp - 1) * (costs.forward + costs.of(Kind.B)) / virtual
        assert bubble_times(simulation) == pytest.approx([expected] * pp, abs=1e-9)


@pytest.mark.parametrize("virtual", [2, 3])
def test_interleaving_has_that_bubble_for_every_m_from_p(virtual: int) -> None:
    for pp in (2, 3, 4, 5):
        for microbatches in range(pp, 4 * pp):
            simulation = simulated("interleaved-1f1b", pp, microbatches, EQUAL, virtual)
            assert bubble_times(simulation) == pytest.approx([(pp - 1) * 3 / virtual] * pp)


def test_peak_in_flight_of_interleaved_1f1b() -> None:
    for pp, rounds, virtual in product((1, 2, 3, 4), (1, 2, 4), (2, 3)):
        simulation = simulated("interleaved-1f1b", pp, rounds * pp, EQUAL, virtual)
        assert simulation.peak_in_flight == tuple(
            min(rounds * pp * virtual, (virtual - 1) * pp + 2 * (pp - 1 - rank) + 1)
            for rank in range(pp)
        )


@pytest.mark.parametrize(
    "costs", [EQUAL, Costs(2, 2, 1), Costs(3, 4, 2), Costs(2, 3, 2), Costs(1, 1, 0.25)]
)
def test_bubble_of_zb_h1_for_m_from_p_and_w_no_dearer_than_f_or_i(costs: Costs) -> None:
    for pp, microbatches in SIZES:
        if microbatches >= pp:
            simulation = simulated("zb-h1", pp, microbatches, costs)
            per_rank = costs.forward + costs.input_gradient - costs.weight_gradient
            assert bubble_times(simulation) == pytest.approx([(pp - 1) * per_rank] * pp, abs=1e-9)


@pytest.mark.parametrize(("pp", "microbatches"), SIZES)
def test_peak_in_flight_of_zb_h1(pp: int, microbatches: int) -> None:
    simulation = simulated("zb-h1", pp, microbatches, EQUAL)
    assert simulation.peak_in_flight == (min(microbatches, pp),) * pp


def test_zb_v_has_no_idle_time_between_the_first_and_last_action_of_a_rank() -> None:
    """Rank r starts at slot r and works 6m slots: 6m + p - 1 in all, the least there can be.

    The middle stage's rank cannot start before its p - 1 predecessors have run.
    """
    for pp in (1, 2, 3, 4, 8):
        for microbatches in range(2 * pp - 1, 4 * pp + 2):
            simulation = simulated("zb-v", pp, microbatches, Costs(2, 2, 2))  # 1 for each stage
            assert simulation.makespan == 6 * microbatches + pp - 1
            for rank, spans in enumerate(simulation.spans):
                assert spans[0][1] == rank
                assert spans[-1][2] == rank + 6 * microbatches


@pytest.mark.parametrize(("pp", "microbatches"), SIZES)
def test_peak_in_flight_of_zb_v(pp: int, microbatches: int) -> None:
    simulation = simulated("zb-v", pp, microbatches, EQUAL)
    assert max(simulation.peak_in_flight) <= 2 * min(pp, microbatches)


def test_zero_bubble_schedules_beat_1f1b_at_equal_costs() -> None:
    bubbles = [simulated(name, 4, 8, EQUAL).bubble for name in ("1f1b", "zb-h1", "zb-v")]
    assert bubbles == pytest.approx([3 / 11, 3 / 27, 3 / 51])


# The parts of the model


def test_spans_say_when_each_action_runs() -> None:
    simulation = simulate(parse_grid("0F0 0B0\n1F0 1B0"), (0, 1), Costs(1, 2, 3))
    assert simulation.spans == (
        ((Action(0, Kind.F, 0), 0, 1), (Action(0, Kind.B, 0), 7, 12)),
        ((Action(1, Kind.F, 0), 1, 2), (Action(1, Kind.B, 0), 2, 7)),
    )
    assert simulation.makespan == 12
    assert simulation.bubble == pytest.approx(0.5)


def test_a_link_delays_what_comes_from_another_rank() -> None:
    grid = parse_grid("0F0 0B0\n1F0 1B0")
    assert simulate(grid, (0, 1), EQUAL, link=0.5).makespan == 7
    assert simulate(parse_grid("0F0 1F0 1B0 0B0"), (0, 0), EQUAL, link=0.5).makespan == 3


def test_a_rank_spends_its_time_in_equal_parts_on_its_stages() -> None:
    simulation = simulate(parse_grid("0F0 1F0 1B0 0B0"), (0, 0), Costs(1, 1, 1))
    assert [(start, end) for _, start, end in simulation.spans[0]] == [
        (0, 0.5),
        (0.5, 1),
        (1, 2),
        (2, 3),
    ]


def test_a_lowered_grid_takes_the_time_of_what_is_left_to_compute() -> None:
    grid = compute_actions("1f1b", 2, 4, 1)
    assert simulate(grid, (0, 1), EQUAL).makespan == 15
    # 0B is 0W, and rank 0 waits for the 1I of 1B only.
    assert simulate(lower(grid, (0, 1)), (0, 1), EQUAL).makespan == 13
    frozen = lower(grid, (0, 1), (False, True))
    assert simulate(frozen, (0, 1), EQUAL).makespan == 9  # 1B is 1W
    assert simulate(frozen, (0, 1), EQUAL).peak_in_flight == (0, 1)


def test_a_stage_that_computes_i_only_holds_nothing_after_it() -> None:
    grid = lower(compute_actions("zb-h1", 3, 6, 1), (0, 1, 2), (True, False, False))
    assert simulate(grid, (0, 1, 2), EQUAL).peak_in_flight == (3, 2, 1)


def test_a_grid_that_waits_for_ever_is_refused() -> None:
    with pytest.raises(ValueError, match="the schedule stops: rank 0 waits for ever in 0B0"):
        simulate(parse_grid("0B0 0F0\n1F0 1B0"), (0, 1), EQUAL)


@pytest.mark.parametrize("costs", [(-1, 1, 1), (float("nan"), 1, 1), (0, 0, 0)])
def test_costs_must_be_times(costs: tuple[float, float, float]) -> None:
    with pytest.raises(UserError, match=r"costs .*: give F,I,W from 0 up, not all of them 0"):
        Costs(*costs)


@pytest.mark.parametrize("link", [-1.0, float("inf")])
def test_a_link_must_be_a_time(link: float) -> None:
    with pytest.raises(ValueError, match="a link takes a time from 0 up"):
        simulate(parse_grid("0F0"), (0,), EQUAL, link)


# The drawing


def test_timeline_has_a_row_a_rank_dots_for_idle_and_dashes_for_length() -> None:
    assert timeline(simulated("1f1b", 3, 3, EQUAL)) == "\n".join(
        [
            "r0 0F0 0F1 0F2 .   .   .   .   0B0---- .   0B1---- .   0B2----",
            "r1 .   1F0 1F1 .   .   1B0---- 1F2 1B1---- .   1B2---- .   .",
            "r2 .   .   2F0 2B0---- 2F1 2B1---- 2F2 2B2---- .   .   .   .",
        ]
    )
