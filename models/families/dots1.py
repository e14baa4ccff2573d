"""dots.llm1: norms of each head, and a router that chooses by corrected scores."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import LayerShape, grouped_attention, head_dim
from shardmlx.models.mixture_blocks import routed_layers


def layers(config: Config) -> list[LayerShape]:
    """Return layers of which the first are dense."""
    attention = grouped_attention(
        config, head_dim(config), config.count("num_key_value_heads"), norms="head"
    )
    return routed_layers(config, attention, stack="experts")


FAMILY = Family(layers=layers, tied=False, dropped=r"rotary_emb\.inv_freq")
