"""Restarts of a job: in thousands of worlds with hosts that go and come back, and one by one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest

from shardmlx.hosts.findings import Finding
from shardmlx.hosts.restarts import (
    Attempt,
    GaveUp,
    JobStarts,
    Start,
    final_status,
    job_status,
    pause_before,
)
from shardmlx.hosts.supervisor import Ended
from tests.helpers.worlds.launches import LAUNCHES, options_of


@pytest.mark.parametrize("part", range(4))
def test_a_job_starts_again_on_the_hosts_that_answer_and_ends_with_a_reason(part: int) -> None:
    LAUNCHES.worlds(500, first=500 * part)


class Told:
    """What surrounds the starts of a job on mac1 to mac4, as a test tells it: the seconds and the
    status of each start, and which hosts are missing each time they are asked; the last ones for
    ever."""

    stopped_by = None
    seconds_to_ask = 1.0

    def __init__(
        self,
        ends: Sequence[tuple[float, int]],
        missing: Sequence[Collection[str]] = ((),),
        *,
        command: str = "serve",
        ranks: int = 5,
        resume: str = "auto",
        **launch: Any,
    ) -> None:
        self.launch = replace(options_of(command, ranks, resume), max_restarts=2, **launch)
        self.starts: list[Start] = []
        self.said: list[str] = []
        self.asked = 0
        self._ends = ends
        self._missing = missing
        self._now = 0.0

    def run(self) -> int:
        return JobStarts(self.launch, self).run()

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds

    def say(self, text: str) -> None:
        self.said.append(text)

    def ask(self) -> dict[str, Finding]:
        self._now += self.seconds_to_ask
        missing = self._missing[min(self.asked, len(self._missing) - 1)]
        self.asked += 1
        return {name: Finding(name, "no login", "see that it is on") for name in missing}

    def start(self, start: Start) -> Attempt:
        seconds, status = self._ends[len(self.starts)]
        self.starts.append(start)
        self._now += seconds
        return Attempt(status, start.hosts)


@pytest.mark.parametrize(("seconds_to_ask", "asked"), [(10.6875, 15), (9.375, 17)])
def test_a_server_waits_five_minutes_for_a_host_and_gives_up_by_its_name(
    seconds_to_ask: float, asked: int
) -> None:
    """It looks every ten seconds, and says once for whom it waits. The 15th look is 300.3 seconds
    after the beginning, or the 16th 300 seconds after it."""
    job = Told([(1.0, 1)], [["mac4"]])
    job.seconds_to_ask = seconds_to_ask
    with pytest.raises(GaveUp, match=r"^mac4: no login"):
        job.run()
    assert job.asked == asked
    assert [line.partition(":")[0] for line in job.said[1:]] == ["waits for mac4"]


@pytest.mark.parametrize(("ranks", "hosts"), [(4, 3), (3, 2)])
def test_a_server_waits_for_no_more_hosts_than_its_ranks_need(ranks: int, hosts: int) -> None:
    job = Told([(1.0, 1), (1.0, 0)], [["mac4"]], ranks=ranks)
    assert job.run() == 0
    assert job.asked == 1
    assert job.starts[1].hosts == ("mac1", "mac2", "mac3")[:hosts]


def test_a_server_waits_for_the_host_of_rank_0_whichever_others_are_there() -> None:
    job = Told([(1.0, 1), (1.0, 0)], [["mac1"], ["mac1", "mac2"], []], ranks=2)
    assert job.run() == 0
    assert job.asked == 3
    assert [line.partition(":")[0] for line in job.said[2:-1]] == ["waits for mac1"] * 2


@pytest.mark.parametrize(("seconds", "goes_on"), [(600.0, False), (600.5, True)])
def test_restarts_of_a_server_that_ran_for_ten_minutes_are_counted_anew(
    seconds: float, goes_on: bool
) -> None:
    job = Told([(1.0, 1), (1.0, 1), (seconds, 1), (1.0, 0)])
    if goes_on:
        assert job.run() == 0
        assert len(job.starts) == 4
    else:
        with pytest.raises(GaveUp, match="2 restarts used up"):
            job.run()


@pytest.mark.parametrize(
    ("command", "resume", "status", "goes_on"),
    [
        ("train", "auto", 138, True),
        ("train", "auto", 0, False),
        ("train", "never", 138, False),
        ("serve", "auto", 138, False),
    ],
)
def test_a_run_that_was_stopped_in_order_can_go_on(
    command: str, resume: str, status: int, goes_on: bool
) -> None:
    job = Told([(1.0, status)], command=command, resume=resume)
    assert job.run() == status
    assert job.said == (["run the same command to go on"] if goes_on else [])


def test_a_stage_map_of_the_user_s_file_suits_no_fewer_ranks() -> None:
    job = Told(
        [(1.0, 1)], [["mac4"]], command="train", in_file=["stage_map"], config_file="run.yaml"
    )
    with pytest.raises(GaveUp, match=r"^run\.yaml: stage_map does not suit the 4 ranks left"):
        job.run()


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
    with pytest.raises(GaveUp, match="twice in a row"):
        final_status([failed(), failed(gained=False), failed(gained=False)], 9, None)
    if isinstance(ends, str):
        with pytest.raises(GaveUp, match=ends):
            final_status(attempts, 2, stopped_by)
    else:
        assert final_status(attempts, 2, stopped_by) == ends
