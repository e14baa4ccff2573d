"""Restarts of a job: in thousands of worlds with hosts that go and come back, and one by one."""

from __future__ import annotations

import pytest

from shardmlx.hosts.restarts import (
    SECONDS_FOR_HOSTS,
    Attempt,
    GaveUp,
    final_status,
    job_status,
    pause_before,
)
from shardmlx.hosts.supervisor import Ended
from tests.helpers.worlds.launches import LAUNCHES, World
from tests.helpers.worlds.simulation import Simulation


@pytest.mark.parametrize("part", range(4))
def test_a_job_starts_again_on_the_hosts_that_answer_and_ends_with_a_reason(part: int) -> None:
    LAUNCHES.worlds(500, first=500 * part)


def test_a_server_waits_five_minutes_for_a_host_and_gives_up_by_its_name() -> None:
    world = World(Simulation("a host goes"), "serve", restarts=3)
    last = world.hosts[-1]
    last.sleep(1e9)
    assert world.run() == 1
    assert world.gave_up is not None
    assert world.gave_up.startswith(f"{last.name}: no login")
    assert SECONDS_FOR_HOSTS < world.simulation.now - world.ended_at < SECONDS_FOR_HOSTS + 20


@pytest.mark.parametrize(
    ("ended", "told", "was_stopped", "status", "said"),
    [
        (Ended(0, 1), 0, False, 0, ""),
        (Ended(143, 1), 2, False, 2, ""),
        (Ended(143, 1), 0, True, 0, ""),
        (Ended(3, 1), None, False, 3, ""),
        (Ended(0, 1), None, False, 1, "as if all were well"),
        (Ended(0, 1), None, True, 1, ""),
        (Ended(137, 1, killed=True), None, False, 137, "was killed"),
        (Ended(137, 1, killed=True), None, True, 137, ""),
    ],
)
def test_only_what_rank_0_has_told_is_a_good_end(
    ended: Ended, told: int | None, was_stopped: bool, status: int, said: str
) -> None:
    found, note = job_status(ended, told, was_stopped=was_stopped)
    assert found == status
    assert said in note
    assert bool(said) == bool(note)


def test_the_pause_doubles_up_to_a_minute_whatever_the_number_of_restarts() -> None:
    assert [pause_before(each) for each in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert pause_before(5000) == 60


def failed(gained: bool | None = True, hosts: tuple[str, ...] = ("a", "b")) -> Attempt:
    return Attempt(1, hosts, gained)


@pytest.mark.parametrize(
    ("attempts", "stopped_by", "ends"),
    [
        ([Attempt(0)], None, 0),
        ([Attempt(0)], 15, 0),  # it was done before it heard of it
        ([Attempt(2)], None, 2),
        ([Attempt(138)], 2, 130),
        ([Attempt(138)], None, 138),
        ([Attempt(158)], None, 158),
        ([Attempt(2)], 15, 143),
        ([Attempt(143)], None, None),  # not by us: a machine that shuts down
        ([failed()] * 2, None, None),
        ([failed()] * 3, None, "2 restarts used up"),
        ([failed(gained=None)] * 2, None, None),
        ([failed(gained=False), failed(gained=True)], None, None),
        ([failed(gained=False, hosts=("a",)), failed(gained=False)], None, None),
        ([failed(gained=False)] * 2, None, "twice in a row"),
    ],
)
def test_a_job_ends_is_given_up_or_starts_again(
    attempts: list[Attempt], stopped_by: int | None, ends: int | str | None
) -> None:
    assert final_status([failed()], 0, None) == 1  # no restarts need no reason
    if isinstance(ends, str):
        with pytest.raises(GaveUp, match=ends):
            final_status(attempts, 2, stopped_by)
    else:
        assert final_status(attempts, 2, stopped_by) == ends
