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
    ("name", "trainable", "costs", "link", "microbatches"),
    [
        pytest.param(
            "zb-v",
            [True] * 4,
            [Costs(1, 1, 1), Costs(4, 4, 0), Costs(4, 4, 4), Costs(1, 1, 0)],
            10.03,
            310,
            id="both ways of a V",
        ),
        pytest.param(
            "zb-v",
            [False, False, True, True],
            [Costs(1, 1, 0), Costs(1.2, 4, 4), Costs(8, 8, 8), Costs(1, 1, 1)],
            8.643,
            399,
            id="forwards, and gradients of weights alone",
        ),
        pytest.param(
            "interleaved-1f1b",
            [True] * 4,
            [Costs(1, 1, 1), Costs(16, 16, 0), Costs(2, 2, 0), Costs(4, 4, 0)],
            13.4,
            213,
            id="rounds",
        ),
    ],
)
def test_a_link_that_is_a_little_slower_than_all_ranks_is_what_they_wait_for_in_the_end(
    name: str, trainable: list[bool], costs: list[Costs], link: float, microbatches: int
) -> None:
    """The link from rank 0 to rank 1 carries two messages for each micro-batch, or three for two of
    them. Rank 1 has work ahead for a hundred micro-batches, and does not wait until then."""
    step = Step(name, 2, Random(0), 0.0)
    step.trainable, step.costs, step.link[0][1] = trainable, costs, link
    whole = step.simulated(microbatches)
    assert step.makespan(microbatches) == pytest.approx(whole.makespan, rel=1e-9)
    shorter = step.simulated(microbatches // 3)
    slowest = max(whole.busy) / microbatches
    assert shorter.makespan < (microbatches // 3 + 20) * slowest


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
