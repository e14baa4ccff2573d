"""MiniMax M2: norms of all heads at once, and a router that chooses by corrected scores."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import LayerShape, grouped_attention, head_dim, layer_of
from shardmlx.models.mixture_blocks import expert_mlps


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike."""
    attention = grouped_attention(
        config,
        head_dim(config),
        config.count("num_key_value_heads"),
        norms="whole" if config.switch("use_qk_norm", True) else "",
    )
    mlp = expert_mlps(
        config,
        config.count("intermediate_size"),
        "num_local_experts",
        "num_experts_per_tok",
        path="block_sparse_moe",
        stored=("w1", "w3", "w2"),
        correction="e_score_correction_bias",
    )
    hidden = config.count("hidden_size")
    return [layer_of(hidden, attention, mlp)] * config.count("num_hidden_layers")


FAMILY = Family(layers=layers, model_types=("minimax_m2",), tied=False, dropped="weight_scale_inv")
