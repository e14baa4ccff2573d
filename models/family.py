"""Declare a model family: what planning and loading must know of it. No MLX, no MPI."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardmlx.models.config_reader import Config
from shardmlx.models.layer_shape import LayerShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models, as far as planning and loading must know it.

    ``layers`` are the sizes of each layer, of a config.json. ``model_types`` are other names of it.
    """

    layers: Callable[[Config], Sequence[LayerShape]]
    model_types: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields as mlx-lm takes them where config.json does not have them; a text model's in it."""
    tied: bool | None = True
    """True if the embedding is the lm_head too, where config.json does not say; None if it must."""
    is_tied_by_config: bool = True
    """False where config.json has no say in that."""
    embedding: str = "embed_tokens"
    """Name of the embedding, in ``model``."""
    final_norm: str = "norm"
    """Name of the final norm, in ``model``."""
    final_norm_has_bias: bool = False
    head: str = "lm_head"
    """Path of the lm_head where it is not the embedding."""
    head_has_bias: bool = False
    dropped: str | None = None
    """Pattern of the names of tensors that mlx-lm passes over."""
    drops_further_layers: bool = False
    """True if mlx-lm passes over layers after the last: those that predict more tokens."""
    renames: tuple[tuple[str, str], ...] = ()
    """Beginnings of names that mlx-lm changes as it loads, and what it puts in their place: the
    first that fits."""
    stored_otherwise: str | None = None
    """Pattern of names that only Hugging Face's tensors have, where mlx-lm cuts or joins them."""
    chooses_caches: bool = False
    """True if mlx-lm's model makes its KV caches itself, and passes over ``--max-kv-size``."""
    takes_pieces: bool = True
    """False where attention adds to its scores something that pieces do not know."""
    takes_packed: bool = True
    """False where a position in the row is more to a layer than the order of tokens."""
    takes_batches: bool = True
    """False where mlx-lm's layers generate with one sequence at a time."""
    rounds_yarn: bool = False
    """True where mlx-lm rounds the limits of yarn although its models say ``truncate`` false."""
    has_gguf: bool = False
    """True if mlx-lm can write it as GGUF."""
    text: str | None = None
    """Field of config.json that holds the text model, which then is a family of its own."""
    text_types: tuple[str, ...] = ()
    """Each ``model_type`` of a text model that mlx-lm looks for."""
    text_default: str = ""
    """The text model's ``model_type`` where it is none of these."""
    text_takes: tuple[str, ...] = ()
    """Fields that the text model takes from around it, whatever it says itself."""
    prefix: str = ""
    """Beginning of the names of all tensors."""

    def drops(self, name: str) -> bool:
        """Return whether mlx-lm passes over a tensor of this name when it loads the model."""
        return self.dropped is not None and re.search(self.dropped, name) is not None
