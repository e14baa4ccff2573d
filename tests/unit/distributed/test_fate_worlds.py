"""Thousands of jobs in virtual time, each with a fault: one line, which names the rank at fault."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.helpers.simulation import CABLE, WIRELESS, World

LIMIT = 12.0  # seconds until a silent rank is lost
HARMLESS = 0.7 * LIMIT  # seconds of a sleep or a cut which nobody may take for more
LAYOUTS = ([1, 1], [1, 1, 1], [2, 1], [2, 2], [1, 2, 1], [1, 1, 1, 1], [3], [2, 2, 2], [1] * 8)


@dataclass
class Plan:
    """What is to happen in a world from ``time`` on, and what is to be said of it."""

    world: World
    draw: random.Random
    time: float
    last: float = 0.0
    """Seconds until the last thing happens."""

    def at(self, seconds: float, call: Callable[..., None], *arguments: object) -> None:
        self.last = max(self.last, seconds)
        self.world.events.at(self.time + seconds, call, *arguments)

    def rank(self, lowest: int = 0) -> int:
        return self.draw.randrange(lowest, len(self.world.ranks))

    def host(self, lowest: int = 0) -> int:
        return self.draw.randrange(lowest, len(self.world.hosts))

    def ranks_of(self, host: int) -> list[int]:
        place = self.world.hosts[host]
        return [rank.number for rank in self.world.ranks if rank.host is place]

    def keep_busy(self) -> None:
        for rank in self.world.ranks:
            rank.busy_until = self.time + 3 * LIMIT


Culprits = list[int]
"""Ranks one of which the line has to name; none if there may be no line."""


def nothing(plan: Plan) -> Culprits:
    plan.at(20.0, lambda: None)
    return []


def a_host_sleeps(plan: Plan) -> Culprits:
    plan.at(0.0, plan.world.hosts[plan.host()].sleep, plan.draw.uniform(1, HARMLESS))
    plan.at(LIMIT, lambda: None)
    return []


def two_hosts_sleep(plan: Plan) -> Culprits:
    """One after the other: a host's two sleeps on end would be one long one."""
    for start in (0.0, HARMLESS + 3.0):
        plan.at(start, plan.world.hosts[plan.host()].sleep, plan.draw.uniform(1, HARMLESS))
    plan.at(2 * LIMIT, lambda: None)
    return []


def a_link_is_cut_for_a_while(plan: Plan) -> Culprits:
    one, other = plan.world.hosts[0], plan.world.hosts[plan.host()]
    plan.at(0.0, plan.world.network.cut, one, other, plan.draw.uniform(1, HARMLESS))
    plan.at(LIMIT, lambda: None)
    return []


def a_rank_is_stopped_and_continued(plan: Plan) -> Culprits:
    rank = plan.world.ranks[plan.rank()]
    plan.at(0.0, rank.send_signal, signal.SIGSTOP)
    plan.at(plan.draw.uniform(0.2, HARMLESS), rank.send_signal, signal.SIGCONT)
    plan.at(LIMIT, lambda: None)
    return []


def all_are_stopped_and_continued(plan: Plan) -> Culprits:
    """Ctrl-Z and fg."""
    for number, seconds in ((signal.SIGSTOP, 0.0), (signal.SIGCONT, 7.0)):
        for rank in plan.world.ranks:
            plan.at(seconds, rank.send_signal, number)
    plan.at(LIMIT, lambda: None)
    return []


def a_rank_dies(plan: Plan) -> Culprits:
    rank = plan.rank()
    plan.at(0.0, plan.world.kill, rank)
    return [rank]


def a_rank_dies_and_a_message_of_it_fails(plan: Plan) -> Culprits:
    rank = plan.rank()
    plan.at(0.0, plan.world.kill, rank)
    for peer in {(rank - 1) % len(plan.world.ranks), (rank + 1) % len(plan.world.ranks)} - {rank}:
        plan.at(plan.draw.uniform(0, 0.4), plan.world.break_link, peer, rank)
    return [rank]


def a_rank_dies_while_all_compute(plan: Plan) -> Culprits:
    plan.keep_busy()
    return a_rank_dies(plan)


def a_rank_dies_whose_last_signs_of_life_are_late(plan: Plan) -> Culprits:
    (rank,) = a_rank_dies(plan)
    plan.world.network.late[rank] = plan.draw.uniform(0.1, 0.6)
    return [rank]


def two_ranks_die(plan: Plan) -> Culprits:
    first, second = plan.rank(), plan.rank()
    plan.at(0.0, plan.world.kill, first)
    plan.at(plan.draw.uniform(0, 0.02), plan.world.kill, second)
    return [first, second]


def a_rank_dies_after_a_host_fell_asleep(plan: Plan) -> Culprits:
    asleep = plan.host(1) if len(plan.world.hosts) > 1 else 0
    plan.at(0.0, plan.world.hosts[asleep].sleep, plan.draw.uniform(1, HARMLESS))
    rank = plan.rank()
    plan.at(plan.draw.uniform(0, HARMLESS), plan.world.kill, rank)
    return [rank]


def a_rank_dies_while_the_host_of_mpirun_sleeps(plan: Plan) -> Culprits:
    plan.at(0.0, plan.world.hosts[0].sleep, HARMLESS)
    rank = plan.rank()
    plan.at(plan.draw.uniform(0, HARMLESS), plan.world.kill, rank)
    return [rank]


def a_rank_dies_while_another_is_stopped(plan: Plan) -> Culprits:
    rank, stopped = plan.draw.sample(range(len(plan.world.ranks)), 2)
    plan.at(0.0, plan.world.ranks[stopped].send_signal, signal.SIGSTOP)
    plan.at(plan.draw.uniform(0, HARMLESS), plan.world.kill, rank)
    return [rank]


def a_rank_is_stopped(plan: Plan) -> Culprits:
    rank = plan.rank()
    plan.at(0.0, plan.world.ranks[rank].send_signal, signal.SIGSTOP)
    return [rank]


def a_host_is_lost(plan: Plan) -> Culprits:
    host = plan.host()
    plan.at(0.0, plan.world.lose, host)
    return plan.ranks_of(host)


def a_host_is_lost_while_all_compute(plan: Plan) -> Culprits:
    plan.keep_busy()
    return a_host_is_lost(plan)


def fails(plan: Plan, rank: int, seconds: float) -> None:
    plan.at(seconds, plan.world.ranks[rank].fail, f"{plan.world.names[rank]}: no memory")


def a_rank_fails(plan: Plan) -> Culprits:
    rank = plan.rank()
    fails(plan, rank, 0.0)
    return [rank]


def two_ranks_fail(plan: Plan) -> Culprits:
    ranks = plan.draw.sample(range(len(plan.world.ranks)), 2)
    for rank in ranks:
        fails(plan, rank, plan.draw.uniform(0, 0.5))
    return ranks


@dataclass(frozen=True)
class Fault:
    """What may happen to a job of at least so many ranks and hosts, if need be if mpirun reacts."""

    happens: Callable[[Plan], Culprits]
    ranks: int = 2
    hosts: int = 1
    needs_mpirun: bool = False

    @property
    def name(self) -> str:
        return self.happens.__name__


FAULTS = (
    Fault(nothing),
    Fault(a_host_sleeps),
    Fault(two_hosts_sleep),
    Fault(a_link_is_cut_for_a_while),
    Fault(a_rank_is_stopped_and_continued),
    Fault(all_are_stopped_and_continued),
    Fault(a_rank_dies),
    Fault(a_rank_dies_and_a_message_of_it_fails),
    Fault(a_rank_dies_while_all_compute),
    Fault(a_rank_dies_whose_last_signs_of_life_are_late),
    Fault(two_ranks_die, ranks=3),
    Fault(a_rank_dies_after_a_host_fell_asleep, hosts=2),
    Fault(a_rank_dies_while_the_host_of_mpirun_sleeps),
    Fault(a_rank_dies_while_another_is_stopped, needs_mpirun=True),
    Fault(a_rank_is_stopped),
    Fault(a_host_is_lost, hosts=2),
    Fault(a_host_is_lost_while_all_compute, hosts=2),
    Fault(a_rank_fails),
    Fault(two_ranks_fail),
)


def worlds(fault: Fault, count: int) -> Iterator[tuple[Plan, Culprits]]:
    """Yield worlds in which a fault has happened and everything has come to rest."""
    layouts = [
        sizes for sizes in LAYOUTS if sum(sizes) >= fault.ranks and len(sizes) >= fault.hosts
    ]
    for seed in range(count):
        draw = random.Random(f"{fault.name} {seed}")
        world = World(
            seed,
            draw.choice(layouts),
            draw.choice([CABLE, WIRELESS]),
            limit=LIMIT,
            reacts=draw.random() < 0.8 or fault.needs_mpirun,
            is_elsewhere=draw.random() < 0.2,
        )
        plan = Plan(world, draw, draw.uniform(1, 4))
        culprits = fault.happens(plan)
        rest = 4 * LIMIT if culprits else LIMIT + 2
        world.events.run(plan.time + plan.last + rest, world.runs)
        yield plan, culprits


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_job_ends_with_one_line_that_names_who_is_at_fault_and_never_without_fault(
    fault: Fault,
) -> None:
    for seed, (plan, culprits) in enumerate(worlds(fault, 110)):
        world = plan.world
        seen = (seed, world.said)
        stopped = [rank.number for rank in world.ranks if rank.is_stopped]
        if not culprits:
            assert world.said == [], seen
            assert world.living() == [rank.number for rank in world.ranks], seen
            continue
        assert set(world.living()) <= set(stopped), seen
        assert len(world.said) == 1, seen
        (_, _, text) = world.said[0]
        assert any(world.names[rank] in text for rank in culprits), seen


def interrupted_mpirun(plan: Plan) -> None:
    plan.at(0.0, plan.world.mpirun.end)


def signals_to_all(plan: Plan) -> None:
    for rank in plan.world.ranks:
        plan.at(plan.draw.uniform(0, 0.02), rank.send_signal, signal.SIGTERM)


def signals_to_one(plan: Plan) -> None:
    plan.at(0.0, plan.world.ranks[plan.rank()].send_signal, signal.SIGTERM)


def signals_to_one_by_systemd(plan: Plan) -> None:
    rank = plan.world.ranks[plan.rank()]
    plan.at(0.0, rank.send_signal, signal.SIGTERM)
    plan.at(0.0, rank.send_signal, signal.SIGCONT)


@pytest.mark.parametrize(
    "cause",
    [interrupted_mpirun, signals_to_all, signals_to_one, signals_to_one_by_systemd],
    ids=lambda cause: cause.__name__,
)
def test_where_nobody_died_a_sigterm_is_an_interruption(cause: Callable[[Plan], None]) -> None:
    def happens(plan: Plan) -> Culprits:
        cause(plan)
        return []

    for seed, (plan, _) in enumerate(worlds(Fault(happens), 100)):
        seen = (seed, plan.world.said)
        assert [text for _, _, text in plan.world.said] == ["interrupted by SIGTERM"], seen
        assert plan.world.living() == [], seen
