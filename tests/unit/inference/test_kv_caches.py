"""Keys and values are moved layer by layer: never are they all there twice."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from shardmlx.inference.kv_caches import KVCaches
from shardmlx.inference.scheduler import Item, ItemKind

LAYERS = 8
TOKENS = 256
LAYER_BYTES = 2 * 4 * TOKENS * 32 * 4
"""Of one sequence's keys and values, in float32."""


def in_a_group(sequences: tuple[int, ...]) -> KVCaches:
    """Sequences that have read their prompts and advance together."""
    caches = KVCaches(lambda: [KVCache() for _ in range(LAYERS)])
    for sequence in sequences:
        for layer in caches.of(Item(ItemKind.PREFILL, (sequence,), TOKENS)):
            layer.update_and_fetch(*(mx.full((1, 4, TOKENS, 32), sequence, mx.float32),) * 2)
            mx.eval(layer.keys, layer.values)
    caches.of(Item(ItemKind.DECODE, sequences, group=0))
    return caches


@pytest.mark.parametrize(
    ("told", "added"),
    [
        pytest.param(Item(ItemKind.IDLE, kept=(1, 2, 3, 4)), 0, id="all end and are kept"),
        pytest.param(Item(ItemKind.IDLE, kept=(2, 3), dropped=(1, 4)), -2, id="half is kept"),
        pytest.param(Item(ItemKind.IDLE, dropped=(1, 2, 4)), -3, id="one goes on"),
        pytest.param(Item(ItemKind.IDLE, kept=(4,), dropped=(2,)), -1, id="two go on, one is kept"),
    ],
)
def test_sequences_that_end_move_layer_by_layer(told: Item, added: int) -> None:
    caches = in_a_group((1, 2, 3, 4))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    caches.update(told)
    assert mx.get_peak_memory() <= before + 4 * LAYER_BYTES + 4096
    assert abs(mx.get_active_memory() - before - added * LAYERS * LAYER_BYTES) <= 16384
    for sequence in told.kept:
        (row,) = {
            float(layer.keys.max()) for layer in caches.of(Item(ItemKind.PREFILL, (sequence,)))
        }
        assert row == sequence
