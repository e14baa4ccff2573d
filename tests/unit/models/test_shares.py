"""Layers divided among ranks that compute them together give what one process gives."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError
from shardmlx.modelfiles.parts import read_shape
from shardmlx.models.runtime.divided_layers import take_share
from shardmlx.models.runtime.slice import Slice, Sum
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.models.sizes.shares import Cut, TensorShares
from testbed.family_configs import CONFIGS
from testbed.further_configs import FURTHER
from testbed.tiny_models import build, tiny_config
from testbed.undeclared_configs import UNDECLARED
from tests.helpers.local_transport import LocalNetwork
from tests.helpers.models_and_batches import move_trained, with_adapters
from tests.helpers.shared_texts import (
    FEW,
    MODELS,
    TOGETHER,
    config_of,
    expected_texts,
    shares_of,
)

FORMS: Mapping[str, dict[str, Any]] = CONFIGS | UNDECLARED | FURTHER

DIVIDED = (
    *("llama", "mistral", "ministral3", "mixtral", "qwen2", "qwen3", "mistral3", "gemma3"),
    *("gemma2", "gemma3_text", "qwen3_moe", "gpt_oss", "phi3", "glm4", "granite", "starcoder2"),
    *("granitemoe", "minimax_m2", "nemotron", "openelm", "exaone4", "qwen2_moe", "glm4_moe"),
    *("solar_open", "llama4", "afmoe"),
)
"""Families with a row, and of the others those whose code has names or matrices of its own."""

REFUSED = {
    "deepseek_v3": "one latent state",
    "qwen3_next": "recurrent layers",
    "cohere": "side by side",
    "olmo2": "q_norm",
    "gpt_neox": "query_key_value",
    "gemma": "values than ranks: 1",
    "apertus": "alpha_p",
}

TOKENS = mx.array([[3, 17, 5, 60, 22, 9, 41, 8, 30]])
NINE_HEADS = tiny_config("llama", layers=2, num_attention_heads=9, num_key_value_heads=3,
                         hidden_size=72)  # fmt: skip


def logits_of(part: Slice) -> mx.array:
    return part.last_logits(part.extend(TOKENS, part.new_caches()), TOKENS.size)


def sum_of(transport: Transport) -> Sum:
    """Return the sum over ranks that are threads."""
    return lambda x: mx.array(np.sum(transport.all_gather(np.array(x)), axis=0))


def check(model: nn.Module, shape: ModelShape, shares: TensorShares, most: float = 2e-5) -> None:
    """Check that ranks with ``shares`` of all layers compute the logits of the whole model."""
    models = [deepcopy(model) for _ in shares.weights]
    expected = np.array(logits_of(Slice(model, 0, shape.num_layers)))

    def run(transport: Transport) -> np.ndarray:
        part = Slice(models[transport.rank], 0, shape.num_layers)
        take_share(part, shape, shares, transport.rank, sum_of(transport))
        held = sum(part[name].size for name in part.parameters() if ".layers." in name)
        quantised = shares.group_size > 1
        own = shares.of(shape, transport.rank)
        if not (quantised or "lora" in str(part.parameters().keys())):
            assert held == sum(own.layer(i).parameters for i in range(shape.num_layers))
        return np.array(logits_of(part))

    for logits in LocalNetwork(shares.size).run(run):
        assert np.abs(logits - expected).max() <= most * np.abs(expected).max()


@pytest.mark.parametrize(
    ("units", "weights", "parts"),
    [
        (8, (1, 1), [(0, 4), (4, 8)]),
        (3, (2, 1), [(0, 2), (2, 3)]),
        (3, (1, 1), [(0, 2), (2, 3)]),
        (3, (1, 1, 1), [(0, 1), (1, 2), (2, 3)]),
        (4, (98, 1, 1), [(0, 2), (2, 3), (3, 4)]),
        (4, (1, 1, 98), [(0, 1), (1, 2), (2, 4)]),
    ],
)
def test_units_in_proportion_and_one_at_least(
    units: int, weights: tuple[int, ...], parts: list[tuple[int, int]]
) -> None:
    shares = TensorShares(weights)
    assert [shares.bounds(units, rank) for rank in range(shares.size)] == parts


def test_six_and_three_of_nine_heads() -> None:
    layer = read_shape(NINE_HEADS | {"intermediate_size": 192}).layer(0)
    shares = TensorShares((2, 1))
    assert shares.cuts(layer, 0) == {
        "self_attn.q_proj": Cut(((0, 48),), 72),
        "self_attn.k_proj": Cut(((0, 16),), 24),
        "self_attn.v_proj": Cut(((0, 16),), 24),
        "self_attn.o_proj": Cut(((0, 48),), 72, of="inputs"),
        "mlp.gate_proj": Cut(((0, 128),), 192),
        "mlp.up_proj": Cut(((0, 128),), 192),
        "mlp.down_proj": Cut(((0, 128),), 192, of="inputs"),
    }
    assert shares.cuts(layer, 1)["self_attn.q_proj"] == Cut(((48, 72),), 72)


def test_weights_that_share_a_scale_stay_together() -> None:
    layer = read_shape(tiny_config("llama", num_key_value_heads=4)).layer(0)  # heads of 8
    cuts = TensorShares((1, 1), group_size=16).cuts(layer, 1)
    assert cuts["self_attn.o_proj"].ranges == ((16, 32),)
    assert cuts["self_attn.o_proj"].scaled(2) == ((1, 2),)  # scales
    with pytest.raises(ValueError, match="share scales"):
        TensorShares((1, 1), group_size=32).cuts(layer, 1)


@pytest.mark.parametrize("family", DIVIDED)
def test_logits_of_shares_are_those_of_the_whole_model(family: str) -> None:
    check(build(FORMS[family]), read_shape(FORMS[family]), TensorShares((2, 1)))


@pytest.mark.parametrize(("name", "count"), [(name, 3 + i % 2) for i, name in enumerate(MODELS)])
def test_greedy_texts_of_three_or_four_shares(name: str, count: int) -> None:
    """Token by token. ``tests/mpi`` has some of two ranks, and of stages."""
    model, shape = build(config_of(name)), read_shape(config_of(name))
    models = [deepcopy(model) for _ in range(count)]
    mx.eval(logits_of(Slice(model, 0, shape.num_layers)))  # and what is not a parameter

    def run(transport: Transport) -> list[int]:
        part = Slice(models[transport.rank], 0, shape.num_layers)
        take_share(part, shape, shares_of(name, count), transport.rank, sum_of(transport))
        caches, new, answer = part.new_caches(), TOGETHER[0], list[int]()
        for _ in range(FEW):
            logits = part.last_logits(part.extend(mx.array([new]), caches))
            answer.append(np.array(logits).argmax().tolist())
            new = answer[-1:]
        return answer

    assert LocalNetwork(count).run(run) == [expected_texts(name)[0]] * count


MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "qwen2_moe", "glm4_moe", "llama4", "granitemoe")


@pytest.mark.parametrize("family", MIXTURES)
def test_logits_of_shares_with_whole_experts(family: str) -> None:
    model, shape = build(FORMS[family]), read_shape(FORMS[family])
    if family == "mixtral":
        model = move_trained(with_adapters(model))
    check(model, shape, TensorShares((2, 1), whole_experts=True))


def test_whole_experts_where_columns_share_scales() -> None:
    config = tiny_config("mixtral", layers=2, hidden_size=128)
    config |= {"quantization": {"group_size": 64, "bits": 4}}
    shape, shares = read_shape(config), TensorShares((1, 1), group_size=64)
    with pytest.raises(UserError) as refusal:
        shares.check(shape)
    assert "64 columns" in refusal.value.problem
    assert "--expert-parallel" in refusal.value.remedy
    shares = replace(shares, whole_experts=True)
    shares.check(shape)
    check(build(config), shape, shares)
    cuts = shares.cuts(shape.layer(0), 1)
    assert cuts["block_sparse_moe.switch_mlp.up_proj"] == Cut(((2, 4),), 4, of="experts")
    assert "block_sparse_moe.gate" not in cuts


def test_an_mlp_with_fewer_blocks_of_columns_than_ranks_is_refused() -> None:
    with pytest.raises(UserError, match="16 columns, of which 16 stay together"):
        TensorShares((1, 1)).check(read_shape(tiny_config("llama", intermediate_size=16)))


@pytest.mark.parametrize(
    ("family", "count", "problem"),
    [("llama", 2, "llama"), ("mixtral", 1, "--tensor-parallel 1"), ("mixtral", 5, "fewer")],
)
def test_experts_that_are_not_there_are_refused(family: str, count: int, problem: str) -> None:
    shape = read_shape(FORMS[family] | {"num_attention_heads": 8, "num_key_value_heads": 8})
    with pytest.raises(UserError) as refusal:
        TensorShares((1,) * count, whole_experts=True).check(shape)
    assert problem in refusal.value.problem


def test_three_shares_of_three_heads_and_adapters() -> None:
    check(build(NINE_HEADS), read_shape(NINE_HEADS), TensorShares((1, 1, 1)))
    for family in ("llama", "mixtral"):
        model = with_adapters(build(CONFIGS[family]), layers=2)
        check(model, read_shape(CONFIGS[family]), TensorShares((1, 1)))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_dora_norms_whole_rows(family: str) -> None:
    """Half of a row of the last matrices is on each rank."""
    model = move_trained(with_adapters(build(CONFIGS[family]), dora=True))
    check(model, read_shape(CONFIGS[family]), TensorShares((1, 1)))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_quantised_weights_in_whole_groups(family: str) -> None:
    quantisation = {"quantization": {"group_size": 32, "bits": 4}}
    config = tiny_config(family, layers=2, hidden_size=64, intermediate_size=96) | quantisation
    check(build(config), read_shape(config), TensorShares((2, 1), group_size=32))


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_divided_is_refused_by_name(family: str) -> None:
    with pytest.raises(UserError) as refusal:
        TensorShares((1, 1)).check(read_shape(FORMS[family]))
    assert REFUSED[family] in refusal.value.problem
    assert family in refusal.value.problem
