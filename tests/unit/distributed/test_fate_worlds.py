"""Thousands of jobs in virtual time, each with a fault: one line, which names the rank at fault."""

from __future__ import annotations

import pytest

from tests.helpers.worlds.job_faults import JOBS


@pytest.mark.parametrize("part", range(4))
def test_a_job_ends_in_time_with_one_line_that_names_who_is_at_fault_and_never_without_fault(
    part: int,
) -> None:
    JOBS.worlds(500, first=500 * part)
