"""InternLM3: rotary embedding that changes with the length."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    LayerShape,
    grouped_attention,
    kv_heads,
    layer_of,
    swiglu,
)


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike."""
    hidden, bias = config.count("hidden_size"), config.switch("qkv_bias", False)
    dim = config.share("hidden_size", "num_attention_heads")
    attention = grouped_attention(config, dim, kv_heads(config), bias=bias, output_bias=bias)
    mlp = swiglu(hidden, config.count("intermediate_size"), bias=config.switch("bias", False))
    return [layer_of(hidden, attention, mlp)] * config.count("num_hidden_layers")


FAMILY = Family(
    layers=layers,
    tied=False,
    dropped=r"attention\.rope\.inv_freq",
    takes_packed=False,
    takes_batches=False,
)
