"""What several tests of ranks begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.mpirun import train_well


@pytest.fixture(scope="session")
def adapters(small: Path, pirate: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of all layers of ``small``, with which it says something else."""
    path = tmp_path_factory.mktemp("tuned") / "adapters"
    train_well(
        1,
        *("--model", small, "--data", pirate, "--adapter-path", path, "--num-layers", "-1"),
        *("--iters", "3", "--batch-size", "4", "--learning-rate", "0.01", "--val-batches", "0"),
    )
    return path
