"""StarCoder 2: LayerNorm, an MLP without a gate, biases everywhere."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    GELU,
    LayerShape,
    grouped_attention,
    layer_of,
    plain_mlp,
)


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike."""
    hidden = config.count("hidden_size")
    dim = config.share("hidden_size", "num_attention_heads")
    attention = grouped_attention(
        config, dim, config.count("num_key_value_heads"), bias=True, output_bias=True
    )
    mlp = plain_mlp(hidden, config.count("intermediate_size"), names=("c_fc", "c_proj"), bias=True)
    layer = layer_of(hidden, attention, mlp, norm_bias=True, activation=GELU.without_gate)
    return [layer] * config.count("num_hidden_layers")


FAMILY = Family(layers=layers, defaults={"vocab_size": 49152}, final_norm_has_bias=True)
