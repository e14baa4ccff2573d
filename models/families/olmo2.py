"""OLMo 2: norms behind attention and MLP, and of all heads at once."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    LayerShape,
    grouped_attention,
    head_dim,
    kv_heads,
    layer_of,
    swiglu,
)

NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike."""
    hidden = config.count("hidden_size")
    bias = config.switch("attention_bias", False)
    attention = grouped_attention(
        config, head_dim(config), kv_heads(config), bias=bias, output_bias=bias, norms="whole"
    )
    mlp = swiglu(hidden, config.count("intermediate_size"), bias=config.switch("mlp_bias", False))
    layer = layer_of(hidden, attention, mlp, norms=NORMS)
    return [layer] * config.count("num_hidden_layers")


FAMILY = Family(layers=layers, dropped=r"self_attn\.rotary_emb\.inv_freq")
