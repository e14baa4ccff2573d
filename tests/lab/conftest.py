"""Two hosts, and what tests in ``tests/mpi`` have too: a small model, and data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.hosts import Lab, two_hosts
from tests.mpi.conftest import pirate, small, small_tokenizer

__all__ = ["lab", "pirate", "small", "small_tokenizer"]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with two_hosts(tmp_path) as lab:
        yield lab
