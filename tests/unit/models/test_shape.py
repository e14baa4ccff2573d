"""The shape of a model out of config.json: parameters as mlx-lm builds them, FLOPs by hand."""

from pathlib import Path
from typing import Any

import pytest
from mlx.utils import tree_flatten

from shardmlx.errors import UserError
from shardmlx.modelfiles.parts import read_shape
from shardmlx.modelfiles.tensors import expected_tensors, modules
from shardmlx.models.sizes.config_reader import read_config
from shardmlx.models.sizes.shape import ModelShape
from testbed.family_configs import CONFIGS
from testbed.tiny_models import build, tiny_config
from tests.helpers.refusals import refusal

SUPPORTED = ("mistral", "llama", "qwen2", "qwen3")

SLIDING: dict[str, Any] = {
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "sliding_window": 8,
}


def configuration(model_type: str, **changes: Any) -> dict[str, Any]:
    sizes = {"intermediate_size": 48, "vocab_size": 64}
    return tiny_config(model_type, layers=3, **{**sizes, **changes})


# Parameters


@pytest.mark.parametrize(
    "config",
    [
        *(configuration(name, tie_word_embeddings=True) for name in SUPPORTED),
        configuration("mistral", head_dim=16),
        configuration("llama", num_key_value_heads=None, **SLIDING),
        configuration("qwen2", head_dim=16),  # which mlx-lm passes over
    ],
    ids=lambda config: config["model_type"],
)
def test_parameters_are_counted_as_mlx_lm_builds_them(config: dict[str, Any]) -> None:
    parameters: dict[str, Any] = dict(tree_flatten(build(config).parameters()))
    shape = ModelShape.from_config(config)
    assert expected_tensors(modules(shape), lambda *_: None) == {
        name: array.shape for name, array in parameters.items()
    }
    assert shape.parameters() == sum(array.size for array in parameters.values())


# FLOPs


def test_a_layer_costs_its_matrix_products_and_its_causal_attention() -> None:
    shape = ModelShape.from_config(configuration("llama"))
    projections = 32 * 32 + 32 * 16 + 32 * 16 + 32 * 32  # q, k, v, o
    attention = 2 * 32 * (1 + 2 + 3 + 4) / 4  # scores and values over the tokens seen
    mlp = 3 * 32 * 48
    assert shape.layer(0).flops(4) == 2 * (projections + attention + mlp)
    assert shape.head_flops() == 2 * 32 * 64


def test_a_sliding_layer_sees_no_more_than_its_window() -> None:
    shape = ModelShape.from_config(configuration("llama", **SLIDING))
    seen_less = (36 - (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8)) / 8
    assert shape.layer(1).flops(8) == shape.layer(0).flops(8) + seen_less
    full, sliding = (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9 + 10) / 10, (36 + 8 + 8) / 10
    difference = shape.layer(0).flops(10) - shape.layer(1).flops(10)
    assert difference == pytest.approx(2 * 2 * 32 * (full - sliding))


def test_a_token_pays_for_its_experts_and_the_router() -> None:
    sparse = read_shape(configuration("mixtral"))
    dense = ModelShape.from_config(configuration("llama"))
    expert, router = 2 * 3 * 32 * 48, 2 * 32 * 4
    assert sparse.layer(0).flops(4) == dense.layer(0).flops(4) + expert + router


# Fields


def test_a_window_without_layer_types_is_passed_over_as_in_mlx_lm() -> None:
    shape = ModelShape.from_config(configuration("mistral", sliding_window=4096))
    assert shape.windows == (None, None, None)
    assert ModelShape.from_config(configuration("mistral", **SLIDING)).windows == (None, 8, 8)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 2**70}, "num_hidden_layers is 1180591620717411303424"),
        ({"intermediate_size": 2**31}, "intermediate_size is 2147483648"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"num_attention_heads": 5}, "num_attention_heads 5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": ["sliding_attention"] * 3}, "no layer is of type full_attention"),
        ({"layer_types": ["full_attention", "x", "x"]}, "layer_types names 'x'"),
        ({**SLIDING, "sliding_window": None}, "sliding_window is None"),
    ],
)
def test_a_bad_field_is_named(changes: dict[str, Any], named: str) -> None:
    assert named in refusal(ModelShape.from_config, configuration("llama") | changes).problem


def test_a_missing_field_is_named() -> None:
    config = configuration("qwen3")
    del config["tie_word_embeddings"]
    with pytest.raises(UserError, match="tie_word_embeddings is missing: it must be true or false"):
        ModelShape.from_config(config)
    config = configuration("llama")
    del config["vocab_size"]
    assert "vocab_size is missing" in str(refusal(ModelShape.from_config, config))
    with pytest.raises(UserError, match="hidden_size is '32': it must be a whole number above 0"):
        read_shape(configuration("mixtral", hidden_size="32"))


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("number", [-1, 0, 5, "2"])
def test_a_token_passes_through_some_of_the_experts(model_type: str, number: Any) -> None:
    config = {**CONFIGS[model_type], "num_experts_per_tok": number}
    named = f"num_experts_per_tok is {number!r}"
    assert named in refusal(read_shape, config).problem
    assert named in refusal(read_shape, {"model_type": "x", "text_config": config}).problem


@pytest.mark.parametrize("key", ["n_group", "num_key_value_heads"])
def test_a_count_by_which_mlx_lm_divides_is_not_0(key: str) -> None:
    config = {**CONFIGS["mixtral"], key: 0}
    assert f"{key} is 0" in refusal(read_shape, config).problem
    assert f"{key} is 0" in refusal(read_shape, {"model_type": "x", "text_config": config}).problem


# Reading config.json


def test_a_window_tells_layers_apart_where_texts_are_longer() -> None:
    shape = ModelShape.from_config(configuration("llama", **SLIDING))  # of 8
    assert shape.unlike_layers(8)[1] == (0, 0, 0)
    assert shape.unlike_layers(9)[1] == (0, 1, 1)
    assert read_shape(configuration("mixtral")).unlike_layers(9)[1] == (0, 0, 0)


@pytest.mark.parametrize("text", [None, b'{"model_type": ', b"\xff\xfe", b"[]"])
def test_a_missing_or_broken_config_is_named(tmp_path: Path, text: bytes | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text)
    caught = refusal(read_config, tmp_path)
    assert str(tmp_path) in caught.problem
    assert "config.json" in caught.problem


def test_a_missing_model_directory_is_named(tmp_path: Path) -> None:
    assert "nowhere" in str(refusal(read_config, tmp_path / "nowhere"))
