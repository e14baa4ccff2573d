"""What is rounded off of sums in int8 goes to the ranks of any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np
import pytest

from shardmlx.engine.engine import Engine
from tests.helpers.checkpoints import Tensors, as_bytes
from tests.helpers.engines import engine_of, train_on
from tests.helpers.local_transport import LocalNetwork, LocalTransport
from tests.helpers.models_and_batches import Gradients, Layout, random_batch, tiny_model

LAYERS = 2
BEFORE = Layout("1f1b", 2, 1, 2)


@pytest.mark.parametrize("layout", [BEFORE, Layout("1f1b", 1, 1, 3), Layout("1f1b", 1)])
def test_in_all_it_stays_the_same(layout: Layout) -> None:
    """Four ranks sum the tied matrix before, three do then: the first takes that of two."""
    models = [tiny_model(tied=True, layers=LAYERS) for _ in range(BEFORE.ranks)]

    def engine_in(layout: Layout, transport: LocalTransport) -> Engine:
        plan, model = layout.plan(LAYERS, 2), models[transport.rank]
        return engine_of(transport, plan, model, sum_dtype="int8")

    def begin(transport: LocalTransport) -> Tensors:
        engine = engine_in(BEFORE, transport)
        train_on(engine, random_batch(4))
        return engine.reducer.errors.state()

    parts = LocalNetwork(BEFORE.ranks).run(begin)
    saved = {key: error for part in parts for key, error in part.items()}
    assert len(saved) == sum(map(len, parts)), "each has a name of its own"

    def go_on(transport: LocalTransport) -> Tensors:
        reducer = engine_in(layout, transport).reducer
        for key in filter(reducer.errors.takes, saved):
            reducer.errors.restore(key, saved[key])
        return reducer.errors.state()

    taken = LocalNetwork(layout.ranks).run(go_on)
    if layout == BEFORE:
        assert list(map(as_bytes, taken)) == list(map(as_bytes, parts))
    if layout.ranks == 1:
        assert taken == [{}], "one rank rounds nothing"
        return
    before, after = totals(parts), totals(taken)
    assert after.keys() == before.keys()
    for name, total in before.items():
        largest = np.abs(total).max()
        assert largest > 0
        assert np.abs(after[name] - total).max() <= 1e-6 * largest


def totals(parts: Sequence[Mapping[str, mx.array]]) -> Gradients:
    """Return what all ranks together have rounded off of each weight."""
    sums: Gradients = {}
    for part in parts:
        for key, error in part.items():
            name = key.rpartition(".")[0]
            sums[name] = sums.get(name, 0) + np.array(error)
    return sums
