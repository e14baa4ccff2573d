"""Declare a model family for planning and loading. No MLX, no MPI."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardmlx.models.config_reader import Config
from shardmlx.models.layer_shape import LayerShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models: the facts for planning and loading.

    ``layers`` gives the sizes of each layer of a config.json. ``model_types`` are other names.
    """

    layers: Callable[[Config], Sequence[LayerShape]]
    model_types: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of mlx-lm for fields missing in config.json, or in its text model."""
    tied: bool | None = True
    """True if the embedding is the lm_head by default; None if config.json must say so."""
    is_tied_by_config: bool = True
    """False if config.json does not decide it."""
    embedding: str = "embed_tokens"
    """Name of the embedding, in ``model``."""
    final_norm: str = "norm"
    """Name of the final norm, in ``model``."""
    final_norm_has_bias: bool = False
    head: str = "lm_head"
    """Path of a separate lm_head."""
    head_has_bias: bool = False
    dropped: str | None = None
    """Pattern of the names of tensors that mlx-lm ignores."""
    drops_further_layers: bool = False
    """True if mlx-lm ignores layers after the last, which predict more tokens."""
    renames: tuple[tuple[str, str], ...] = ()
    """Prefixes that mlx-lm replaces as it loads, with replacements: the first match counts."""
    stored_otherwise: str | None = None
    """Pattern of names in Hugging Face's files whose tensors mlx-lm cuts or joins."""
    chooses_caches: bool = False
    """True if mlx-lm's model makes its KV caches itself, and ignores ``--max-kv-size``."""
    takes_pieces: bool = True
    """False if attention adds something to its scores that pieces do not support."""
    takes_packed: bool = True
    """False if a layer uses a position in the row for more than the order of tokens."""
    takes_batches: bool = True
    """False if mlx-lm's layers generate with one sequence at a time."""
    rounds_yarn: bool = False
    """True if mlx-lm rounds yarn's limits although config.json has ``truncate`` false."""
    has_gguf: bool = False
    """True if mlx-lm can write it as GGUF."""
    text: str | None = None
    """Field of config.json with the text model, which has its own family."""
    text_types: tuple[str, ...] = ()
    """Each ``model_type`` of a text model that mlx-lm looks for."""
    text_default: str = ""
    """The text model's ``model_type`` if it is none of these."""
    text_takes: tuple[str, ...] = ()
    """Fields that the text model takes from the outer config.json, over its own."""
    prefix: str = ""
    """Prefix of the names of all tensors."""

    def drops(self, name: str) -> bool:
        """Return whether mlx-lm ignores a tensor of this name when it loads the model."""
        return self.dropped is not None and re.search(self.dropped, name) is not None
