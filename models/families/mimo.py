"""MiMo: biases of queries, keys and values; mlx-lm ignores layers that predict more tokens."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    LayerShape,
    grouped_attention,
    layer_of,
    swiglu,
)


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike."""
    hidden = config.count("hidden_size")
    dim = config.share("hidden_size", "num_attention_heads")
    attention = grouped_attention(config, dim, config.count("num_key_value_heads"), bias=True)
    mlp = swiglu(hidden, config.count("intermediate_size"))
    return [layer_of(hidden, attention, mlp)] * config.count("num_hidden_layers")


FAMILY = Family(
    layers=layers,
    tied=False,
    dropped=r"self_attn\.rotary_emb\.inv_freq|^model\.mtp_layers\.",
)
