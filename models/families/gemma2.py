"""Gemma 2: soft caps of attention's scores and of logits."""

from __future__ import annotations

from shardmlx.models.config_reader import Config
from shardmlx.models.family import Family
from shardmlx.models.layer_shape import (
    GELU_APPROX,
    LayerShape,
    grouped_attention,
    layer_of,
    swiglu,
)

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def layers(config: Config) -> list[LayerShape]:
    """Return layers that are all alike; mlx-lm ignores the windows of every other one."""
    hidden = config.count("hidden_size")
    attention = grouped_attention(
        config, config.count("head_dim"), config.count("num_key_value_heads")
    )
    mlp = swiglu(hidden, config.count("intermediate_size"))
    layer = layer_of(
        hidden,
        attention,
        mlp,
        norms=NORMS,
        activation=GELU_APPROX,
        # Probabilities, and the tanh of scores.
        scores=2,
    )
    return [layer] * config.count("num_hidden_layers")


FAMILY = Family(
    layers=layers,
    is_tied_by_config=False,
    takes_pieces=False,
    # mlx-lm mistakes the rows of a batch's mask for heads.
    takes_batches=False,
)
