"""GLM-4 of 2025: four norms in a layer, gate and up projection as one matrix."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    LayerShape,
    fused_swiglu,
    grouped_attention,
    layer_of,
)

NORMS = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike."""
    hidden = config.count("hidden_size")
    attention = grouped_attention(
        config,
        config.count("head_dim"),
        config.count("num_key_value_heads"),
        bias=config.switch("attention_bias"),
    )
    mlp = fused_swiglu(hidden, config.count("intermediate_size"))
    layer = layer_of(hidden, attention, mlp, norms=NORMS)
    return [layer] * config.count("num_hidden_layers")


FAMILY = Family(layers=layers, tied=False, is_tied_by_config=False)
