"""StableLM: LayerNorm, part of each head turned; in the 12B attention beside the MLP."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    NORMS,
    LayerShape,
    Norm,
    grouped_attention,
    layer_of,
    swiglu,
)


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike."""
    hidden, is_parallel = config.count("hidden_size"), config.switch("use_parallel_residual")
    dim, groups = (
        config.share("hidden_size", "num_attention_heads"),
        config.count("num_key_value_heads"),
    )
    attention = grouped_attention(config, dim, groups, bias=config.switch("use_qkv_bias"))
    if config.switch("qk_layernorm"):
        heads = {"q": config.count("num_attention_heads"), "k": groups}
        norms = {
            f"self_attn.{name}_layernorm.norms.{i}": Norm(dim, dim)
            for name, count in heads.items()
            for i in range(count)
        }
        attention = attention._replace(block=attention.block._replace(norms=norms))
    source = "attention" if is_parallel else "mlp"
    mlp = swiglu(hidden, config.count("intermediate_size"), source=source)
    layer = layer_of(
        hidden, attention, mlp, norms=NORMS[:1] if is_parallel else NORMS, norm_bias=True
    )
    return [layer] * config.count("num_hidden_layers")


FAMILY = Family(
    layers=layers,
    defaults={"use_parallel_residual": False, "qk_layernorm": False},
    tied=False,
    is_tied_by_config=False,
    final_norm_has_bias=True,
)
