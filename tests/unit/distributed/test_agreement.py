"""Steps that all ranks take together: an error of one is the error of all."""

from __future__ import annotations

import threading
import time

import pytest

from shardmlx.distributed.agreement import on_all_ranks
from shardmlx.distributed.messages import TransportTimeout
from shardmlx.errors import UserError
from tests.helpers.local_transport import LocalNetwork, LocalTransport


def error_on_each(ranks: int, failing: set[int]) -> list[str]:
    def work(transport: LocalTransport) -> str:
        def step() -> None:
            if transport.rank in failing:
                raise UserError(f"no file on rank {transport.rank}")

        with pytest.raises(UserError) as error:
            on_all_ranks(transport, "looking", step)
        return str(error.value)

    return LocalNetwork(ranks).run(work)


def test_what_all_ranks_find_is_said_once() -> None:
    assert error_on_each(3, {0, 1, 2}) == ["no file on rank 0"] * 3


def test_what_one_rank_finds_reaches_all_with_its_name() -> None:
    assert error_on_each(3, {2}) == ["rank 2 on localhost: no file on rank 2"] * 3


def test_without_errors_every_rank_has_its_own_result() -> None:
    results = LocalNetwork(3).run(lambda transport: on_all_ranks(transport, "x", lambda: 2))
    assert results == [2, 2, 2]


def test_a_rank_may_take_long_where_the_others_are_patient() -> None:
    def work(transport: LocalTransport) -> None:
        with transport.longer_timeout(60.0):
            on_all_ranks(transport, "loading", lambda: time.sleep(0.4 * transport.rank))

    LocalNetwork(2, timeout=0.1).run(work)


def test_patience_ends_and_never_shortens_the_usual_wait() -> None:
    """Rank 1 comes once rank 0 waits no longer."""
    gave_up = threading.Event()

    def work(transport: LocalTransport) -> None:
        with transport.longer_timeout((0.01, 60.0)[transport.rank]):
            try:
                on_all_ranks(transport, "loading", lambda: transport.rank and gave_up.wait(60))
            finally:
                gave_up.set()

    with pytest.raises(TransportTimeout, match=r"loading, waiting for rank 1 .* came for 0\.1 s"):
        LocalNetwork(2, timeout=0.1).run(work)
