"""Keys and values are moved layer by layer: never are they all there twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache

from shardmlx.errors import UserError
from shardmlx.inference.commands import (
    Begin,
    Border,
    Decode,
    Item,
    Keep,
    Prefill,
)
from shardmlx.inference.kv_caches import KVCaches, check_limited, check_quantised
from shardmlx.inference.prefix_cache import CachedPrefix
from shardmlx.modelfiles.parts import read_shape
from shardmlx.models.runtime.slice import Slice
from shardmlx.models.sizes.kv_cache import STEP, CacheQuantisation, parts_of
from shardmlx.partitioners import LayerCosts
from shardmlx.planning.facts.workload import ModelSizes
from shardmlx.planning.memory.generation import GenerationSetup, kv_cache_memory
from testbed.family_configs import CONFIGS
from testbed.tiny_models import build, tiny_config
from testbed.undeclared_configs import UNDECLARED

LAYERS = 8
TOKENS = 256
LAYER_BYTES = 2 * 4 * TOKENS * 32 * 4
"""Of one sequence's keys and values, in float32."""

OF_OTHERS = 2 * 16384
"""Bytes that threads of earlier tests may have more or less meanwhile: of a page or two."""


def without_weights(config: dict[str, Any], dtype: str) -> ModelSizes:
    shape = read_shape(config)
    sizes = LayerCosts((0,) * shape.num_layers)
    return ModelSizes(shape=shape, weight_sizes=sizes, dtype=dtype)


def keeping(*sequences: int) -> Keep:
    return Keep(sequences, (0,) * len(sequences))


def in_a_group(sequences: tuple[int, ...]) -> KVCaches:
    """Sequences that have read their prompts and advance together."""
    caches = KVCaches(lambda: [KVCache() for _ in range(LAYERS)])
    for sequence in sequences:
        for layer in caches.of(Prefill(sequence, TOKENS)):
            layer.update_and_fetch(*(mx.full((1, 4, TOKENS, 32), sequence, mx.float32),) * 2)
            mx.eval(layer.keys, layer.values)
    caches.of(Decode(sequences, 0))
    return caches


@pytest.mark.parametrize(
    ("kept", "dropped", "added"),
    [
        pytest.param((1, 2, 3, 4), (), 0, id="all end and are kept"),
        pytest.param((2, 3), (1, 4), -2, id="half is kept"),
        pytest.param((4,), (2,), -1, id="two go on, one is kept"),
    ],
)
def test_sequences_that_end_move_layer_by_layer(
    kept: tuple[int, ...], dropped: tuple[int, ...], added: int
) -> None:
    caches = in_a_group((1, 2, 3, 4))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    caches.keep(keeping(*kept))
    caches.drop(dropped)
    assert mx.get_peak_memory() <= before + 4.25 * LAYER_BYTES
    assert abs(mx.get_active_memory() - before - added * LAYERS * LAYER_BYTES) <= OF_OTHERS
    for sequence in kept:
        (row,) = {float(layer.keys.max()) for layer in caches.of(Prefill(sequence, 1))}
        assert row == sequence


def test_a_state_that_leaves_its_group_holds_none_of_the_others() -> None:
    caches = KVCaches(lambda: [ArraysCache(1)])
    for sequence in range(8):
        (layer,) = caches.of(Prefill(sequence, 1))
        layer[0] = mx.full((1, 4, 64, 256), sequence, mx.float32)
        mx.eval(layer.state)
    del layer
    caches.of(Decode(tuple(range(8)), 0))
    before = mx.get_active_memory()
    caches.keep(keeping(3))
    caches.drop((0, 1, 2, 4, 5, 6, 7))
    assert abs(before - mx.get_active_memory() - 7 * 4 * 64 * 256 * 4) <= OF_OTHERS
    ((kept,),) = caches._alone.values()
    assert mx.all(kept[0] == 3)


def test_a_thousand_sequences_of_random_rounds_leave_the_caches_of_plain_steps() -> None:
    """Of each round of drafts the next news reject the last ones; now and then a step has none."""
    random = np.random.RandomState(0)
    caches = KVCaches(lambda: [KVCache(), RotatingKVCache(64)])

    def enter(item: Item, tokens: np.ndarray) -> None:
        array = mx.array(tokens[None, None, :, None], mx.float32)
        for layer in caches.of(item):
            layer.update_and_fetch(array, array)

    for sequence in range(1000):
        text = random.randint(1, 100, size=random.randint(1, 20))
        caches.drop((sequence - 1,))
        enter(Prefill(sequence, len(text)), text)
        rejected = 0
        for length in random.randint(1, 7, size=3):
            tokens = random.randint(1, 100, size=length)
            if rejected:
                caches.cut(sequence, rejected)
            enter(Decode((sequence,), 0, drafts=tuple(tokens[1:].tolist())), tokens)
            right = random.randint(1, length + 1)
            text = np.concatenate([text, tokens[:right]])
            rejected = int(length - right)
        if rejected:
            caches.cut(sequence, rejected)
        for layer in caches.of(Decode((sequence,), 0)):
            assert layer.offset == len(text)
            for array in (layer.keys, layer.values):
                np.testing.assert_array_equal(np.array(array)[0, 0, : len(text), 0], text)


# Quantised.

PACKED = CacheQuantisation(bits=4, group_size=32, start=100)
WIDE: dict[str, Any] = {"head_dim": 32, "layer_types": ["full_attention", "sliding_attention"]}


def fed(caches: KVCaches, sequence: int, tokens: int) -> list[object]:
    """The caches of a sequence of which so many more tokens have entered."""
    layers = caches.of(Prefill(sequence, tokens))
    for layer in layers:
        layer.update_and_fetch(*(mx.random.normal((1, 2, tokens, 32)),) * 2)
    return layers


def test_caches_are_quantised_before_the_first_step_after_they_are_long_enough() -> None:
    caches = KVCaches(lambda: [KVCache(), RotatingKVCache(8)], PACKED)
    for _ in range(3):
        full, sliding = fed(caches, 1, 50)
        assert isinstance(sliding, RotatingKVCache)
        assert isinstance(full, KVCache) == (full.offset <= PACKED.start)  # type: ignore[attr-defined]


def test_one_that_is_kept_is_quantised_and_may_be_cut() -> None:
    caches = KVCaches(lambda: [KVCache()], PACKED)
    fed(caches, 1, 150)
    caches.keep(keeping(1))
    begin = CachedPrefix(sequence=1, length=110, is_whole=False)
    caches.begin(Begin(2, prefix=begin))
    (cut,) = caches.of(Prefill(2, 1))
    (kept,) = caches.of(Prefill(1, 1))
    assert isinstance(kept, QuantizedKVCache)
    assert (kept.offset, cut.offset) == (150, 110)
    for array, whole in zip((*cut.keys, *cut.values), (*kept.keys, *kept.values), strict=True):
        assert mx.array_equal(array, whole[..., :110, :])
        assert array.shape[2] == 110


@pytest.mark.parametrize("tokens", [90, 600])
@pytest.mark.parametrize("bits", [3, 8])
def test_the_plan_counts_the_bytes_of_quantised_caches(bits: int, tokens: int) -> None:
    """Before they are long enough they are plain, and a sliding window always is."""
    how = CacheQuantisation(bits=bits, group_size=32, start=100)
    config = tiny_config("llama", layers=2, sliding_window=STEP, **WIDE)
    part = Slice(build(config), 0, 2)
    caches = KVCaches(part.new_caches, how)
    for start in range(0, tokens, 30):
        length = min(30, tokens - start)
        layers = caches.of(Prefill(1, length))
        part.extend(mx.zeros((1, length), mx.int32), layers)
    layers = caches.of(Decode((1,), 0))
    setup = GenerationSetup(
        model=without_weights(config, "float32"),
        sequences=1,
        context=tokens,
        chunk=30,
        quantisation=how,
    )
    planned = kv_cache_memory(setup, 0, 2)
    held = sum(layer.nbytes for layer in layers)
    assert held <= planned <= held + 2 * STEP * 2 * 2 * 32 * 4
    assert (planned < kv_cache_memory(replace(setup, quantisation=None), 0, 2)) == (tokens == 600)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["mamba2", "qwen3_next"])
def test_the_plan_counts_the_bytes_of_states_and_of_their_copies(
    kind: str, dtype: mx.Dtype
) -> None:
    """Of a recurrent model, and of one that attends too."""
    config = UNDECLARED[kind]
    model = build(config)
    model.set_dtype(dtype)
    part = Slice(model, 0, 4)
    caches = KVCaches(part.new_caches)
    borders = 10, 20, 30
    for border in borders:
        part.extend(mx.zeros((1, 10), mx.int32), caches.of(Prefill(1, 10)))
        caches.keep_border(Border(1, border))
    layers = [parts_of(cache) for cache in caches._alone[1]]
    copies = [parts for each in caches._borders[1].values() for parts in each]
    held = sum(part.nbytes for parts in [*layers, *copies] for part in parts if part is not None)
    setup = GenerationSetup(
        model=without_weights(config, str(dtype).rpartition(".")[2]),
        sequences=1,
        context=STEP,
        cache_tokens=STEP,
        state_copies=len(borders),
    )
    assert kv_cache_memory(setup, 0, 4) == held


@pytest.mark.parametrize(
    ("family", "head_dim", "fault"),
    [
        ("gpt_oss", 32, "does not support attention sinks"),
        ("deepseek_v3", 32, ""),
        ("llama", 16, "divisible by the quantization group size"),
    ],
)
def test_layers_that_take_no_quantised_caches_are_found_out_before_weights_are_read(
    family: str, head_dim: int, fault: str
) -> None:
    part = Slice(build(CONFIGS[family] | {"head_dim": head_dim}), 0, 4)
    with pytest.raises(UserError, match=rf"^--kv-bits 4: layers of {family} do not take .*{fault}"):
        check_quantised(part, PACKED, family)


def test_windows_in_whole_caches_take_no_limited_ones() -> None:
    """mlx-lm's model of this type masks what they do not see. Weights are not read."""
    check_limited(Slice(build(CONFIGS["qwen3"]), 0, 4), 16, "qwen3")
    part = Slice(build(CONFIGS["mistral3"]), 0, 4)
    with pytest.raises(UserError, match=r"^--max-kv-size 16: layers of mistral3 do not take"):
        check_limited(part, 16, "mistral3")
