"""Two hosts, for the tests that need them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.hosts import Lab, two_hosts


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with two_hosts(tmp_path) as lab:
        yield lab
