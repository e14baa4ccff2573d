"""Dropout masks depend on seed, step, row, position and layer: not on who computes what, or when,
nor on how rows are divided into micro-batches and padded."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from shardmlx.engine.batches import split
from shardmlx.engine.stage import Stage
from shardmlx.models.runtime.dropout import KeyedDropout, KeyedExperts, key_every_dropout, set_keys
from shardmlx.models.runtime.slice import Slice
from tests.helpers.models_and_batches import (
    Result,
    check_same,
    logits_of,
    move_trained,
    random_batch,
    saving,
    through_stages,
    tiny_model,
    with_adapters,
)

LAYERS = 4
BATCH = random_batch(4)
MICROBATCHES = split(BATCH, dp=1, replica=0, micro_batch_rows=2)


def model_with_dropout(
    keys: list[str] | None = None, *, tied: bool = False, family: str = "llama"
) -> nn.Module:
    """LoRA with dropout on all layers; no weight of it is zero, so that masks show."""
    model = tiny_model(family, layers=LAYERS, tied=tied)
    parameters: dict[str, Any] = {} if keys is None else {"keys": keys}
    return move_trained(with_adapters(model, dropout=0.5, **parameters), 0.1)


def mask(*key: int, first_row: int = 0, shape: tuple[int, ...] = (8, 8, 64)) -> mx.array:
    dropout = KeyedDropout(keep=0.5)
    set_keys([dropout], *key, first_row=first_row)
    return dropout(mx.ones(shape))


def test_the_same_key_draws_the_same_mask_whatever_was_drawn_before() -> None:
    first = mask(0, 7, 3)
    mx.random.seed(99)
    mx.random.normal((5,))
    assert mx.array_equal(mask(0, 7, 3), first)


@pytest.mark.parametrize("key", [(1, 7, 3), (0, 8, 3), (0, 7, 4), (0, 73), (0, 7, 3, 0)])
def test_another_key_draws_another_mask(key: tuple[int, ...]) -> None:
    same = (mask(*key) == mask(0, 7, 3)).mean().item()
    assert isinstance(same, float)
    assert 0.4 < same < 0.6


def test_every_row_and_every_position_draws_its_own_mask() -> None:
    masks = np.array(mask(0, 7)).reshape(64, 64)
    agreement = (masks[:, None] == masks[None]).mean(axis=-1)[~np.eye(64, dtype=bool)]
    assert agreement.min() > 0.1
    assert agreement.max() < 0.9
    assert 0.48 < agreement.mean() < 0.52


def test_a_row_draws_the_same_mask_in_whatever_micro_batch_it_is_and_however_wide() -> None:
    whole = mask(0, 7, shape=(8, 32, 5))
    for first_row, rows, width in ((0, 1, 32), (3, 2, 7), (5, 3, 1), (0, 8, 16)):
        part = mask(0, 7, first_row=first_row, shape=(rows, width, 5))
        assert mx.array_equal(part, whole[first_row : first_row + rows, :width])


def test_only_active_dropouts_are_replaced() -> None:
    layer = tiny_model(layers=1).layers[0]
    layer.first, layer.second, layer.off = nn.Dropout(0.25), nn.Dropout(0.5), nn.Dropout(0.0)
    layer.second.eval()

    found = key_every_dropout(layer)

    assert found == [layer.first, layer.second]
    assert [dropout.training for dropout in found] == [True, False]
    assert isinstance(layer.off, nn.Dropout)
    assert key_every_dropout(layer) == found


# In a model.


def run(
    ranges: list[tuple[int, int]],
    step: int = 1,
    *,
    model: nn.Module | None = None,
    checkpoint: bool = False,
    micro_batch_size: int = 2,
) -> Result:
    model = model_with_dropout() if model is None else model
    microbatches = split(BATCH, dp=1, replica=0, micro_batch_rows=micro_batch_size)
    return through_stages(model, ranges, microbatches, key=(0, step), savings=saving(checkpoint))


CUTS = [[(0, 1), (1, 4)], [(0, 2), (2, 3), (3, 4)]]


@pytest.mark.parametrize("ranges", CUTS, ids=str)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_neither_the_layout_nor_checkpointing_changes_a_mask(
    ranges: list[tuple[int, int]], checkpoint: bool
) -> None:
    found, expected = run(ranges, checkpoint=checkpoint), run([(0, 4)])
    assert found[0] == expected[0]
    check_same(found, expected)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_nor_does_the_size_of_micro_batches(micro_batch_size: int, family: str) -> None:
    """Shorter rows are padded less in smaller micro-batches; few tokens are not sorted by expert in
    mlx-lm."""
    expected, found = (
        run(cuts, model=model_with_dropout(family=family), micro_batch_size=size)
        for cuts, size in (([(0, 4)], 4), (CUTS[0], micro_batch_size))
    )
    check_same(found, expected, 1e-5)


@pytest.mark.parametrize("tokens", [3, 40])
def test_experts_that_drop_nothing_compute_what_those_of_mlx_lm_do(tokens: int) -> None:
    model = model_with_dropout(family="mixtral")
    experts = model.layers[0].block_sparse_moe.switch_mlp
    names = [name for name, _ in tree_flatten(model.parameters())]
    x = mx.random.normal((2, tokens, 32))
    choice = mx.random.randint(0, 4, (2, tokens, 2))
    experts.eval()
    expected = experts(x, choice)

    key_every_dropout(model.layers[0])

    keyed = model.layers[0].block_sparse_moe.switch_mlp
    assert isinstance(keyed, KeyedExperts)
    assert mx.allclose(keyed(x, choice), expected, atol=1e-5)
    assert [name for name, _ in tree_flatten(model.parameters())] == names


def test_each_choice_of_an_expert_draws_a_mask_of_its_own() -> None:
    dropout = KeyedDropout(keep=0.5)
    order = mx.array([3, 0, 2, 1])
    set_keys([dropout], 1)
    dropout.set_order((1, 2, 2), order)
    sorted_ = dropout(mx.ones((4, 1, 64)))
    in_order = dropout(mx.ones((1, 2, 2, 1, 64)))
    assert mx.array_equal(sorted_, in_order.flatten(0, 2)[order])
    assert not mx.array_equal(in_order[0, 0, 0], in_order[0, 0, 1])


@pytest.mark.parametrize("tied", [False, True])
def test_nor_do_they_for_dropout_in_embedding_and_head(tied: bool) -> None:
    keys = ["model.embed_tokens", "self_attn.v_proj", *([] if tied else ["lm_head"])]
    expected, found = (
        run(cuts, model=model_with_dropout(keys, tied=tied)) for cuts in ([(0, 4)], CUTS[0])
    )
    assert "model.embed_tokens.lora_a" in expected[1]
    assert found[0] == expected[0]
    check_same(found, expected, 1e-6 if tied else 0.0)


@pytest.mark.parametrize("key", ["self_attn.v_proj", "model.embed_tokens", "lm_head"])
def test_another_step_draws_other_masks(key: str) -> None:
    model = model_with_dropout([key])
    first, second, first_again = (run([(0, 4)], step, model=model)[0] for step in (1, 2, 1))
    assert first == first_again != second


def test_the_same_rows_in_another_place_of_the_batch_draw_other_masks() -> None:
    part = Slice(model_with_dropout(), 0, 4)
    stage = Stage(0, part, needs_input_gradient=False)
    losses = [
        stage.forward(j, replace(MICROBATCHES[0], first_row=first_row), None, scale=1.0).item()
        for j, first_row in enumerate((0, 0, 2))
    ]
    assert losses[0] == losses[1] != losses[2]


def test_the_same_weights_in_another_layer_draw_other_masks() -> None:
    model = model_with_dropout()
    model.layers[2].update(model.layers[1].parameters())
    parts = [Slice(model, 1, 2), Slice(model, 2, 3)]
    x = mx.random.normal((2, 16, 32))
    assert not mx.array_equal(parts[0](x), parts[1](x))
    for part in parts:
        part.train(False)
    assert mx.array_equal(parts[0](x), parts[1](x))


def test_evaluation_drops_nothing() -> None:
    model = model_with_dropout()
    part = Slice(model, 0, 4)
    tokens = mx.array(BATCH.tokens[:, :-1])
    part.train(False)
    logits = logits_of(part, tokens, key=(0, 1))
    model.eval()
    assert mx.array_equal(logits, model(tokens))
    part.train()
    assert not mx.array_equal(part(tokens, key=(0, 1)), logits)
