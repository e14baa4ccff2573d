"""DeepSeek-V3, and Kimi K2, which mlx-lm builds of the same file."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import LayerShape
from shardmlx.models.mixture_blocks import latent_attention, routed_layers


def layers(config: Config) -> list[LayerShape]:
    """Return layers of latent attention, of which the first are dense."""
    return routed_layers(config, latent_attention(config, absorbed=True))


FAMILY = Family(
    layers=layers,
    model_types=("joyai_llm_flash", "kimi_k2"),
    tied=False,
    is_tied_by_config=False,
    # The layer after the last predicts one token more; scales of weights in fp8 are multiplied in.
    dropped=r"\bmodel\.layers\.61|rotary_emb\.inv_freq|weight_scale_inv",
    takes_pieces=False,
    stored_otherwise=r"\.kv_b_proj\.",
)
