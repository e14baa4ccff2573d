"""Command R: attention beside the MLP, both of one norm."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    LayerShape,
    Norm,
    grouped_attention,
    layer_of,
    swiglu,
)


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike."""
    hidden, bias = config.count("hidden_size"), config.switch("attention_bias")
    config.only("layer_norm_bias", False)
    dim, groups = (
        config.share("hidden_size", "num_attention_heads"),
        config.count("num_key_value_heads"),
    )
    attention = grouped_attention(config, dim, groups, bias=bias, output_bias=bias)
    if config.switch("use_qk_norm"):
        # A weight for each element of each head.
        heads = config.count("num_attention_heads")
        norms = {
            "self_attn.q_norm": Norm(dim, heads * dim, heads=heads),
            "self_attn.k_norm": Norm(dim, groups * dim, heads=groups),
        }
        attention = attention._replace(block=attention.block._replace(norms=norms))
    # The MLP shares the norm's output with attention.
    mlp = swiglu(hidden, config.count("intermediate_size"), source="attention")
    layer = layer_of(hidden, attention, mlp, norms=("input_layernorm",))
    return [layer] * config.count("num_hidden_layers")


FAMILY = Family(
    layers=layers,
    defaults={
        "hidden_size": 8192,
        "num_hidden_layers": 40,
        "intermediate_size": 22528,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "vocab_size": 256000,
        "attention_bias": False,
        "use_qk_norm": False,
    },
    is_tied_by_config=False,
)
