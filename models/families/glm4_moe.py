"""GLM-4.5 and 4.6, and Solar Open: a router that chooses by corrected scores."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import LayerShape, grouped_attention
from shardmlx.models.mixture_blocks import routed_layers


def layers(config: Config) -> list[LayerShape]:
    """Return layers of which the first are dense."""
    attention = grouped_attention(
        config,
        config.count("head_dim"),
        config.count("num_key_value_heads"),
        bias=config.switch("attention_bias", False),
        norms="head" if config.switch("use_qk_norm", False) else "",
    )
    return routed_layers(config, attention)


FAMILY = Family(
    layers=layers,
    model_types=("solar_open",),
    tied=False,
    is_tied_by_config=False,
    drops_further_layers=True,
)
