"""Keys and values that later layers share, their own inputs, and several hidden states cross every
cut."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from shardmlx.config.specs import NO_SAVINGS, Savings
from shardmlx.engine.batches import pack
from shardmlx.errors import UserError
from shardmlx.inference.prefix_cache import PrefixCache
from shardmlx.loading.adapters import check_keys
from shardmlx.loading.manifest import is_needed
from shardmlx.modelfiles.parts import read_shape
from shardmlx.models.runtime.slice import Slice
from testbed.family_configs import LAYERS
from testbed.further_configs import FURTHER
from testbed.tiny_models import build
from testbed.undeclared_configs import UNDECLARED
from tests.helpers.generation import by_mlx_lm, run_pipeline
from tests.helpers.models_and_batches import (
    Result,
    check_same,
    move_trained,
    random_batch,
    reference,
    saving,
    through_stages,
    with_adapters,
)

BATCH = random_batch(3, longest=20)
# Of four layers the first two give keys and values to the others.
CUTS = [[(0, 1), (1, 2), (2, LAYERS)], [(0, 2), (2, 3), (3, LAYERS)]]
CONFIGS = {**UNDECLARED, **FURTHER}
GEMMA4 = ["gemma4_text", "gemma4"]
kinds = pytest.mark.parametrize("kind", [*GEMMA4, "gemma3n", "hunyuan"])
KEYS: dict[str, dict[str, Any]] = {
    "gemma3n": {"keys": ["self_attn.q_proj", "self_attn.v_proj", "laurel.linear_left"]}
}


@cache
def adapted(kind: str) -> tuple[nn.Module, Result]:
    """The model with adapters on all layers, and loss and gradients of one process."""
    model = build(CONFIGS[kind], seed=3)
    model = move_trained(with_adapters(model, **KEYS.get(kind, {})))
    return model, reference(model, [BATCH])


@kinds
@pytest.mark.parametrize(
    ("cuts", "savings", "packs"),
    [
        (CUTS[0], NO_SAVINGS, False),
        (CUTS[1], NO_SAVINGS, True),
        (CUTS[0], saving(checkpoint=True), False),
        (CUTS[1], Savings(attention_chunk=6, loss_chunk=10, recompute="selective"), True),
    ],
)
def test_gradients_are_those_of_the_whole_model(
    kind: str, cuts: list[tuple[int, int]], savings: Savings, packs: bool
) -> None:
    model, expected = adapted(kind)
    parts = pack(BATCH, 1) if packs else [BATCH]
    check_same(through_stages(model, cuts, parts, savings=savings), expected, 2e-5)


@kinds
def test_texts_in_a_batch_are_those_of_mlx_lm(kind: str) -> None:
    cuts = CUTS[1]
    models = [build(CONFIGS[kind], seed=3) for _ in cuts]
    mx.eval([model(mx.array([[1]])) for model in models])  # on this thread
    prompts = {0: [5, 7, 11, 13, 17, 19, 23, 29, 31, 3], 1: [4, 8, 15, 16, 23, 42], 2: [9]}
    kept = PrefixCache.of(read_shape(CONFIGS[kind]), shortest=4)
    texts, _ = run_pipeline(models, cuts, 1, [prompts], 6, kept)
    # Layers of gemma3n leave arrays of their thread in the model.
    whole = build(CONFIGS[kind], seed=3)
    assert texts == {number: by_mlx_lm(whole, each, 6) for number, each in prompts.items()}


@pytest.mark.parametrize(
    ("kind", "body"), [("gemma4_text", "model"), ("gemma3n", "model.language_model")]
)
def test_what_makes_the_inputs_of_layers_is_on_the_first_stage_alone(kind: str, body: str) -> None:
    model, shape = build(CONFIGS[kind]), read_shape(CONFIGS[kind])
    names = [name for name, _ in tree_flatten(model.parameters())]
    first = {name for name in names if is_needed(name, shape, 0, 1)}
    last = {name for name in names if is_needed(name, shape, 1, LAYERS)}
    assert first & last == {f"{body}.embed_tokens.weight"}
    assert f"{body}.embed_tokens_per_layer.weight" in first
    assert first | last == {*names}
    assert shape.parameters() == sum(array.size for _, array in tree_flatten(model.parameters()))


@pytest.mark.parametrize(
    ("kind", "carried"),
    [
        # Two donors with keys and values of 2 heads, of 16 and of 32, and inputs of 4 layers.
        ("gemma4_text", 2 * 2 * (16 + 32) + 4 * 8),
        ("gemma4", 0),
        # A second array of hidden states, and two donors with heads of 16.
        ("gemma3n", 32 + 2 * 2 * (16 + 16) + 4 * 8),
        # Layers 0 and 2 give keys and values of 2 heads of 8 to the next one: in the same place.
        ("hunyuan", 2 * 2 * 8),
        ("rwkv7", 32),
    ],
)
def test_stages_send_what_is_carried_with_the_hidden_states(kind: str, carried: int) -> None:
    shape = read_shape(CONFIGS[kind])
    part = Slice(build(CONFIGS[kind]), 0, 1)
    assert part.hidden_size == shape.hidden_size + shape.carried_size
    assert shape.carried_size == carried


def test_adapters_of_weights_that_layers_read_are_refused_with_the_keys_of_others() -> None:
    """mlx-lm's own code would stop at the first call of such an adapter."""
    model = build(FURTHER["gemma3n"])
    for keys in (None, ["altup.correction_coefs"]):
        with pytest.raises(UserError) as error:
            check_keys(model, keys)
        assert "altup.correction_coefs" in error.value.problem
        assert "self_attn.q_proj" in error.value.remedy
    check_keys(model, KEYS["gemma3n"]["keys"])
