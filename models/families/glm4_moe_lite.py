"""GLM-4.7 Flash: latent attention, and experts after the first layer."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import LayerShape
from shardmlx.models.mixture_blocks import latent_attention, routed_layers


def layers(config: Config) -> list[LayerShape]:
    """Return layers of latent attention, of which the first are dense."""
    first = config.get("first_k_dense_replace", 1)
    fields = Config({**config.fields, "first_k_dense_replace": first})
    return routed_layers(fields, latent_attention(config, absorbed=True))


FAMILY = Family(
    layers=layers,
    tied=False,
    is_tied_by_config=False,
    drops_further_layers=True,
    takes_pieces=False,
    stored_otherwise=r"\.kv_b_proj\.",
)
