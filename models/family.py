"""Describe a model family for planning and loading: a row of a table. No MLX, no MPI."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardmlx.models.blocks import Experts, Grouped, gated_mlp
from shardmlx.models.config_reader import Config, Fact
from shardmlx.models.layer_kinds import Windows, all_layers, no_windows
from shardmlx.models.layer_shape import NORMS, SWIGLU, Activation, LayerShape, Norm

_GROUPED = Grouped()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models: the facts for planning and loading, that is, the columns of its row."""

    attention: Callable[[Config], LayerShape] = _GROUPED
    mlp_bias: Fact = False
    experts: Experts | None = None
    sparse: Callable[[Config], Sequence[bool]] = all_layers
    """Rule that tells which layers have experts in place of the MLP."""
    windows: Callable[[Config], Windows] = no_windows
    """Rule that tells which layers see a window."""
    norms: tuple[str, ...] = NORMS
    arrays: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Sides of further arrays of a layer by path, each as the field with its length."""
    activation: Activation = SWIGLU
    scores: int = 1
    score_weights: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of mlx-lm for fields missing in config.json, or in its text model."""
    tied: Literal["always", "never", "by default", "if said", "as said"] = "by default"
    """Condition for the embedding to be the lm_head; ``as said`` needs the field."""
    norm_bias: bool = False
    """True if the final norm has a bias."""
    head_has_bias: bool = False
    dropped: str | None = None
    """Pattern of the names of tensors that mlx-lm ignores."""
    drops_further_layers: bool = False
    """True if mlx-lm ignores layers after the last, which predict more tokens."""
    renames: tuple[tuple[str, str], ...] = ()
    """Prefixes that mlx-lm replaces as it loads, with replacements: the first match counts."""
    takes_pieces: bool = True
    """False if attention adds something to its scores that pieces do not support."""
    takes_packed: bool = True
    """False if a layer uses a position in the row for more than the order of tokens."""
    takes_batches: bool = True
    """False if mlx-lm's layers generate with one sequence at a time."""
    takes_cuts: bool = True
    """False if a layer keeps a state, which cannot be cut to a beginning of the sequence."""
    rounds_yarn: bool = False
    """True if mlx-lm rounds yarn's limits although config.json has ``truncate`` false."""
    text_default: str = ""
    """The ``model_type`` of the ``text_config`` with its own family; empty if there is none."""
    text_types: tuple[str, ...] = ()
    """Types of text models that mlx-lm looks for beside it."""
    text_takes: tuple[str, ...] = ()
    """Fields that the text model takes from the outer config.json, over its own."""

    @property
    def chooses_caches(self) -> bool:
        """True if mlx-lm's model makes its KV caches itself, and ignores ``--max-kv-size``."""
        return self.windows is not no_windows

    def drops(self, name: str) -> bool:
        """Return whether mlx-lm ignores a tensor of this name when it loads the model."""
        return self.dropped is not None and re.search(self.dropped, name) is not None

    def layers(self, config: Config) -> Sequence[LayerShape]:
        windows = self.windows(config)
        sparse = [False] * len(windows) if self.experts is None else self.sparse(config)
        kinds = {kind: self._layer(config, *kind) for kind in {*zip(sparse, windows, strict=True)}}
        return [kinds[kind] for kind in zip(sparse, windows, strict=True)]

    def _layer(self, config: Config, has_experts: bool, window: int | None) -> LayerShape:
        hidden, attention = config.count("hidden_size"), self.attention(config)
        if has_experts and self.experts is not None:
            mlp = self.experts(config)
        else:
            linears = gated_mlp(config, bias=config.holds(self.mlp_bias))
            mlp = LayerShape(linears=tuple(linears.items()))
        norms = {name: Norm(hidden, hidden) for name in self.norms}
        arrays = {path: tuple(map(config.count, fields)) for path, fields in self.arrays.items()}
        return replace(
            attention,
            linears=attention.linears + mlp.linears,
            norms=(*norms.items(), *attention.norms),
            arrays=(*arrays.items(), *mlp.arrays),
            window=window,
            activation=self.activation,
            scores=self.scores,
            score_weights=self.score_weights,
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


UNDECLARED = Family(takes_pieces=False, takes_packed=False, takes_batches=False)
"""The family of undeclared models, which assumes nothing."""

APPROXIMATE = (
    "no row of models/families.py declares this model: layers and their bytes are exact, times and "
    "the memory of activations approximate"
)
