"""DeepSeek-V2: latent attention, whose cache keeps keys and values all the same."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import LayerShape
from shardmlx.models.mixture_blocks import latent_attention, routed_layers


def layers(config: Config) -> list[LayerShape]:
    """Return layers of latent attention, of which the first are dense."""
    return routed_layers(config, latent_attention(config, absorbed=False), correction="")


FAMILY = Family(layers=layers, tied=False, is_tied_by_config=False)
