"""Phi-1.5 and Phi-2: attention beside an MLP without a gate, biases everywhere."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    GELU_APPROX,
    LayerShape,
    grouped_attention,
    kv_heads,
    layer_of,
    plain_mlp,
)


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike."""
    hidden = config.count("hidden_size")
    dim = config.share("hidden_size", "num_attention_heads")
    attention = grouped_attention(
        config, dim, kv_heads(config), bias=True, output_bias=True, output="dense"
    )
    # The MLP shares the norm's output with attention.
    mlp = plain_mlp(
        hidden,
        config.count("intermediate_size"),
        names=("fc1", "fc2"),
        bias=True,
        source="attention",
    )
    layer = layer_of(
        hidden,
        attention,
        mlp,
        norms=("input_layernorm",),
        norm_bias=True,
        activation=GELU_APPROX.without_gate,
    )
    return [layer] * config.count("num_hidden_layers")


FAMILY = Family(
    layers=layers,
    defaults={
        "vocab_size": 51200,
        "hidden_size": 2560,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 10240,
    },
    tied=False,
    is_tied_by_config=False,
    final_norm="final_layernorm",
    final_norm_has_bias=True,
    head_has_bias=True,
)
