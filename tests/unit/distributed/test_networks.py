"""The networks that Open MPI may use, as it was told."""

from __future__ import annotations

import pytest

from shardmlx.distributed.networks import is_included


@pytest.mark.parametrize(
    ("include", "used"),
    [
        (None, True),
        ("", True),
        ("192.168.1.0/24,10.25.0.0/24", True),
        ("en0,bridge0", True),
        ("192.168.1.0/24", False),
        ("en0", False),
    ],
)
def test_open_mpi_may_be_told_what_to_use(include: str | None, used: bool) -> None:
    assert is_included("bridge0", "10.25.0.1", include) == used
