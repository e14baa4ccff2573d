"""Count the arrays that one decoder layer keeps of a micro-batch, by name. No MLX, no MPI.

``layer_arrays`` lists each array's name, lifetime, elements and bytes. The arrays outlive an
action, because the graph of ``mx.vjp`` refers to them. They were counted on real stages on the CPU,
in float32 and bfloat16, of llama, mistral, qwen2, qwen3 and mixtral; other families are built
alike. ``costmodel.passing`` counts the temporary arrays of an action, in the sizes that
``layer_memory`` gives. tests/unit/costmodel/test_memory_measured.py measures both again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from functools import reduce
from typing import NamedTuple

from shardmlx.costmodel.passing import (
    BACKWARD,
    DORA_DROPS,
    FORWARD,
    IN_PIECES,
    LATENT,
    SELECTIVE_MOMENT,
    UNLIKE,
    Counts,
)
from shardmlx.costmodel.training_setup import FLOAT32, TrainingSetup
from shardmlx.models.layer_shape import NORMS, LayerShape, Linear


class Alive(Enum):
    """Lifetime of an array of a micro-batch."""

    F_TO_I = "from the forward to the gradient for the input"
    F_TO_W = "from the forward to the gradients for the weights"
    I_TO_W = "from the gradient for the input to the gradients for the weights"


class Array(NamedTuple):
    """An array, or several alike, of ``elements`` of ``itemsize`` bytes."""

    name: str
    alive: Alive
    elements: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.elements * self.itemsize


class LayerMemory(NamedTuple):
    """Number of trained parameters of a layer, and bytes of its arrays.

    ``forward`` and ``backward`` count temporary arrays at the peaks of F, and of I or W;
    ``forward_sizes`` and ``backward_sizes`` are the bytes of one array of each kind. The stage adds
    logits, gradients and recomputed products, which are 0 here.
    """

    parameters: int
    after_forward: int
    after_input: int
    forward: Sequence[Counts]
    backward: Sequence[Counts]
    forward_sizes: Counts
    backward_sizes: Counts


class _Widths(NamedTuple):
    """Elements per token of the arrays in a layer."""

    hidden: int
    mlp: int
    queries: int
    keys: int
    values: int
    scores: int

    @classmethod
    def of(cls, setup: TrainingSetup, layer: LayerShape) -> _Widths:
        """Return the widths of a layer, summed over all experts of a token."""
        heads = layer.heads
        return cls(
            hidden=setup.shape.hidden_size,
            mlp=layer.mlp,
            queries=heads.queries * heads.key_dim,
            keys=heads.keys * heads.key_dim,
            values=heads.keys * heads.value_dim + heads.joined,
            scores=heads.queries * setup.length,
        )


def layer_memory(setup: TrainingSetup, layer: LayerShape) -> LayerMemory:
    """Return the memory that a decoder layer of the model takes."""
    nbytes = dict.fromkeys(Alive, 0)
    for array in layer_arrays(setup, layer):
        nbytes[array.alive] += array.nbytes
    forward_sizes, backward_sizes = _sizes(setup, layer)
    forward, backward = _moments(setup, layer)
    return LayerMemory(
        parameters=_trained_parameters(setup, layer),
        after_forward=nbytes[Alive.F_TO_I] + nbytes[Alive.F_TO_W],
        after_input=nbytes[Alive.F_TO_W] + nbytes[Alive.I_TO_W],
        forward=forward,
        backward=backward,
        forward_sizes=forward_sizes,
        backward_sizes=backward_sizes,
    )


def layer_arrays(setup: TrainingSetup, layer: LayerShape) -> list[Array]:
    """Return every array that a micro-batch leaves behind in a trained layer."""
    counted = [
        *_norms(setup, layer),
        *_attention_and_mlp(setup, layer),
        *_trained_linears(setup, layer),
    ]
    if setup.attention_piece is not None:
        return counted
    # Layers share the masks of packed rows, which the stage counts.
    mask = Array("causal mask", Alive.F_TO_I, 0 if setup.masks else setup.length**2, 1)
    return [*counted, mask]


def _norms(setup: TrainingSetup, layer: LayerShape) -> Iterator[Array]:
    """Yield the arrays that RMSNorm keeps.

    On Metal it is one kernel, which keeps only its input. On a CPU it computes in float32; a
    trained weight keeps the normalised states too, and W also needs the gradients of the norm's
    outputs.
    """
    size, on_cpu = setup.dtype_bytes, setup.backend == "cpu"
    elements = setup.tokens * sum(norm.elements for _, norm in layer.norms)
    widened = on_cpu and not setup.is_selective
    yield Array("inputs of norms", Alive.F_TO_I, elements, FLOAT32 if widened else size)
    if on_cpu and not setup.has_adapters:
        alive, width = (Alive.I_TO_W, FLOAT32) if setup.is_selective else (Alive.F_TO_W, size)
        yield Array("normalised states", alive, elements, width)
        yield Array("gradients of the outputs of norms", Alive.I_TO_W, elements, size)


def _attention_and_mlp(setup: TrainingSetup, layer: LayerShape) -> Iterator[Array]:
    """Yield the arrays that attention and MLP keep for the gradient of their inputs."""
    tokens, size, widths = setup.tokens, setup.dtype_bytes, _Widths.of(setup, layer)
    arrays: dict[str, float] = {
        "scaled queries": widths.queries,
        "keys": widths.keys,
        "values": widths.values,
        "gate": widths.mlp,
        "up": widths.mlp,
    }
    if setup.attention_piece is None:
        arrays["attention probabilities"] = layer.scores * widths.scores
    else:
        arrays["attention's outputs"] = widths.queries
        yield Array("log-sum-exp of scores", Alive.F_TO_I, tokens * layer.heads.queries, FLOAT32)
    arrays["arrays of the activation"] = _kept_by_activation(setup, layer) * widths.mlp
    arrays["what is kept besides"] = layer.kept
    for name, width in arrays.items():
        yield Array(name, Alive.F_TO_I, round(tokens * width), size)
    if not setup.has_adapters:
        forward, backward = (tokens * count * widths.mlp for count in layer.activation_weights)
        yield Array("arrays for the activation's own weights", Alive.F_TO_W, forward, size)
        yield Array("gradients for the activation's own weights", Alive.I_TO_W, backward, size)
        scores = tokens * layer.score_weights * widths.scores
        yield Array("gradients of scores with weights", Alive.I_TO_W, scores, size)
    if layer.experts:
        answers = tokens * layer.experts_per_token * widths.hidden
        yield Array("experts' answers before they are weighted", Alive.F_TO_I, answers, size)


def _kept_by_activation(setup: TrainingSetup, layer: LayerShape) -> float:
    """Return the number of arrays that the activation keeps beside gate and up."""
    if not layer.activation.is_swiglu:
        return layer.activation.kept
    if setup.is_selective:
        return 0
    # Our own SwiGLU, used where MLX is slow at exponentials, keeps the sigmoid.
    is_ours = setup.backend == "cpu" and setup.dtype_bytes == FLOAT32
    return 1 if is_ours else layer.activation.kept


def _recomputes_product(setup: TrainingSetup, layer: LayerShape) -> bool:
    """Tell whether I or W recomputes the input of the MLP's last matrix, as ``models.recompute``
    does for a gated MLP."""
    if setup.has_adapters or not setup.is_selective or not layer.activation.is_swiglu:
        return False
    gated = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    return gated <= {name for name, _ in layer.linears}


def _trained_linears(setup: TrainingSetup, layer: LayerShape) -> Iterator[Array]:
    """Yield the arrays that trained linear layers keep for gradients of weights or adapters."""
    tokens, size, trained = setup.tokens, setup.dtype_bytes, _trained(setup, layer)
    each_input = tokens * sum(each.elements[0] for each in trained)
    outputs = tokens * sum(each.elements[1] for each in trained)
    itemsize = FLOAT32 if setup.has_adapters else size
    if layer.is_parallel and not setup.has_adapters:
        outputs -= tokens * setup.shape.hidden_size  # attention and MLP have one gradient

    # Layers share an unchanged input. An adapter makes a float32 copy for dropout, or of an input
    # of another type; a compiled stage makes one copy for all its adapters.
    is_compiled = setup.backend != "cpu" and not setup.dropout and not setup.masks
    converts = size != FLOAT32 and not is_compiled
    sources = {each.source: each.elements[0] for each in trained}
    inputs = tokens * sum(sources.values())
    if setup.has_adapters and (setup.dropout or converts):
        inputs, sources = each_input, {}
    if setup.is_selective:
        outputs_of_norms = tokens * setup.shape.hidden_size * len({"attention", "mlp"} - {*sources})
        yield Array("outputs of recomputed norms", Alive.F_TO_I, outputs_of_norms, size)
    product = tokens * layer.mlp * _recomputes_product(setup, layer)
    yield Array("inputs of trained linear layers", Alive.F_TO_W, inputs - product, itemsize)
    yield Array("recomputed product of the MLP", Alive.I_TO_W, product, itemsize)
    yield Array("gradients of their outputs", Alive.I_TO_W, outputs, itemsize)
    if setup.dropout:
        yield Array("dropout masks", Alive.F_TO_I, each_input, size)
    if setup.has_adapters:
        low_rank = tokens * sum(each.uses for each in trained) * setup.lora_rank
        yield Array("low-rank states", Alive.F_TO_W, low_rank, FLOAT32)
        yield Array("gradients of low-rank states", Alive.I_TO_W, low_rank, FLOAT32)
    if setup.fine_tune_type == "dora":
        # DoRA scales each output.
        yield Array("outputs before DoRA scales them", Alive.F_TO_W, outputs, size)
        yield Array("gradients of the scaled outputs", Alive.I_TO_W, outputs, size)


def _moments(setup: TrainingSetup, layer: LayerShape) -> tuple[Sequence[Counts], Sequence[Counts]]:
    """Return the temporary arrays at the peaks of F, and of I or W."""
    if not setup.has_adapters:
        trains = "weights"
    elif setup.dtype_bytes < FLOAT32:
        trains = "adapters of half precision"
    elif setup.dropout:
        trains = "adapters with dropout"
    elif all(each.source in ("attention", "values") for each in _trained(setup, layer)):
        trains = "attention adapters"
    else:
        trains = "adapters"
    forward, backward = FORWARD[trains], BACKWARD[trains]
    unlike = _unlike(layer) if trains == "adapters" else None
    if unlike is not None:
        backward = UNLIKE[unlike]
    if setup.grad_checkpoint:
        moments = forward.recomputed, backward.recomputed
    else:
        moments = forward.held, backward.held
    other = [Counts(mlp=layer.passing)]
    if trains == "weights" and layer.is_latent and not setup.grad_checkpoint:
        other.append(LATENT)
    if setup.is_selective:
        computed = layer.activation.is_swiglu  # other activations are kept
        other.append(SELECTIVE_MOMENT if computed else SELECTIVE_MOMENT._replace(mlp=0))
        other.append(Counts(products=_recomputes_product(setup, layer)))
    if setup.attention_piece is not None and unlike is None:
        pieces = IN_PIECES[_in_pieces(setup, trains)]
        other.append(pieces.recomputed if setup.grad_checkpoint else pieces.held)
        other += [pieces.selective] * setup.is_selective
    if setup.fine_tune_type == "dora" and setup.dropout:
        other.append(DORA_DROPS.recomputed if setup.grad_checkpoint else DORA_DROPS.held)
    during_backward = [reduce(Counts.plus, other, moment) for moment in moments[1]]
    if setup.backend == "cpu" and setup.dtype_bytes == FLOAT32:
        # Our own loss, used there, has other arrays than MLX's, and leaves no logits to I.
        during_backward = [each._replace(logits=min(0, each.logits)) for each in during_backward]
    return moments[0], during_backward


def _unlike(layer: LayerShape) -> str | None:
    """Return the key of ``UNLIKE`` for a layer; None if it has none."""
    around = sum("." not in path for path, _ in layer.norms)
    if layer.experts:
        return "experts"
    if layer.activation.is_long:
        return "GELU" if around <= len(NORMS) else "GELU between norms"
    return "MLP beside normed heads" if layer.is_parallel and around < len(layer.norms) else None


def _in_pieces(setup: TrainingSetup, trains: str) -> str:
    """Return the key of ``IN_PIECES`` for the trained weights, which distinguishes more cases."""
    if setup.fine_tune_type == "dora" and trains == "adapters":
        return "DoRA"
    if not setup.has_adapters and setup.dtype_bytes < FLOAT32:
        return "weights of half precision"
    return trains


def _sizes(setup: TrainingSetup, layer: LayerShape) -> tuple[Counts, Counts]:
    """Return the bytes of one temporary array of each kind, in F, and in I or W."""
    tokens, size, widths = setup.tokens, setup.dtype_bytes, _Widths.of(setup, layer)
    # Norms on a CPU compute in float32, between two casts. Adapters do too, with own counts.
    hidden = (size, size)
    if size < FLOAT32 and setup.backend == "cpu" and not setup.has_adapters:
        hidden = (FLOAT32 + 2 * size, FLOAT32)
    matrix = max((each.inputs * each.outputs for each in _trained(setup, layer)), default=0)
    forward, backward = (
        Counts(
            hidden=tokens * widths.hidden * of_hidden,
            answers=tokens * widths.hidden * of_hidden * layer.experts_per_token,
            mlp=tokens * widths.mlp * size,
            queries=tokens * widths.queries * size,
            keys=tokens * widths.keys * size,
            scores=_scores(setup, layer),
            mask=0 if setup.masks or setup.attention_piece else setup.length**2,
            matrices=FLOAT32 * matrix * (setup.fine_tune_type == "dora"),
        )
        for of_hidden in hidden
    )
    return forward, backward


def _scores(setup: TrainingSetup, layer: LayerShape) -> int:
    """Return the bytes of all heads' attention scores, of all queries or of a float32 piece."""
    heads, piece = layer.heads.queries, setup.attention_piece
    if piece is None:
        return setup.tokens * heads * setup.length * setup.dtype_bytes
    return setup.rows * heads * piece * setup.length * FLOAT32


def _trained(setup: TrainingSetup, layer: LayerShape) -> list[Linear]:
    """Return the linear layers that are trained, or that have adapters."""
    linears = dict(layer.linears)
    keys = linears if setup.lora_keys is None or not setup.has_adapters else setup.lora_keys
    found = [linears[key] for key in dict.fromkeys(keys) if key in linears]
    return [each for each in found if each.applied is None or not setup.has_adapters]


def _trained_parameters(setup: TrainingSetup, layer: LayerShape) -> int:
    if not setup.has_adapters:
        return layer.parameters
    has_magnitudes = setup.fine_tune_type == "dora"
    return sum(
        each.copies
        * (setup.lora_rank * (each.inputs + each.outputs) + has_magnitudes * each.outputs)
        for each in _trained(setup, layer)
    )
