"""Count the arrays that one decoder layer keeps of a micro-batch, by name. No MLX, no MPI.

``layer_arrays`` is the table: of each array its name, when it is alive, its elements and their
bytes. These outlive an action: the graph of ``mx.vjp`` refers to them. They were counted on real
stages in float32 and bfloat16 on the CPU, of llama, mistral, qwen2, qwen3 and mixtral; the other
families are built alike. What passes while an action runs is in ``costmodel.passing``, by the sizes
that ``layer_memory`` gives. tests/unit/costmodel/test_memory_measured.py measures both again
wherever it runs.
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
    """The time that an array of a micro-batch exists."""

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
    """The trained parameters of a layer in number, and bytes of its arrays.

    ``forward`` and ``backward`` are the worst moments of F, and of I or W; ``forward_sizes`` and
    ``backward_sizes`` the bytes of one array of each kind then. What the stage adds is 0 in these:
    logits, and gradients and products where W comes along.
    """

    parameters: int
    after_forward: int
    after_input: int
    forward: Sequence[Counts]
    backward: Sequence[Counts]
    forward_sizes: Counts
    backward_sizes: Counts


class _Widths(NamedTuple):
    """Elements for a token of the arrays in a layer."""

    hidden: int
    mlp: int
    queries: int
    keys: int
    values: int
    scores: int

    @classmethod
    def of(cls, setup: TrainingSetup, layer: LayerShape) -> _Widths:
        """Return those of a layer; of all experts that a token passes."""
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
    """Return what a decoder layer of the model takes."""
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
    # Layers of packed rows share masks instead, which the stage counts.
    mask = Array("causal mask", Alive.F_TO_I, 0 if setup.masks else setup.length**2, 1)
    return [*counted, mask]


def _norms(setup: TrainingSetup, layer: LayerShape) -> Iterator[Array]:
    """Yield what RMSNorm keeps.

    On Metal it is one kernel, which keeps its input alone. On a CPU it is computed in float32, and
    where its weight is trained the normalised states are kept too, beside which W needs the
    gradients of the norm's outputs.
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
    """Yield what attention and MLP keep for the gradient of their inputs."""
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
    """Return how many arrays the activation keeps beside gate and up."""
    if not layer.activation.is_swiglu:
        return layer.activation.kept
    if setup.is_selective:
        return 0
    # Where MLX is slow at exponentials, SwiGLU is our own, which keeps the sigmoid.
    is_ours = setup.backend == "cpu" and setup.dtype_bytes == FLOAT32
    return 1 if is_ours else layer.activation.kept


def _recomputes_product(setup: TrainingSetup, layer: LayerShape) -> bool:
    """Tell whether I or W computes again what goes into the last matrix of the MLP, as
    ``models.recompute`` does for a gated one."""
    if setup.has_adapters or not setup.is_selective or not layer.activation.is_swiglu:
        return False
    gated = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    return gated <= {name for name, _ in layer.linears}


def _trained_linears(setup: TrainingSetup, layer: LayerShape) -> Iterator[Array]:
    """Yield what trained linear layers keep for the gradients of their weights or adapters."""
    tokens, size, trained = setup.tokens, setup.dtype_bytes, _trained(setup, layer)
    each_input = tokens * sum(each.elements[0] for each in trained)
    outputs = tokens * sum(each.elements[1] for each in trained)
    itemsize = FLOAT32 if setup.has_adapters else size
    if layer.is_parallel and not setup.has_adapters:
        outputs -= tokens * setup.shape.hidden_size  # attention and MLP have one gradient

    # Layers share an input that they use as it is. An adapter makes a float32 copy of its own, with
    # dropout, or where the input is of another type; of these a compiled stage makes one.
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
    """Return the worst moments of F, and of I or W."""
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
        computed = layer.activation.is_swiglu  # others are kept
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
        # The loss has other arrays than MLX's own there, and no logits are left in I.
        during_backward = [each._replace(logits=min(0, each.logits)) for each in during_backward]
    return moments[0], during_backward


def _unlike(layer: LayerShape) -> str | None:
    """Return what makes a layer one of ``UNLIKE``; None if nothing does."""
    around = sum("." not in path for path, _ in layer.norms)
    if layer.experts:
        return "experts"
    if layer.activation.is_long:
        return "GELU" if around <= len(NORMS) else "GELU between norms"
    return "MLP beside normed heads" if layer.is_parallel and around < len(layer.norms) else None


def _in_pieces(setup: TrainingSetup, trains: str) -> str:
    """Return what is trained as ``IN_PIECES`` has it, which tells more apart."""
    if setup.fine_tune_type == "dora" and trains == "adapters":
        return "DoRA"
    if not setup.has_adapters and setup.dtype_bytes < FLOAT32:
        return "weights of half precision"
    return trains


def _sizes(setup: TrainingSetup, layer: LayerShape) -> tuple[Counts, Counts]:
    """Return the bytes of one array of each kind that passes in F, and in I or W."""
    tokens, size, widths = setup.tokens, setup.dtype_bytes, _Widths.of(setup, layer)
    # Norms on a CPU compute in float32, between a cast there and one back. So do adapters, which
    # have numbers of their own for that.
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
    """Return the bytes of the scores of all heads: of all queries, or in float32 of a piece."""
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
