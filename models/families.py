"""Call the decoder layers of each model family: all that differs between them.

The layers themselves are mlx-lm's. A family is a function of the model's arguments and one
micro-batch, which returns how to call one of its layers on that. To generate it is also given the
layers and their KV caches, which say how many tokens came before; where one row holds several
sequences, which position belongs to which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask

from shardmlx.compat import query_scale
from shardmlx.models.attention import Sight
from shardmlx.models.packed_positions import PackedPositions
from shardmlx.models.traits import TRAITS


class LayerCall(Protocol):
    """A call of one layer on its input; its cache takes the new keys and values."""

    def __call__(self, layer: nn.Module, x: mx.array, cache: Any = None) -> mx.array: ...


class Cached(NamedTuple):
    """Layers that are called in turn, and mlx-lm's cache of each."""

    layers: Sequence[nn.Module]
    caches: Sequence[Any]

    def cache(self, use_sliding: bool) -> Any:
        """Return the cache of a layer that sees a window, or all; None without such a layer."""
        pairs = zip(self.layers, self.caches, strict=True)
        return next((c for layer, c in pairs if _is_sliding(layer) == use_sliding), None)


class Given(NamedTuple):
    """The hidden states (rows, T, D) of a micro-batch, and what else decides what they see.

    ``chunk`` is the most queries of a piece of attention; None, or all of T, makes no pieces.
    """

    hidden: mx.array
    cached: Cached | None = None
    places: PackedPositions | None = None
    chunk: int | None = None

    def mask(self, window: int | None = None) -> Any:
        """Return the mask that layers take whose positions see a ``window``, or all."""
        if self.chunk is not None and self.chunk < self.hidden.shape[1]:
            return Sight(self.chunk, window, self.places)
        if self.places is not None:
            return mx.array(self.places.mask(window))
        cache = self.cached and self.cached.cache(use_sliding=window is not None)
        return create_attention_mask(self.hidden, cache, window_size=window)

    def masks(self, args: Any) -> dict[bool, Any]:
        """Return the masks of layers that see all, and of those that see a window."""
        full = self.mask()
        if "sliding_attention" not in args.layer_types:
            return {False: full}
        return {False: full, True: self.mask(args.sliding_window)}


class Family(Protocol):
    """A function that returns how to call the layers of a family on one micro-batch."""

    def __call__(self, args: Any, given: Given) -> LayerCall: ...


def full_attention(args: Any, given: Given) -> LayerCall:
    """Call layers that see all positions before their own: qwen2, qwen3, mixtral."""
    mask = given.mask()
    return lambda layer, x, cache=None: layer(x, mask, cache)


def sliding_attention(args: Any, given: Given) -> LayerCall:
    """Call layers of which those marked ``use_sliding`` see only a window: llama, mistral."""
    masks = given.masks(args)
    return lambda layer, x, cache=None: layer(x, masks[layer.use_sliding], cache)


def scaled_sliding_attention(args: Any, given: Given) -> LayerCall:
    """Call layers as ``sliding_attention``, with queries scaled by position: ministral3."""
    masks, places = given.masks(args), given.places
    rope = args.rope_parameters
    length, offset = given.hidden.shape[1], given.cached.caches[0].offset if given.cached else 0
    if places is not None:
        # As if each position were a sequence of one token, after so many others.
        length, offset = 1, mx.array(places.positions)
    scale = query_scale(
        length, offset, rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"]
    ).astype(given.hidden.dtype)
    if places is not None:
        scale = scale.reshape(-1, 1)
    return lambda layer, x, cache=None: layer(x, scale, masks[layer.use_sliding], cache)


def _is_sliding(layer: nn.Module) -> bool:
    return bool(getattr(layer, "use_sliding", False))


CALLS: Mapping[str, Family] = MappingProxyType(
    {
        "full": full_attention,
        "sliding": sliding_attention,
        "scaled sliding": scaled_sliding_attention,
    }
)
"""Ways to call the layers of a family, by the names of ``traits.TRAITS``."""

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {model_type: CALLS[traits.attention] for model_type, traits in TRAITS.items()}
)
"""Way to call the layers of each ``model_type``."""
