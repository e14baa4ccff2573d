"""The time of a long step, told from short ones, is that of the whole step simulated."""

from itertools import product
from random import Random

import pytest

from shardmlx.pipeline.lowering import lower
from shardmlx.pipeline.schedules import SCHEDULES
from shardmlx.pipeline.simulate import Costs, Simulation, simulate
from shardmlx.pipeline.steady_state import makespan

NAMES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")


class Step:
    """A schedule on machines and links of random speeds, of which the lowest stages may be frozen;
    it knows how many micro-batches were simulated."""

    def __init__(self, name: str, pp: int, random: Random, slowest_link: float) -> None:
        self.schedule, self.pp = SCHEDULES[name], pp
        self.placement = self.schedule.placement(pp, self.schedule.default_virtual)
        stages = len(self.placement)
        frozen = random.choice([0, 0, random.randrange(stages)])
        self.trainable = [stage >= frozen for stage in range(stages)]
        sizes = [random.choice([1, 1, 1.001, random.uniform(0.5, 2)]) for _ in range(stages)]
        self.costs = [Costs(size, size, random.choice([0, size])) for size in sizes]
        links = [0.0, 0.1 * slowest_link, slowest_link]
        self.link, self.latency = (
            [[random.choice(links) if a != b else 0.0 for b in range(pp)] for a in range(pp)]
            for _ in range(2)
        )
        self.counts: list[int] = []

    def simulated(self, microbatches: int) -> Simulation:
        self.counts.append(microbatches)
        order = self.schedule.order(self.pp, microbatches, self.schedule.default_virtual)
        grid = lower(order, self.placement, self.trainable)
        return simulate(grid, self.placement, self.costs, self.link, self.latency)

    def makespan(self, microbatches: int) -> float:
        return makespan(
            microbatches,
            self.schedule.fewest_alike(self.pp, microbatches),
            self.schedule.period(self.pp),
            self.placement,
            self.link,
            self.simulated,
        )


@pytest.mark.parametrize(("name", "pp"), [*product(NAMES, (1, 2, 3, 5))])
def test_a_long_step_takes_as_long_as_if_all_of_it_were_simulated(name: str, pp: int) -> None:
    """Links of up to four times a stage's time queue up messages, and ranks wait in rounds."""
    random = Random(f"{name} {pp}")
    for slowest_link in (0.0, 0.1, 4.0) * 3:
        step, microbatches = Step(name, pp, random, slowest_link), random.randint(90, 250)
        assert step.makespan(microbatches) == pytest.approx(
            step.simulated(microbatches).makespan, rel=1e-9
        )


@pytest.mark.parametrize(
    ("name", "trainable", "costs", "link", "microbatches", "counts"),
    [
        pytest.param(
            "zb-v",
            [True] * 4,
            [Costs(1, 1, 1), Costs(4, 4, 0), Costs(4, 4, 4), Costs(1, 1, 0)],
            10.03,
            310,
            [16, 24, 40, 72, 136, 137],
            id="both ways of a V",
        ),
        pytest.param(
            "zb-v",
            [False, False, True, True],
            [Costs(1, 1, 0), Costs(1.2, 4, 4), Costs(8, 8, 8), Costs(1, 1, 1)],
            8.643,
            399,
            [16, 24, 40, 72, 136, 137],
            id="gradients of weights alone",
        ),
        pytest.param(
            "interleaved-1f1b",
            [True] * 4,
            [Costs(1, 1, 1), Costs(16, 16, 0), Costs(2, 2, 0), Costs(4, 4, 0)],
            13.4,
            213,
            [17, 25, 41, 43],
            id="rounds",
        ),
    ],
)
def test_a_link_that_is_a_little_slower_than_all_ranks_is_what_they_wait_for_in_the_end(
    name: str,
    trainable: list[bool],
    costs: list[Costs],
    link: float,
    microbatches: int,
    counts: list[int],
) -> None:
    """From rank 0 to rank 1 go two messages for each micro-batch, or three. At first rank 1 has
    work ahead, and each micro-batch takes as long as its own actions."""
    step = Step(name, 2, Random(0), 0.0)
    step.trainable, step.costs, step.link[0][1] = trainable, costs, link
    found = step.makespan(microbatches)
    assert step.counts == counts
    assert found == pytest.approx(step.simulated(microbatches).makespan, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "microbatches", "counts"),
    [
        ("1f1b", 18, [18]),
        ("1f1b", 19, [16, 17]),
        ("interleaved-1f1b", 21, [21]),
        ("interleaved-1f1b", 22, [16, 18]),
    ],
)
def test_a_step_that_is_hardly_longer_than_a_short_one_is_simulated_whole(
    name: str, microbatches: int, counts: list[int]
) -> None:
    """A link counts as slow if messages go over it: here no gradient comes down."""
    step = Step(name, 2, Random(0), 0.0)
    step.trainable = [False] * (len(step.placement) - 1) + [True]
    step.costs = [Costs()] * len(step.placement)
    step.link[1][0] = {"1f1b": 100.0, "interleaved-1f1b": 0.25}[name]
    step.makespan(microbatches)
    assert step.counts == counts


@pytest.mark.parametrize("name", NAMES)
def test_it_costs_no_more_for_a_thousand_times_as_many_micro_batches(name: str) -> None:
    random = Random(name)
    for pp, frozen in product((2, 4), (0, 2)):
        counts = []
        for microbatches in (1024, 1024 * 1024):
            step = Step(name, pp, random, 0.0)
            stages = range(len(step.placement))
            step.trainable = [stage >= min(frozen, pp - 1) for stage in stages]
            step.costs = [Costs(1 + stage % 3) for stage in stages]
            step.makespan(microbatches)
            counts.append(step.counts)
        assert counts[0] == counts[1]
        assert max(counts[1]) < 16 * pp
