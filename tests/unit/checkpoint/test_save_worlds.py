"""Hundreds of runs that die, lose power or fill the disk while they save, and resume."""

from __future__ import annotations

import pytest

from tests.helpers.worlds.saves import SAVES


@pytest.mark.parametrize("part", range(4))
def test_a_checkpoint_is_whole_or_not_there_and_a_run_goes_on_from_the_newest(part: int) -> None:
    SAVES.worlds(500, first=500 * part)
