"""ERNIE 4.5 MoE: some layers of experts, beside which some are shared."""

from __future__ import annotations

from collections.abc import Callable

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import LayerShape, grouped_attention, head_dim, layer_of, swiglu
from shardmlx.models.mixture_blocks import expert_mlps, with_shared


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are dense where config.json says so."""
    hidden, dense = config.count("hidden_size"), config.count("intermediate_size")
    bias, count = config.switch("use_bias"), config.count("num_hidden_layers")
    attention = grouped_attention(
        config, head_dim(config), config.count("num_key_value_heads"), bias=bias, output_bias=bias
    )
    width = config.number("moe_intermediate_size", 0) or dense
    counted = Config({**config.fields, "moe_k": config.get("moe_k", 1)})
    experts = expert_mlps(counted, width, "moe_num_experts", "moe_k", bias=bias)
    if shared := config.number("moe_num_shared_experts", 0):
        path = "mlp.shared_experts"
        experts = with_shared(experts, swiglu(hidden, width * shared, path=path, bias=bias))
    first = _edge(config, "moe_layer_start_index", 0, min)
    last = _edge(config, "moe_layer_end_index", count, max)
    step = config.count("moe_layer_interval", 1)
    sparse = layer_of(hidden, attention, experts)
    plain = layer_of(hidden, attention, swiglu(hidden, dense, bias=bias))
    return [sparse if first <= i <= last and (i + 1) % step == 0 else plain for i in range(count)]


def _edge(config: Config, key: str, default: int, choose: Callable[[list[int]], int]) -> int:
    """Return a layer; given one for texts and one for images, the one that ``choose`` takes."""
    value = config.get(key, default)
    return choose(value) if isinstance(value, list) else int(value)


FAMILY = Family(
    layers=layers,
    tied=None,
    dropped=r"mtp_(block|linear_proj|hidden_norm|emb_norm)\.|e_score_correction_bias",
)
