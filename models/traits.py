"""Tell the supported model families apart: the one table of what differs in mlx-lm's model files.

No MLX, no MPI. ``models.families`` adds how layers are called, ``models.shape`` and
``models.tensors`` read the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class FamilyTraits(NamedTuple):
    """Differences between mlx-lm's model file of a family and the others."""

    attention: str = "full"
    """Name of the way in which its layers are called: a key of ``families.CALLS``."""
    tied: bool | None = True
    """Default of tie_word_embeddings in config.json; None if it must say."""
    is_llama_like: bool = False
    """True if config.json may have head_dim, leave out num_key_value_heads, and give layers
    a window; mlx-lm's model then makes its KV caches itself."""
    may_have_biases: bool = False
    """True if config.json may switch on biases of attention and MLP."""
    drops_frequencies: bool = True
    """True if stored rotary frequencies are passed over."""


TRAITS: Mapping[str, FamilyTraits] = MappingProxyType(
    {
        "mistral": FamilyTraits("sliding", is_llama_like=True, may_have_biases=True),
        "llama": FamilyTraits("sliding", is_llama_like=True, may_have_biases=True),
        "ministral3": FamilyTraits("scaled sliding", is_llama_like=True),
        "mixtral": FamilyTraits(tied=False, drops_frequencies=False),
        "qwen2": FamilyTraits(),
        "qwen3": FamilyTraits(tied=None, drops_frequencies=False),
    }
)
"""Traits of each ``model_type`` that can be cut into stages."""
