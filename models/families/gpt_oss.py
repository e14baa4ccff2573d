"""gpt-oss: every other layer has a window, each head a sink, and everything a bias."""

from __future__ import annotations

from dataclasses import replace

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    FULL,
    WINDOWED,
    Activation,
    LayerShape,
    grouped_attention,
    layer_of,
    windows,
)
from shardmlx.models.mixture_blocks import expert_mlps


def layers(config: Config) -> list[LayerShape]:
    """Return layers of experts, of which some see a window."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    attention = grouped_attention(
        config,
        config.count("head_dim"),
        config.count("num_key_value_heads"),
        bias=True,
        output_bias=True,
    )
    block = attention.block._replace(arrays={"self_attn.sinks": (heads,)})
    mlp = expert_mlps(
        config,
        config.count("intermediate_size"),
        "num_local_experts",
        "num_experts_per_tok",
        stack="experts",
        stored=(),
        bias=True,
        router="router",
        router_bias=True,
    )
    pairs = [WINDOWED, FULL] * (config.count("num_hidden_layers") // 2)
    kinds = Config({**config.fields, "layer_types": config.get("layer_types", pairs)})
    return [
        replace(
            layer_of(hidden, attention._replace(block=block), mlp, window=window),
            # Clipped gate and up, up again plus one, and the arrays of swiglu.
            activation=Activation(5),
            passing=3,
            # The sink's share of the scores.
            score_weights=1,
        )
        for window in windows(kinds)
    ]


FAMILY = Family(
    layers=layers,
    tied=False,
    is_tied_by_config=False,
    chooses_caches=True,
    rounds_yarn=True,
    stored_otherwise=r"\.experts\.gate_up_proj",
)
