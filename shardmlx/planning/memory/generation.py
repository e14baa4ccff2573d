"""Predict the bytes of a stage that generates. No MLX, no MPI."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from shardmlx.config.inference import WHOLE_CHUNK
from shardmlx.models.sizes import kv_cache
from shardmlx.models.sizes.kv_cache import CacheQuantisation
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.models.sizes.shares import TensorShares
from shardmlx.planning.facts.workload import ModelSizes, shared
from shardmlx.planning.memory.training_setup import BACKENDS

HIDDEN_ARRAYS = 7
MLP_ARRAYS = 2
QUERY_ARRAYS = 1
SCORE_ARRAYS = 2
"""Arrays of each width that exist while a layer computes a chunk, fitted to measurements.

Attention scores count on a CPU and with quantised keys: Metal's kernel keeps none. Measured peaks
of SmolLM2 on a CPU were 1 to 5% lower (docs/generate.md).
"""


INHERITED = 3
"""Borders that the next turn of a conversation takes over in the prefix cache: the first, which
most prompts share."""

MOST_BORDERS = INHERITED + 2
"""Borders of a sequence in the prefix cache."""

MOST_COPIES = 16
"""States of the sequences that the prefix cache keeps, borders included."""


def most_copies(under_way: int) -> int:
    """Return how many states are kept at most beside those of so many sequences ``under_way``."""
    return MOST_COPIES + under_way * MOST_BORDERS


def cuttable(shape: ModelShape, max_kv_size: int | None = None) -> int:
    """Return from how many tokens on the caches of a sequence cannot be cut."""
    if not shape.family.takes_cuts:
        return 0
    # Longer sequences have forgotten their beginning in a sliding window, or by the limit.
    limits = (each for each in (*shape.windows, max_kv_size) if each is not None)
    return min(limits, default=sys.maxsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSetup:
    """The facts that decide the memory of generating."""

    model: ModelSizes
    sequences: int
    """Sequences that are generated at a time."""
    context: int
    """Tokens of the longest sequence, prompt included."""
    chunk: int = WHOLE_CHUNK
    """Tokens of a prompt computed at a time; 0 leaves out the arrays that exist only meanwhile."""
    longest: int | None = None
    """Tokens of the longest prompt, or of the largest step, if they are known."""
    max_kv_size: int | None = None
    """Tokens that the KV cache of a sequence keeps at most."""
    cache_tokens: int | None = None
    """Tokens that the KV caches of all sequences together keep at most."""
    quantisation: CacheQuantisation | None = None
    state_copies: int = 0
    """Copies that a prefix cache keeps of a sequence's states, where these cannot be cut."""
    drafts: int = 0
    """Tokens that are guessed at a time: each has logits of its own."""
    beside: int = 0
    """Bytes that the first stage holds beside its own: those of a model that drafts."""
    head: int = 0
    """Bytes of the model's head for further tokens on the last stage, if that drafts. The stage
    then has the embedding too, and KV caches of one more layer like its last."""
    backend: str = BACKENDS[0]


def setups_of(setup: GenerationSetup, shares: TensorShares) -> list[GenerationSetup]:
    """Return the facts of the ranks of a stage, whose shares have fewer heads and columns."""
    found = []
    whole = setup.model
    for rank in range(shares.size):
        shape, sizes = shared(whole.shape, whole.weight_sizes, shares, rank)
        model = replace(whole, shape=shape, weight_sizes=sizes)
        found.append(replace(setup, model=model, beside=setup.beside if rank == 0 else 0))
    return found


def inference_memory(setup: GenerationSetup, start: int, stop: int) -> int:
    """Return the bytes of layers ``start`` to ``stop`` as a stage, with KV caches and one chunk."""
    return weights_memory(setup, start, stop) + beside_weights(setup, start, stop)


def weights_memory(setup: GenerationSetup, start: int, stop: int) -> int:
    """Return the bytes of the model's weights in a stage of layers ``start`` to ``stop``."""
    shape = setup.model.shape
    sizes = setup.model.weight_sizes
    is_last = stop == shape.num_layers
    weights: float = sum(sizes.layers[start:stop])
    if start == 0 or (is_last and shape.tied):
        weights += sizes.embedding
    return round(weights + sizes.head * is_last)


def beside_weights(setup: GenerationSetup, start: int, stop: int) -> int:
    """Return what such a stage holds to generate, beside the model's weights: KV caches, the arrays
    of one chunk, and what drafts."""
    shape = setup.model.shape
    is_first = start == 0
    nbytes = setup.beside if is_first else 0
    activations = _passing(setup)
    if stop == shape.num_layers:
        nbytes += setup.head
        if setup.head and not (is_first or shape.tied):
            nbytes += round(setup.model.weight_sizes.embedding)
        activations += (setup.sequences + setup.drafts) * shape.vocab_size
    passing = setup.model.dtype_bytes * activations
    return nbytes + kv_cache_memory(setup, start, stop) + passing


def kv_cache_memory(setup: GenerationSetup, start: int, stop: int) -> int:
    """Return the bytes of all keys, values and states; an upper bound if sequences share tokens.
    Sliding windows stay unquantised."""
    shape = setup.model.shape
    size = setup.model.dtype_bytes
    most = setup.context + kv_cache.STEP
    limit = min(most, setup.max_kv_size or most)
    copies = 0 if shape.family.takes_cuts else setup.state_copies
    nbytes = 0
    numbers = [*range(start, stop)]
    if setup.head and stop == shape.num_layers:
        numbers.append(stop - 1)
    for layer in map(shape.layer, numbers):
        window = layer.window if shape.chooses_caches else None
        nbytes += (setup.sequences + copies) * layer.recurrence.cache_nbytes(size)
        if window is not None:
            nbytes += copies * size * layer.heads.cached * min(limit, window)
        tokens = setup.cache_tokens
        if tokens is None:
            tokens = setup.sequences * min(limit, window or limit)
        if setup.quantisation is None or window is not None:
            nbytes += size * layer.heads.cached * tokens
        else:
            nbytes += _quantised(setup, setup.quantisation, layer.heads.cached, tokens)
    return nbytes


def _quantised(setup: GenerationSetup, how: CacheQuantisation, elements: int, tokens: int) -> int:
    """Return the bytes of ``tokens`` in a layer that keeps so many ``elements`` of each.

    A sequence is quantised at the first step after it reaches the quantisation length. If sequences
    share ``cache_tokens``, those that end earlier stay unquantised.
    """
    plain = min(tokens, setup.sequences * (how.border + kv_cache.STEP))
    size = setup.model.dtype_bytes
    of_plain = size * elements
    packed = how.nbytes(elements, size)
    if setup.cache_tokens is None:
        return round(max(of_plain * plain, packed * tokens))
    plain = plain if how.start == 0 else tokens
    return round(of_plain * plain + packed * (tokens - plain))


def _passing(setup: GenerationSetup) -> int:
    """Return the elements that exist while a layer computes a chunk."""
    shape = setup.model.shape
    chunk = min(setup.longest or setup.context, setup.chunk)
    most = 0
    for layer in shape.kinds:
        heads = layer.heads
        elements = chunk * (
            HIDDEN_ARRAYS * shape.hidden_size
            + MLP_ARRAYS * layer.mlp
            + QUERY_ARRAYS * heads.queries * heads.key_dim
        )
        if setup.backend == "cpu" or setup.quantisation is not None:
            positions = min(setup.context, setup.max_kv_size or setup.context)
            elements += SCORE_ARRAYS * heads.queries * chunk * positions
        most = max(most, elements)
    return most
