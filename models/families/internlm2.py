"""InternLM2 and 2.5: queries, keys and values of one matrix, names of their own."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    LayerShape,
    fused,
    grouped_attention,
    kv_heads,
    layer_of,
    swiglu,
)


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike."""
    hidden, bias = config.count("hidden_size"), config.switch("bias", True)
    dim = config.share("hidden_size", "num_attention_heads")
    attention = fused(
        grouped_attention(
            config,
            dim,
            kv_heads(config),
            bias=bias,
            output_bias=bias,
            path="attention",
            output="wo",
        ),
        path="attention",
        name="wqkv",
    )
    width = config.count("intermediate_size")
    mlp = swiglu(hidden, width, path="feed_forward", names=("w1", "w3", "w2"))
    layer = layer_of(hidden, attention, mlp, norms=("attention_norm", "ffn_norm"))
    return [layer] * config.count("num_hidden_layers")


FAMILY = Family(
    layers=layers,
    tied=False,
    embedding="tok_embeddings",
    head="output",
    dropped=r"attention\.rope\.inv_freq",
)
