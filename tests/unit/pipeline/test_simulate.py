"""The simulator, held against the closed forms of the literature."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmlx.errors import UserError
from shardmlx.pipeline.actions import Action, Kind
from shardmlx.pipeline.figure import timeline
from shardmlx.pipeline.lowering import lower
from shardmlx.pipeline.schedules import SCHEDULES, compute_actions
from shardmlx.pipeline.simulate import Costs, Seconds, Simulation, simulate, simulate_schedule
from tests.helpers.grids import parse_grid

EQUAL = Costs(1, 1, 1)
SIZES = [*product((1, 2, 3, 4, 8), (1, 2, 3, 4, 7, 8, 16))]


def simulated(
    name: str, pp: int, microbatches: int, costs: Costs, virtual: int | None = None
) -> Simulation:
    return simulate_schedule(name, pp, microbatches, virtual=virtual, costs=costs)


def bubble_times(simulation: Simulation) -> list[float]:
    return [fraction * simulation.makespan for fraction in simulation.bubbles]


# Closed forms


@pytest.mark.parametrize(("pp", "microbatches"), SIZES)
def test_bubble_and_peak_of_gpipe_and_1f1b(pp: int, microbatches: int) -> None:
    for name, costs in product(("gpipe", "1f1b"), (EQUAL, Costs(2, 1, 3), Costs(0.5, 4, 0))):
        simulation = simulated(name, pp, microbatches, costs)
        assert simulation.bubble == pytest.approx((pp - 1) / (microbatches + pp - 1))
        assert simulation.bubbles == pytest.approx([simulation.bubble] * pp)
    gpipe = simulated("gpipe", pp, microbatches, EQUAL)
    assert gpipe.peak_in_flight == (microbatches,) * pp
    one_f_one_b = simulated("1f1b", pp, microbatches, EQUAL)
    assert one_f_one_b.peak_in_flight == tuple(min(microbatches, pp - s) for s in range(pp))


@pytest.mark.parametrize("virtual", [2, 3, 4])
@pytest.mark.parametrize("costs", [EQUAL, Costs(3, 1, 1)])
def test_interleaving_divides_the_bubble_by_the_stages_a_rank(costs: Costs, virtual: int) -> None:
    for pp in (1, 2, 3, 4, 8):
        for microbatches in {*range(pp, 3 * pp), 5 * pp}:
            simulation = simulated("interleaved-1f1b", pp, microbatches, costs, virtual)
            expected = (pp - 1) * (costs.forward + costs.of(Kind.B)) / virtual
            assert bubble_times(simulation) == pytest.approx([expected] * pp, abs=1e-9)


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


def test_peak_in_flight_of_zero_bubble_schedules() -> None:
    for pp, microbatches in SIZES:
        h1 = simulated("zb-h1", pp, microbatches, EQUAL)
        assert h1.peak_in_flight == (min(microbatches, pp),) * pp
        v = simulated("zb-v", pp, microbatches, EQUAL)
        assert max(v.peak_in_flight) <= 2 * min(pp, microbatches)


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


# The parts of the model


def test_spans_say_when_each_action_runs() -> None:
    simulation = simulate(parse_grid("0F0 0B0\n1F0 1B0"), (0, 1), Costs(1, 2, 3))
    assert simulation.spans == (
        ((Action(0, Kind.F, 0), 0, 1), (Action(0, Kind.B, 0), 7, 12)),
        ((Action(1, Kind.F, 0), 1, 2), (Action(1, Kind.B, 0), 2, 7)),
    )
    assert simulation.makespan == 12
    assert simulation.bubble == pytest.approx(0.5)


def test_spans_are_written_with_actions_as_text() -> None:
    simulation = simulate(parse_grid("0F0\n1F0"), (0, 1), EQUAL)
    assert simulation.written_spans == ((("0F0", 0, 1),), (("1F0", 1, 2),))


def test_nothing_takes_no_time_and_has_no_bubble() -> None:
    for grid in (((),), parse_grid("0F0")):
        simulation = simulate(grid, (0,), Costs(0, 1, 1))
        assert (simulation.makespan, simulation.bubbles, simulation.bubble) == (0, (0,), 0)
        assert timeline(simulation) == "r0"


def test_a_schedule_has_equal_costs_and_free_links_unless_told() -> None:
    assert simulate_schedule("zb-v", 3, 6) == simulated("zb-v", 3, 6, EQUAL, virtual=2)


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


def test_a_stage_holds_a_micro_batch_until_its_own_backward_has_ended() -> None:
    grid = parse_grid("0F0 0B0 0F1 0F2 0B1 0B2")
    assert simulate(grid, (0,), EQUAL).peak_in_flight == (2,)


def test_a_grid_that_waits_for_ever_is_refused() -> None:
    with pytest.raises(ValueError, match="the schedule stops: rank 0 waits for ever in 0B0"):
        simulate(parse_grid("0B0 0F0\n1F0 1B0"), (0, 1), EQUAL)


@pytest.mark.parametrize("costs", [(-1, 1, 1), (float("nan"), 1, 1), (0, 0, 0)])
def test_costs_must_be_times(costs: tuple[float, float, float]) -> None:
    with pytest.raises(UserError):
        Costs(*costs)


@pytest.mark.parametrize("link", [-1.0, float("inf"), [[0.0, 1.0], [-1.0, 0.0]]])
def test_a_link_must_be_a_time(link: Seconds) -> None:
    with pytest.raises(ValueError, match="a link takes a time from 0 up, not"):
        simulate(parse_grid("0F0 0B0\n1F0 1B0"), (0, 1), EQUAL, link)


def test_times_of_links_are_a_square_of_the_ranks() -> None:
    for times in ([[0.0, 1.0]], [[0.0, 1.0], [1.0]], [[0.0, 1.0]] * 3):
        with pytest.raises(ValueError, match="times of links between 2 ranks as 2 x 2"):
            simulate(parse_grid("0F0 0B0\n1F0 1B0"), (0, 1), EQUAL, times)


# Stages of unequal cost


def test_each_stage_has_its_own_costs() -> None:
    lowered = lower(parse_grid("0F0 0B0\n1F0 1B0"), (0, 1))
    simulation = simulate(lowered, (0, 1), [Costs(1, 2, 3), Costs(4, 5, 6)])
    assert simulation.spans == (
        ((Action(0, Kind.F, 0), 0, 1), (Action(0, Kind.W, 0), 10, 13)),
        (
            (Action(1, Kind.F, 0), 1, 5),
            (Action(1, Kind.I, 0), 5, 10),
            (Action(1, Kind.W, 0), 10, 16),
        ),
    )
    assert simulation.busy == (4, 15)


def test_every_stage_needs_its_costs() -> None:
    with pytest.raises(ValueError, match="costs of 1 stages, the placement has 2"):
        simulate(parse_grid("0F0 0B0\n1F0 1B0"), (0, 1), [EQUAL])


# Links


def starts(simulation: Simulation, rank: int) -> list[float]:
    return [start for _, start, _ in simulation.spans[rank]]


TO_RANK_1 = parse_grid("0F0 0F1 0F2\n1F0 1F1 1F2")


def test_a_message_starts_when_the_one_before_has_left() -> None:
    simulation = simulate(TO_RANK_1, (0, 1), EQUAL, link=3)
    assert starts(simulation, 0) == [0, 1, 2]  # sending keeps nobody busy
    assert starts(simulation, 1) == [1 + 3, 4 + 3, 7 + 3]


def test_latency_delays_messages_but_occupies_no_link() -> None:
    assert starts(simulate(TO_RANK_1, (0, 1), EQUAL, latency=3), 1) == [4, 5, 6]
    assert starts(simulate(TO_RANK_1, (0, 1), EQUAL, link=2, latency=3), 1) == [6, 8, 10]


def test_each_pair_of_ranks_has_a_link_each_way() -> None:
    grid = parse_grid("0F0 0B0\n1F0 1B0\n2F0 2B0")
    link = [
        [0, 1, 99],
        [10, 0, 2],
        [99, 20, 0],
    ]
    simulation = simulate(grid, (0, 1, 2), Costs(1, 1, 0), link)
    assert starts(simulation, 2) == [1 + 1 + 1 + 2, 6]
    assert starts(simulation, 1)[1] == 7 + 20
    assert starts(simulation, 0)[1] == 28 + 10


def test_stages_of_the_same_two_ranks_share_a_link() -> None:
    grid = parse_grid("0F0 0F1 2F0\n1F0 3F0 1F1")  # 0F1, made before 2F0, goes before it
    simulation = simulate(grid, (0, 1, 0, 1), [Costs(1, 0, 0)] * 4, link=[[0, 5], [0, 0]])
    assert starts(simulation, 1) == [1 + 5, 11 + 5, 17]


def test_exposed_is_the_wait_for_what_was_made_and_the_bubble_the_wait_for_it_to_be_made() -> None:
    simulation = simulate(parse_grid("0F0 0B0\n1F0 1B0"), (0, 1), EQUAL, link=0.5)
    assert simulation.makespan == 7
    assert simulation.busy == (3, 3)
    assert simulation.exposed == (0.5, 0.5)
    assert bubble_times(simulation) == pytest.approx([3.5, 3.5])  # from 1 to 4.5; to 1, from 4.5
    assert simulation.bubble == pytest.approx(0.5)


def test_a_message_that_arrives_while_its_rank_computes_is_not_exposed() -> None:
    grid = parse_grid("0F0 0F1\n1F0 1F1")
    simulation = simulate(grid, (0, 1), [Costs(1, 0, 0), Costs(2, 0, 0)], link=0.5)
    assert simulation.exposed == (0, 0.5)  # of 1F0 only


@settings(deadline=None)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    pp=st.integers(1, 5),
    microbatches=st.integers(1, 10),
    link=st.floats(0, 3),
    latency=st.floats(0, 3),
)
def test_the_parts_of_a_rank_add_up_to_the_makespan(
    name: str, pp: int, microbatches: int, link: float, latency: float
) -> None:
    simulation = simulate_schedule(name, pp, microbatches, link=link, latency=latency)
    assert simulation.makespan >= simulated(name, pp, microbatches, EQUAL).makespan - 1e-9
    for busy, exposed, bubble in zip(
        simulation.busy, simulation.exposed, bubble_times(simulation), strict=True
    ):
        assert busy + exposed + bubble == pytest.approx(simulation.makespan)


# The drawing


def test_timeline_has_a_row_a_rank_dots_for_idle_and_dashes_for_length() -> None:
    assert timeline(simulated("1f1b", 3, 3, EQUAL)) == "\n".join(
        [
            "r0 0F0 0F1 0F2 .   .   .   .   0B0---- .   0B1---- .   0B2----",
            "r1 .   1F0 1F1 .   .   1B0---- 1F2 1B1---- .   1B2---- .   .",
            "r2 .   .   2F0 2B0---- 2F1 2B1---- 2F2 2B2---- .   .   .   .",
        ]
    )


def test_a_dot_stands_beside_no_label() -> None:
    """Rank 1 idles for 7 letters, and then for 11, with a dot for each 5."""
    grid = parse_grid("0F0 0B0\n1F0 1B0")
    drawn = [timeline(simulate(grid, (0, 1), EQUAL, link)).splitlines()[1] for link in (0.3, 1.25)]
    assert drawn == [
        "r1 .    . 1F0 1B0------- .    .",
        "r1 .    .     1F0  1B0------ .    .    .",
    ]


def test_timeline_of_seconds_is_that_of_equal_units() -> None:
    seconds = simulated("zb-h1", 2, 3, Costs(0.0137, 0.0137, 0.0137))
    assert timeline(seconds) == timeline(simulated("zb-h1", 2, 3, EQUAL))


def test_an_action_too_short_for_its_label_shows_its_kind() -> None:
    simulation = simulate(parse_grid("0F0 0B0"), (0,), Costs(0.1, 1, 1))
    assert timeline(simulation) == "r0 F 0B0------------------------------------"
    as_wide_as_its_label = simulate(parse_grid("0F0 0B0"), (0,), Costs(0.6, 4, 4))
    assert timeline(as_wide_as_its_label) == f"r0 F  0B0{36 * '-'}"
    a_half_longer = simulate(parse_grid("0F0 0B0"), (0,), Costs(1, 0.75, 0.75))
    assert timeline(a_half_longer) == "r0 0F0 0B0"


def test_an_action_that_takes_no_time_makes_no_column() -> None:
    assert timeline(simulated("zb-h1", 1, 1, Costs(1, 1, 0))) == "r0 0F0 0I0"


def test_a_timeline_too_wide_for_labels_shows_the_kind_at_each_moment() -> None:
    assert timeline(simulated("1f1b", 2, 3, Costs(0.1, 0.2, 0.1)), width=40) == "\n".join(
        [
            "r0 FFFFF.......BBBBBBFFFBBBBBBB..BBBBBBB",
            "r1 ..FFFBBBBBBBFFBBBBBBBFFBBBBBBB.......",
        ]
    )
    assert timeline(simulated("1f1b", 2, 3, EQUAL), 0) == "r0 F\nr1 B"
    for width in (20, 80, 160):
        lines = timeline(simulated("zb-v", 12, 64, EQUAL), width).splitlines()
        assert len(lines) == 12
        assert max(map(len, lines)) <= width


def test_a_timeline_has_labels_as_long_as_it_fits_and_by_default_in_160_letters() -> None:
    simulation = simulated("1f1b", 3, 3, EQUAL)
    drawn = [timeline(simulation, width) for width in (1000, 63, 62)]
    assert drawn[0] == drawn[1] != drawn[2]
    longer = simulated("1f1b", 1, 10, Costs(1, 1.08, 1.08))  # 158 letters after the name
    assert timeline(longer, 161) == timeline(longer, 1000)
    assert timeline(longer) == timeline(longer, 160) != timeline(longer, 161)
