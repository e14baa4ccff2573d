"""Hundreds of hubs that die, lose power or fill the disk, with islands that come and go."""

from __future__ import annotations

import pytest

from tests.helpers.worlds.islands import ISLANDS


@pytest.mark.parametrize("part", range(4))
def test_each_report_counts_once_with_its_weight_and_no_island_waits_for_ever(part: int) -> None:
    ISLANDS.worlds(500, first=500 * part)
