"""Thousands of jobs in virtual time, each with a fault: one line, which names the rank at fault."""

from __future__ import annotations

import pytest

from tests.helpers.worlds.job_faults import JOBS


@pytest.mark.parametrize("part", range(4))
def test_a_job_ends_in_time_with_one_line_that_names_who_is_at_fault_and_never_without_fault(
    part: int,
) -> None:
    JOBS.worlds(500, first=500 * part)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(6, id="after a death a peer's SIGTERM is heard of before one's own"),
        pytest.param(20, id="the dead rank's last messages are still under way"),
        pytest.param(113, id="the first rank that did not answer is not the one that died"),
        pytest.param(4574, id="turns of two ranks differ by less than the spread of signals"),
        pytest.param(3702, id="lower ranks slept through most of the time for their report"),
        pytest.param(14978, id="a lower rank is heard again as a higher one's turn comes"),
        pytest.param(16069, id="a lower rank answers, and dies before it could report"),
    ],
)
def test_worlds_that_once_ended_without_their_line_with_two_or_with_another_rank_s(
    seed: int,
) -> None:
    JOBS.world(seed)
