"""Apertus: an activation with parameters of its own, norms of each head."""

from __future__ import annotations

from dataclasses import replace

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    Activation,
    LayerShape,
    grouped_attention,
    layer_of,
    plain_mlp,
)


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike."""
    hidden = config.count("hidden_size")
    dim = config.share("hidden_size", "num_attention_heads")
    attention = grouped_attention(config, dim, config.count("num_key_value_heads"), norms="head")
    mlp = plain_mlp(hidden, config.count("intermediate_size"), bias=config.switch("mlp_bias"))
    activation = {f"mlp.act_fn.{name}": () for name in ("alpha_n", "alpha_p", "beta", "eps")}
    mlp = mlp._replace(block=mlp.block._replace(arrays=activation))
    norms = ("attention_layernorm", "feedforward_layernorm")
    layer = layer_of(hidden, attention, mlp, norms=norms, activation=Activation(0.35))
    # The gradients of alpha sum over as many numbers.
    layer = replace(layer, activation_weights=(2, 4), passing=4)
    return [layer] * config.count("num_hidden_layers")


FAMILY = Family(layers=layers, tied=None)
