"""Parts of a sum. How ranks add is in tests/helpers/transport_checks.py."""

from __future__ import annotations

import time

import mlx.core as mx
import numpy as np
import pytest

from shardmlx.distributed import sums
from shardmlx.distributed.exchanges import EVEN, FULL, Pace, pace_of
from shardmlx.distributed.wire_formats import WIRE_FORMATS
from tests.helpers.local_transport import LocalNetwork, LocalTransport
from tests.helpers.transport_checks import contribution


def test_equal_parts_differ_by_one_at_most() -> None:
    assert sums.equal_parts(10, 3) == [0, 3, 6, 10]
    assert sums.equal_parts(2, 4) == [0, 0, 1, 1, 2]


def test_only_sums_of_three_hosts_or_more_go_at_an_even_pace() -> None:
    assert pace_of((0, 1, 2), "abc") is EVEN
    assert pace_of((0, 1, 2), "aba") is pace_of((1, 2), "abc") is FULL


@pytest.mark.parametrize("dtype", WIRE_FORMATS)
def test_the_bits_of_a_sum_do_not_depend_on_its_pace(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(transport: LocalTransport) -> bytes:
        transport.hosts = ("a", "b", "c")
        room, array = (mx.zeros(1 << 15), mx.array(contribution(transport.rank, 9_001)))
        mx.eval(room, array)
        own = sums.Sums(transport, room, WIRE_FORMATS[dtype])
        own.wait(own.all_reduce(array, (0, 1, 2)), lambda: "a sum")
        return np.array(array).tobytes()

    found = set()
    for pace in (FULL, Pace(3, 1 << 12), Pace(1, 5_000)):
        monkeypatch.setattr(sums, "pace_of", lambda *_, pace=pace: pace)
        found |= set(LocalNetwork(3).run(work))
    assert len(found) == 1


def test_a_sum_waits_as_long_as_any_message_where_the_ranks_are_patient() -> None:
    def work(transport: LocalTransport) -> object:
        room, array = mx.zeros(1 << 10), mx.ones(8)
        mx.eval(room, array)
        own = sums.Sums(transport, room)
        time.sleep(6 * sums.SLICE * transport.rank)
        with transport.longer_timeout(60.0):
            own.wait(own.all_reduce(array, (0, 1)), lambda: "a sum")
        return array[0].item()

    assert LocalNetwork(2, timeout=sums.SLICE).run(work) == [2.0, 2.0]
