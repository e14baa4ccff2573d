"""Sums on each host first, and then between hosts: what one level makes of the same arrays, with
half of the bytes between two hosts of two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from shardmlx.distributed.host_sums import HostSums, levels_of
from shardmlx.distributed.messages import new_buffer
from shardmlx.distributed.sums import Sums
from tests.helpers.divided_training import tiny_models
from tests.helpers.engines import NOTHING, OPTIMIZER, engine_of, gradients_of, train_on
from tests.helpers.local_transport import LocalNetwork, LocalTransport
from tests.helpers.models_and_batches import Layout, random_batch

HOSTS = ("mac1", "mac1", "mac2", "mac2")


@pytest.mark.parametrize(
    ("rank", "group", "hosts", "levels"),
    [
        (0, (0, 1, 2, 3), HOSTS, ((0, 1), (0, 2))),
        (3, (0, 1, 2, 3), HOSTS, ((2, 3), (1, 3))),
        (2, (0, 1, 2, 3), ("a", "b", "a", "b"), ((0, 2), (2, 3))),
        (5, (1, 3, 5, 7), ("a",) * 4 + ("b",) * 4, ((5, 7), (1, 5))),
        (0, (0, 1, 2, 3), ("a",) * 4, None),
        (0, (0, 2), HOSTS, None),
        (0, (0, 1, 2), HOSTS, None),
        (0, (0,), HOSTS, None),
    ],
)
def test_hosts_of_equally_many_ranks_have_two_levels(
    rank: int, group: Sequence[int], hosts: Sequence[str], levels: object
) -> None:
    assert levels_of(rank, group, hosts) == levels


def counted(transport: LocalTransport) -> list[int]:
    """Count the bytes that a rank sends to other hosts, from now on."""
    sent = [0]
    send = transport.send

    def counting(array: Any, peer: int, tag: int) -> Any:
        if transport.hosts[peer] != transport.hosts[transport.rank]:
            sent[0] += array.nbytes
        return send(array, peer, tag)

    transport.send = counting  # type: ignore[method-assign]
    return sent


@pytest.mark.parametrize("sizes", [(1 << 16, 5, 1 << 12), (1, 0, 3), (7,)])
def test_sums_are_those_of_one_level_with_half_of_the_bytes_between_hosts(
    sizes: Sequence[int],
) -> None:
    """Also of several arrays at a time, and of fewer numbers than ranks."""
    random = np.random.RandomState(0)
    values = [[random.standard_normal(size).astype(np.float32) for size in sizes] for _ in HOSTS]

    def summed(transport: LocalTransport, *, in_levels: bool) -> tuple[list[Any], int]:
        transport.hosts = HOSTS
        sent = counted(transport)
        sums = Sums(transport, new_buffer((1 << 14,), mx.float32))
        group = tuple(range(4))
        levels = levels_of(transport.rank, group, transport.hosts)
        assert levels is not None
        by_host = HostSums(sums, transport.rank, levels)
        arrays = [mx.array(each) for each in values[transport.rank]]
        mx.eval(arrays)
        started = [
            by_host.all_reduce(each) if in_levels else sums.all_reduce(each, group)
            for each in arrays
        ]
        for each in started:
            sums.wait(each, lambda: "summing")
        return [np.array(each) for each in arrays], sent[0]

    flat = LocalNetwork(4).run(lambda transport: summed(transport, in_levels=False))
    levels = LocalNetwork(4).run(lambda transport: summed(transport, in_levels=True))
    for place, size in enumerate(sizes):
        exact = np.sum([of_rank[place].astype(np.float64) for of_rank in values], axis=0)
        for arrays, _ in (*flat, *levels):
            np.testing.assert_allclose(arrays[place], exact, atol=2e-6)
        for arrays, _ in levels:
            np.testing.assert_array_equal(arrays[place], levels[0][0][place])
        assert len(exact) == size
    if max(sizes) > 1000:
        ratio = sum(sent for _, sent in levels) / sum(sent for _, sent in flat)
        assert ratio == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("divided", [NOTHING, OPTIMIZER])
@pytest.mark.parametrize("layout", [Layout("1f1b", 1, 1, 4), Layout("zb-v", 2, 2, 4)], ids=str)
def test_replicas_on_two_hosts_have_the_gradients_of_replicas_on_one(
    layout: Layout, divided: int
) -> None:
    """With a divided optimizer sums have one level, and are the same to the bit."""
    models = tiny_models(layout, tied=True, layers=4)
    batch = random_batch(2 * layout.ranks, 3, longest=20)
    plan = layout.plan(4, 2 * layout.pp)
    two = ("mac1",) * (layout.ranks // 2) + ("mac2",) * (layout.ranks // 2)

    def gradients(transport: LocalTransport, hosts: Sequence[str]) -> dict[str, np.ndarray]:
        transport.hosts = tuple(hosts)
        engine = engine_of(transport, plan, models[transport.rank], divided)
        train_on(engine, batch, layout.pp)
        engine.gradient_norm()
        return gradients_of(engine)

    one = LocalNetwork(layout.ranks).run(lambda rank: gradients(rank, ("mac1",) * layout.ranks))
    other = LocalNetwork(layout.ranks).run(lambda rank: gradients(rank, two))
    tolerance = 0.0 if divided == OPTIMIZER else 1e-7
    for expected, found in zip(one, other, strict=True):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            np.testing.assert_allclose(found[name], gradient, rtol=0, atol=tolerance, err_msg=name)
