"""Mistral 4: latent attention, of queries that are scaled by their position."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import LayerShape
from shardmlx.models.mixture_blocks import latent_attention, routed_layers


def layers(config: Config) -> list[LayerShape]:
    """Return layers of latent attention, of which the first may be dense."""
    attention = latent_attention(config, absorbed=True)
    return routed_layers(config, attention, router_is_array=False, correction="")


FAMILY = Family(
    layers=layers,
    tied=False,
    # Scales of weights in fp8, which mlx-lm multiplies in.
    dropped=r"rotary_emb\.inv_freq|activation_scale$|_scale_inv$",
    stored_otherwise=r"\.kv_b_proj\.",
)
