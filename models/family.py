"""Describe a model family for planning and loading: a row of a table. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shardmlx.models.sizes.config_reader import Config, Fact
from shardmlx.models.sizes.layer_kinds import Windows, no_windows
from shardmlx.models.sizes.layer_shape import (
    NORMS,
    SWIGLU,
    Activation,
    Heads,
    LayerShape,
    Linear,
    Norm,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models: the facts for planning and loading, that is, the columns of its row.

    Its layers have attention whose queries share keys and values in groups, and a gated MLP."""

    takes_head_dim: bool = True
    """False if mlx-lm ignores ``head_dim``: a head then has hidden size by heads."""
    bias: Fact = False
    """True if the matrices of attention have biases."""
    output_bias: Fact | None = None
    """Bias of the last of these; None for the same."""
    norms_heads: bool = False
    """True if each head of queries and keys is normed, all with one weight."""
    mlp_bias: Fact = False
    windows: Callable[[Config], Windows] = no_windows
    """Rule that tells which layers see a window."""
    norms: tuple[str, ...] = NORMS
    activation: Activation = SWIGLU
    scores: int = 1
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of mlx-lm for fields missing in config.json, or in its text model."""
    tied: Literal["always", "by default", "as said"] = "by default"
    """Condition for the embedding to be the lm_head; ``as said`` needs the field."""
    norm_bias: bool = False
    """True if the final norm has a bias."""
    head_has_bias: bool = False
    takes_pieces: bool = True
    """False if attention adds something to its scores that pieces do not support."""
    takes_packed: bool = True
    """False if a layer uses a position in the row for more than the order of tokens."""
    takes_batches: bool = True
    """False if mlx-lm's layers generate with one sequence at a time."""
    takes_cuts: bool = True
    """False if a layer keeps a state, which cannot be cut to a beginning of the sequence."""
    text_type: str = ""
    """The ``model_type`` of the ``text_config`` with its own family; empty if there is none."""
    text_takes: tuple[str, ...] = ()
    """Fields that the text model takes from the outer config.json, over its own."""

    def layers(self, config: Config) -> Sequence[LayerShape]:
        """Return the sizes of each layer; layers with one window are the same object. Raises
        ``UserError`` for an impossible field of ``config``."""
        windows = self.windows(config)
        kinds = {window: self._layer(config, window) for window in {*windows}}
        return [kinds[window] for window in windows]

    def _layer(self, config: Config, window: int | None) -> LayerShape:
        hidden = config.count("hidden_size")
        heads = config.count("num_attention_heads")
        width = config.count("intermediate_size")
        mlp_bias = config.holds(self.mlp_bias)
        if self.takes_head_dim and config.get("head_dim") is not None:
            dim = config.count("head_dim")
        else:
            dim = config.share("hidden_size", "num_attention_heads")
        groups = heads
        if config.get("num_key_value_heads") is not None:
            groups //= config.share("num_attention_heads", "num_key_value_heads")
        queries = heads * dim
        keys = groups * dim
        bias = config.holds(self.bias)
        output_bias = bias if self.output_bias is None else config.holds(self.output_bias)
        linears = {
            "self_attn.q_proj": Linear("attention", hidden, queries, bias),
            "self_attn.k_proj": Linear("attention", hidden, keys, bias),
            "self_attn.v_proj": Linear("attention", hidden, keys, bias),
            "self_attn.o_proj": Linear("values", queries, hidden, output_bias),
            "mlp.gate_proj": Linear("mlp", hidden, width, mlp_bias),
            "mlp.up_proj": Linear("mlp", hidden, width, mlp_bias),
            "mlp.down_proj": Linear("product of mlp", width, hidden, mlp_bias),
        }
        norms = {name: Norm(hidden, hidden) for name in self.norms}
        if self.norms_heads:
            norms["self_attn.q_norm"] = Norm(dim, queries)
            norms["self_attn.k_norm"] = Norm(dim, keys)
        return LayerShape(
            linears=tuple(linears.items()),
            norms=tuple(norms.items()),
            heads=Heads(heads, groups, dim, dim, 2 * keys),
            window=window,
            activation=self.activation,
            scores=self.scores,
        )


@dataclass(frozen=True, slots=True)
class HeadNames:
    """The modules of a head for further tokens, by their names after its ``prefix``; the other
    names are those of a layer. In the prefix ``{}`` is the number of the model's layers.

    The head takes hidden states ``after_norm``, the final one, or as they leave the last layer.
    Its projection takes them before the token if ``states_first``.
    """

    prefix: str
    token_norm: str
    state_norm: str
    projection: str
    final_norm: str
    states_first: bool = False
    after_norm: bool = True


APPROXIMATE = (
    "no row of models/families.py declares this model: layers and their bytes are exact, times and "
    "the memory of activations approximate"
)
