"""Faults of a job in virtual time, and what is to be said of each."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from shardmlx.distributed.times import MOST_SECONDS_TO_END
from tests.helpers.worlds.jobs import World
from tests.helpers.worlds.rooms import Room
from tests.helpers.worlds.simulation import CABLE, WIRELESS, Delays, Simulation

LIMITS = (12.0, 12.0, 12.0, 30.0)  # seconds until a silent rank is lost
HARMLESS = 0.7  # of the limit: a sleep or a cut which nobody may take for more
LAYOUTS = ([1, 1], [1, 1, 1], [2, 1], [2, 2], [1, 2, 1], [1, 1, 1, 1], [3], [2, 2, 2], [1] * 8)
CROWDED = Delays((0.005, 0.08), (0.08, 1.0))  # Wi-Fi that others use, too


@dataclass
class Plan:
    """What is to happen in a world from ``time`` on."""

    world: World
    time: float
    last: float = 0.0
    """Seconds from then until the last thing has happened."""

    def __post_init__(self) -> None:
        self.draw = self.world.random
        self.limit = self.world.limit

    def at(self, seconds: float, call: Callable[..., object], *arguments: object) -> None:
        """Let something happen in so many seconds."""
        self.last = max(self.last, seconds)
        self.world.simulation.at(self.time + seconds, call, *arguments)

    def rank(self, lowest: int = 0) -> int:
        """Draw a rank."""
        return self.draw.randrange(lowest, len(self.world.ranks))

    def host(self, lowest: int = 0) -> int:
        """Draw a host."""
        return self.draw.randrange(lowest, len(self.world.hosts))

    def ranks_of(self, host: int) -> list[int]:
        """Return the ranks of a host."""
        place = self.world.hosts[host]
        return [rank.number for rank in self.world.ranks if rank.host is place]

    def while_harmless(self) -> float:
        """Draw seconds for which a rank may be silent."""
        return self.draw.uniform(1, HARMLESS * self.limit)

    def sleep(self, host: int, begins: float = 0.0) -> float:
        """Let a host sleep; return the seconds from the beginning until it wakes."""
        wakes = begins + self.while_harmless()
        self.at(begins, self.world.hosts[host].sleep, wakes - begins)
        self.last = max(self.last, wakes)
        return wakes

    def keep_busy(self) -> None:
        """Let all main threads compute, and reach no wait."""
        for rank in self.world.ranks:
            rank.busy_until = self.time + 3 * self.limit


Culprits = list[int]
"""Ranks one of which the line has to name; none if there may be no line."""


def nothing(plan: Plan) -> Culprits:
    plan.at(20.0, lambda: None)
    return []


def a_host_sleeps(plan: Plan) -> Culprits:
    plan.sleep(plan.host())
    return []


def a_host_sleeps_for_too_long(plan: Plan) -> Culprits:
    host = plan.host()
    plan.last = plan.draw.uniform(2, 4) * plan.limit
    plan.at(0.0, plan.world.hosts[host].sleep, plan.last)
    return plan.ranks_of(host)


def two_hosts_sleep(plan: Plan) -> Culprits:
    """One after the other: a host's two sleeps on end would be one long one."""
    plan.sleep(plan.host(), plan.sleep(plan.host()) + 3.0)
    return []


def two_hosts_sleep_at_a_time(plan: Plan) -> Culprits:
    first, second = plan.draw.sample(range(len(plan.world.hosts)), 2)
    plan.sleep(second, plan.draw.uniform(0, plan.sleep(first)))
    return []


def a_link_is_cut_for_a_while(plan: Plan) -> Culprits:
    seconds = plan.while_harmless()
    one, other = plan.draw.sample(plan.world.hosts, 2)
    plan.at(0.0, plan.world.links.cut, one, other, seconds)
    plan.last = seconds
    return []


def a_rank_is_stopped_and_continued(plan: Plan) -> Culprits:
    rank = plan.world.ranks[plan.rank()]
    plan.at(0.0, rank.send_signal, signal.SIGSTOP)
    plan.at(plan.while_harmless(), rank.send_signal, signal.SIGCONT)
    return []


def all_are_stopped_and_continued(plan: Plan) -> Culprits:
    """Ctrl-Z and fg."""
    continued = plan.draw.choice([7.0, 2 * plan.limit])
    for number, seconds in ((signal.SIGSTOP, 0.0), (signal.SIGCONT, continued)):
        for rank in plan.world.ranks:
            plan.at(seconds, rank.send_signal, number)
    return []


def a_rank_dies_after_all_were_stopped(plan: Plan) -> Culprits:
    """After the alarm of the SIGCONT that continues them, in which all answer."""
    all_are_stopped_and_continued(plan)
    rank = plan.rank()
    plan.at(plan.last + plan.draw.uniform(5, 8), plan.world.kill, rank)
    return [rank]


def mpirun_is_interrupted_after_all_were_stopped(plan: Plan) -> None:
    all_are_stopped_and_continued(plan)
    plan.at(plan.last + plan.draw.uniform(1, 3), plan.world.mpirun.end)


def a_rank_dies(plan: Plan) -> Culprits:
    rank = plan.rank()
    plan.at(0.0, plan.world.kill, rank)
    return [rank]


def a_rank_dies_and_a_message_of_it_fails(plan: Plan) -> Culprits:
    (rank,) = a_rank_dies(plan)
    for peer in {(rank - 1) % len(plan.world.ranks), (rank + 1) % len(plan.world.ranks)} - {rank}:
        plan.at(plan.draw.uniform(0, 0.4), plan.world.break_link, peer, rank)
    return [rank]


def a_rank_dies_while_all_compute(plan: Plan) -> Culprits:
    plan.keep_busy()
    return a_rank_dies(plan)


def a_rank_dies_whose_last_signs_of_life_are_late(plan: Plan) -> Culprits:
    (rank,) = a_rank_dies(plan)
    plan.world.late[rank] = plan.draw.uniform(0.1, 0.6)
    return [rank]


def two_ranks_die(plan: Plan) -> Culprits:
    first, second = plan.rank(), plan.rank()
    plan.at(0.0, plan.world.kill, first)
    plan.at(plan.draw.uniform(0, 0.02), plan.world.kill, second)
    return [first, second]


def a_rank_dies_after_a_host_fell_asleep(plan: Plan) -> Culprits:
    plan.sleep(plan.host(1))
    rank = plan.rank()
    plan.at(plan.while_harmless(), plan.world.kill, rank)
    return [rank]


def a_rank_dies_while_the_host_of_mpirun_sleeps(plan: Plan) -> Culprits:
    wakes = plan.sleep(0)
    rank = plan.rank()
    plan.at(plan.draw.uniform(0, wakes), plan.world.kill, rank)
    return [rank]


def a_rank_dies_while_another_is_stopped(plan: Plan) -> Culprits:
    rank, stopped = plan.draw.sample(range(len(plan.world.ranks)), 2)
    plan.at(0.0, plan.world.ranks[stopped].send_signal, signal.SIGSTOP)
    plan.at(plan.while_harmless(), plan.world.kill, rank)
    return [rank]


def a_rank_dies_while_a_host_is_cut_off(plan: Plan) -> Culprits:
    seconds = plan.while_harmless()
    host = plan.draw.choice(plan.world.hosts)
    for other in (*plan.world.hosts, plan.world.mpirun.host):
        plan.at(0.0, plan.world.links.cut, host, other, seconds)
    rank = plan.rank()
    plan.at(plan.draw.uniform(0, seconds), plan.world.kill, rank)
    plan.last = seconds
    return [rank]


def a_rank_is_stopped(plan: Plan) -> Culprits:
    rank = plan.rank()
    plan.at(0.0, plan.world.ranks[rank].send_signal, signal.SIGSTOP)
    return [rank]


def a_rank_is_stopped_while_a_host_sleeps(plan: Plan) -> Culprits:
    wakes = plan.sleep(plan.host())
    rank = plan.rank()
    plan.at(plan.draw.uniform(0, wakes), plan.world.ranks[rank].send_signal, signal.SIGSTOP)
    return [rank]


def a_host_is_lost(plan: Plan) -> Culprits:
    host = plan.host()
    plan.at(0.0, plan.world.lose, host)
    return plan.ranks_of(host)


def a_host_is_lost_while_all_compute(plan: Plan) -> Culprits:
    plan.keep_busy()
    return a_host_is_lost(plan)


def a_host_is_lost_while_another_sleeps(plan: Plan) -> Culprits:
    lost, asleep = plan.draw.sample(range(len(plan.world.hosts)), 2)
    wakes = plan.sleep(asleep)
    plan.at(plan.draw.uniform(0, wakes), plan.world.lose, lost)
    return plan.ranks_of(lost)


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


def a_rank_fails_while_a_host_sleeps(plan: Plan) -> Culprits:
    wakes = plan.sleep(plan.host())
    rank = plan.rank()
    fails(plan, rank, plan.draw.uniform(0, wakes))
    return [rank]


def mpirun_is_interrupted(plan: Plan) -> None:
    plan.at(0.0, plan.world.mpirun.end)


def all_are_sent_sigterm(plan: Plan) -> None:
    for rank in plan.world.ranks:
        plan.at(plan.draw.uniform(0, 0.02), rank.send_signal, signal.SIGTERM)


def one_is_sent_sigterm(plan: Plan) -> None:
    plan.at(0.0, plan.world.ranks[plan.rank()].send_signal, signal.SIGTERM)


def systemd_stops_one(plan: Plan) -> None:
    rank = plan.world.ranks[plan.rank()]
    plan.at(0.0, rank.send_signal, signal.SIGTERM)
    plan.at(0.0, rank.send_signal, signal.SIGCONT)


INTERRUPTED = "interrupted by SIGTERM"


@dataclass(frozen=True)
class Fault:
    """What may happen to a job of at least so many ranks and hosts, if need be if mpirun reacts.
    No more than a ``limit`` decides where nobody is ended by mpirun, so links may be slower."""

    happens: Callable[[Plan], Culprits | None]
    ranks: int = 2
    hosts: int = 1
    needs_mpirun: bool = False
    is_slow: bool = False

    @property
    def name(self) -> str:
        """Its name in words."""
        return self.happens.__name__


FAULTS = (
    Fault(nothing, is_slow=True),
    Fault(a_host_sleeps, is_slow=True),
    Fault(two_hosts_sleep, is_slow=True),
    Fault(two_hosts_sleep_at_a_time, hosts=2, is_slow=True),
    Fault(a_link_is_cut_for_a_while, hosts=2, is_slow=True),
    Fault(a_rank_is_stopped_and_continued, is_slow=True),
    Fault(all_are_stopped_and_continued, is_slow=True),
    Fault(a_rank_dies),
    Fault(a_rank_dies_after_all_were_stopped),
    Fault(a_rank_dies_and_a_message_of_it_fails),
    Fault(a_rank_dies_while_all_compute),
    Fault(a_rank_dies_whose_last_signs_of_life_are_late),
    Fault(two_ranks_die, ranks=3),
    Fault(a_rank_dies_after_a_host_fell_asleep, hosts=2),
    Fault(a_rank_dies_while_the_host_of_mpirun_sleeps),
    Fault(a_rank_dies_while_another_is_stopped, needs_mpirun=True),
    Fault(a_rank_dies_while_a_host_is_cut_off, hosts=2),
    Fault(a_rank_is_stopped),
    Fault(a_host_sleeps_for_too_long, hosts=2),
    Fault(a_rank_is_stopped_while_a_host_sleeps, hosts=2),
    Fault(a_host_is_lost, hosts=2),
    Fault(a_host_is_lost_while_all_compute, hosts=2),
    Fault(a_host_is_lost_while_another_sleeps, hosts=3),
    Fault(a_rank_fails),
    Fault(two_ranks_fail),
    Fault(a_rank_fails_while_a_host_sleeps, hosts=2),
    Fault(mpirun_is_interrupted),
    Fault(mpirun_is_interrupted_after_all_were_stopped),
    Fault(all_are_sent_sigterm),
    Fault(one_is_sent_sigterm),
    Fault(systemd_stops_one),
)


def plan_for(simulation: Simulation, fault: Fault) -> Plan:
    """Return a world in which a fault is to happen."""
    draw = simulation.random
    layouts = [
        sizes for sizes in LAYOUTS if sum(sizes) >= fault.ranks and len(sizes) >= fault.hosts
    ]
    world = World(
        simulation,
        draw.choice(layouts),
        draw.choice([CABLE, WIRELESS, CROWDED] if fault.is_slow else [CABLE, WIRELESS]),
        limit=draw.choice(LIMITS),
        reacts=draw.random() < 0.8 or fault.needs_mpirun,
        is_elsewhere=draw.random() < 0.2,
    )
    simulation.note(fault.name, "limit", world.limit, world.names)
    return Plan(world, draw.uniform(1, 4))


def play(simulation: Simulation) -> None:
    """One line, which names a rank at fault, or the signal that interrupted the job; no line, and
    no end, where nobody is silent for the limit. Once the line is due, every process ends within
    the limit and ten seconds, except those that are stopped."""
    fault = simulation.random.choice(FAULTS)
    plan = plan_for(simulation, fault)
    world = plan.world
    culprits = fault.happens(plan)
    over = plan.time + plan.last
    rest = world.limit + (2.0 if culprits == [] else 2 * MOST_SECONDS_TO_END)
    simulation.run(over + rest, world.runs)
    if culprits == []:
        assert world.said == []
        assert world.living() == [rank.number for rank in world.ranks]
        return
    stopped = {rank.number for rank in world.ranks if rank.is_stopped}
    assert {*world.living()} <= stopped
    ended = max(rank.ended for rank in world.ranks if rank.number not in stopped)
    assert ended - over <= world.limit + MOST_SECONDS_TO_END
    assert len(world.said) == 1
    (_, _, text) = world.said[0]
    if culprits is None:
        assert text == INTERRUPTED
    else:
        assert any(world.names[rank] in text for rank in culprits)


JOBS = Room("jobs", play)
