"""Gemma 4: keys and values that later layers share, and inputs of layers, cross every cut."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from shardmlx.config.specs import NO_SAVINGS, Savings
from shardmlx.engine.batches import pack
from shardmlx.inference.prefix_cache import PrefixCache
from shardmlx.loading.manifest import is_needed
from shardmlx.modelfiles.parts import read_shape
from shardmlx.models.slice import Slice
from tests.helpers.family_configs import LAYERS
from tests.helpers.generation import by_mlx_lm, run_pipeline
from tests.helpers.models_and_batches import (
    Result,
    build,
    check_same,
    move_trained,
    random_batch,
    reference,
    saving,
    through_stages,
    with_adapters,
)
from tests.helpers.undeclared_configs import UNDECLARED

BATCH = random_batch(3, longest=20)
# Of four layers the first two give keys and values to the others.
CUTS = [[(0, 1), (1, 2), (2, LAYERS)], [(0, 2), (2, 3), (3, LAYERS)]]
kinds = pytest.mark.parametrize("kind", ["gemma4_text", "gemma4"])


@cache
def adapted(kind: str) -> tuple[nn.Module, Result]:
    """The model with adapters on all layers, and loss and gradients of one process."""
    model = move_trained(with_adapters(build(UNDECLARED[kind], seed=3)))
    return model, reference(model, [BATCH])


@kinds
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(
    ("savings", "packs"),
    [
        (NO_SAVINGS, False),
        (NO_SAVINGS, True),
        (saving(checkpoint=True), False),
        (Savings(attention_chunk=6, loss_chunk=10, recompute="selective"), True),
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
    models = [build(UNDECLARED[kind], seed=3) for _ in cuts]
    mx.eval([model(mx.array([[1]])) for model in models])  # on this thread
    prompts = {0: [5, 7, 11, 13, 17, 19, 23, 29, 31, 3], 1: [4, 8, 15, 16, 23, 42], 2: [9]}
    kept = PrefixCache.of(read_shape(UNDECLARED[kind]), shortest=4)
    texts, _ = run_pipeline(models, cuts, 1, [prompts], 12, kept)
    assert texts == {number: by_mlx_lm(models[0], each, 12) for number, each in prompts.items()}


def test_what_makes_the_inputs_of_layers_is_on_the_first_stage_alone() -> None:
    model, shape = build(UNDECLARED["gemma4_text"]), read_shape(UNDECLARED["gemma4_text"])
    names = [name for name, _ in tree_flatten(model.parameters())]
    first = {name for name in names if is_needed(name, shape, 0, 1)}
    last = {name for name in names if is_needed(name, shape, 1, LAYERS)}
    assert first & last == {"model.embed_tokens.weight"}
    assert "model.embed_tokens_per_layer.weight" in first
    assert first | last == {*names}
    assert shape.parameters() == sum(array.size for _, array in tree_flatten(model.parameters()))


@kinds
def test_stages_send_what_is_carried_with_the_hidden_states(kind: str) -> None:
    shape = read_shape(UNDECLARED[kind])
    part = Slice(build(UNDECLARED[kind]), 0, 1)
    assert part.hidden_size == shape.hidden_size + shape.carried_size
    # Two donors with keys and values of 2 heads, of 16 and of 32, and inputs of 4 layers.
    assert shape.carried_size == (2 * 2 * (16 + 32) + 4 * 8 if kind == "gemma4_text" else 0)
