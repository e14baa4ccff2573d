"""Some of the runs that seeds draw have the losses of one process, wherever they stop and go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.training_cells import Bench, Cell

SEEDS = (22, 280, 38)
"""Of ``python -m tests.helpers.training_cells``: a V of stages and packed rows, ZeRO 3 with
references, and stages, each given up for another layout, one of which has tensor shares."""


@pytest.fixture(scope="module")
def bench(pirate: Path, small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("cells"), pirate, small_tokenizer)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cell_has_the_losses_of_one_process(bench: Bench, seed: int) -> None:
    cell = Cell.of(seed)
    assert len(cell.parts) == 2
    assert bench.check(cell, seed) <= cell.most, cell
