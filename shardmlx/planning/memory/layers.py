"""Count the arrays of one decoder layer: those held exactly, those passing by a bound.

``layer_arrays`` lists the arrays that outlive an action, because the graph of ``mx.vjp`` refers to
them. They were counted on real stages on the CPU, in float32 and bfloat16. How many arrays exist
only while an action runs is up to MLX's scheduler: one rule bounds them (``PASSING_MARGIN``), and
the measurements of ``shardmlx profile`` take its place. No MLX, no MPI.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from shardmlx.config.checks import OPTIMIZERS
from shardmlx.config.specs import NONE
from shardmlx.engine.buffers import TASKS_AHEAD
from shardmlx.models.sizes.layer_shape import (
    NO_HEADS,
    NO_RECURRENCE,
    PIECE,
    Heads,
    LayerShape,
    Linear,
)
from shardmlx.planning.memory.training_setup import FLOAT32, TrainingSetup

PASSING_MARGIN = 1.1
"""Bound on passing arrays, as a multiple of a layer's: MLX allocates about a layer ahead."""

MODULES_AHEAD = 7
"""Matrices, adapters and norms of an MLP that MLX gets ahead in its backward, measured at most."""

ACTIVATION_ARRAYS = 3
"""Arrays of an MLP's width that its activation computes: SwiGLU's sigmoid, SiLU and product."""

FUSED_TILE = 1024
"""Queries, and keys, whose scores MLX's fused attention has in memory at a time in its backward."""


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
        """Bytes of the array, or of all that are alike."""
        return self.elements * self.itemsize


class LayerMemory(NamedTuple):
    """Number of trained parameters of a layer, and bytes of its arrays: those held after F and
    after I, and those that pass in F, in I or W, in both as one, and in the update."""

    parameters: int
    after_forward: int
    after_input: int
    during_forward: float
    during_backward: float
    during_joined: float
    during_update: int


def layer_memory(setup: TrainingSetup, layer: LayerShape) -> LayerMemory:
    """Return the memory that a decoder layer of the model takes."""
    after_forward, after_input = _held(setup, layer)
    whole, _ = _held(replace(setup, savings=replace(setup.savings, recompute=NONE)), layer)
    recomputed = whole if setup.grad_checkpoint else whole - after_forward
    forward, backward, joined = _passing(setup, layer)
    shapes = [*shapes_of_layer(setup, layer)]
    sizes = [*map(math.prod, shapes), 0]
    optimizer = OPTIMIZERS[setup.tune.optimizer]
    alone = [optimizer.alone(shape) * math.prod(shape) for shape in shapes]
    # The layer's arrays go as the gradients of its weights come, each of them after its gradient.
    gradients = FLOAT32 * max(sizes) + max(0, FLOAT32 * sum(sizes) - whole)
    return LayerMemory(
        parameters=sum(sizes),
        after_forward=after_forward,
        after_input=after_input,
        during_forward=PASSING_MARGIN * forward,
        during_backward=PASSING_MARGIN * (backward + recomputed),
        during_joined=PASSING_MARGIN * (joined + recomputed) + gradients,
        during_update=round(FLOAT32 * max(optimizer.passing * sum(sizes), *alone, 0)),
    )


def _held(setup: TrainingSetup, layer: LayerShape) -> tuple[int, int]:
    nbytes = dict.fromkeys(Alive, 0)
    for array in layer_arrays(setup, layer):
        nbytes[array.alive] += array.nbytes
    for_weights = nbytes[Alive.F_TO_W]
    return nbytes[Alive.F_TO_I] + for_weights, for_weights + nbytes[Alive.I_TO_W]


def layer_arrays(setup: TrainingSetup, layer: LayerShape) -> list[Array]:
    """Return every array that a micro-batch leaves behind in a trained layer."""
    counted = [
        *_norms(setup, layer),
        *_attention_and_mlp(setup, layer),
        *_trained_linears(setup, layer),
    ]
    if not setup.holds_scores(layer):
        return counted
    # Layers share the masks of packed rows, which the stage counts.
    mask = Array("causal mask", Alive.F_TO_I, 0 if setup.masks else setup.length**2, 1)
    return [*counted, mask]


def _norms(setup: TrainingSetup, layer: LayerShape) -> Iterator[Array]:
    """Yield RMSNorm's arrays: on Metal one kernel keeps its input. A CPU computes in float32; there
    a trained weight keeps the normalised states, and in W the gradients of the norm's outputs."""
    size = setup.dtype_bytes
    on_cpu = setup.backend == "cpu"
    elements = setup.tokens * sum(norm.elements for _, norm in layer.norms)
    widened = on_cpu and not setup.is_selective
    yield Array("inputs of norms", Alive.F_TO_I, elements, FLOAT32 if widened else size)
    if on_cpu and setup.tune.is_full:
        alive, width = (Alive.I_TO_W, FLOAT32) if setup.is_selective else (Alive.F_TO_W, size)
        yield Array("normalised states", alive, elements, width)
        yield Array("gradients of the outputs of norms", Alive.I_TO_W, elements, size)


def _attention_and_mlp(setup: TrainingSetup, layer: LayerShape) -> Iterator[Array]:
    """Yield the arrays that attention and MLP keep for the gradient of their inputs."""
    tokens = setup.tokens
    size = setup.dtype_bytes
    heads = layer.heads
    queries = heads.queries * heads.key_dim
    scores = heads.queries * setup.length
    arrays: dict[str, float] = {
        "scaled queries": queries,
        "keys": heads.keys * heads.key_dim,
        "values": heads.keys * heads.value_dim + heads.joined,
        "gate": layer.mlp,
        "up": layer.mlp,
    }
    if setup.holds_scores(layer):
        arrays["attention probabilities"] = layer.scores * scores
    else:
        arrays["attention's outputs"] = queries
        yield Array("log-sum-exp of scores", Alive.F_TO_I, tokens * heads.queries, FLOAT32)
    arrays["arrays of the activation"] = _kept_by_activation(setup, layer) * layer.mlp
    arrays["what is kept besides"] = layer.kept
    for name, width in arrays.items():
        yield Array(name, Alive.F_TO_I, round(tokens * width), size)
    pieces = setup.rows * -(-setup.length // PIECE)
    yield Array("states", Alive.F_TO_I, pieces * layer.recurrence.state, FLOAT32)
    if setup.tune.is_full:
        convolved = tokens * layer.recurrence.convolved
        yield Array("inputs of convolutions", Alive.F_TO_W, convolved, size)
        yield Array("gradients of their outputs", Alive.I_TO_W, convolved, size)
        forward, backward = (tokens * count * layer.mlp for count in layer.activation.weights)
        yield Array("arrays for the activation's own weights", Alive.F_TO_W, forward, size)
        yield Array("gradients for the activation's own weights", Alive.I_TO_W, backward, size)
        scaled = [math.prod(sides) for _, sides in layer.arrays]
        scaled = [each for each in scaled if each == setup.shape.hidden_size]
        yield Array("gradients of scaled states", Alive.I_TO_W, tokens * sum(scaled), size)
        weighted = tokens * layer.score_weights * scores
        yield Array("gradients of scores with weights", Alive.I_TO_W, weighted, size)
    if layer.experts:
        answers = tokens * layer.experts_per_token * setup.shape.hidden_size
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
    """Tell whether I or W recomputes the input of a gated MLP's last matrix."""
    if not setup.tune.is_full or not setup.is_selective or not layer.activation.is_swiglu:
        return False
    gated = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    return gated <= {name for name, _ in layer.linears}


def _trained_linears(setup: TrainingSetup, layer: LayerShape) -> Iterator[Array]:
    tokens = setup.tokens
    size = setup.dtype_bytes
    trained = _trained(setup, layer)
    each_input = tokens * sum(each.elements[0] for each in trained)
    outputs = tokens * sum(each.elements[1] for each in trained)
    itemsize = FLOAT32 if not setup.tune.is_full else size
    if layer.is_parallel and setup.tune.is_full:
        outputs -= tokens * setup.shape.hidden_size  # attention and MLP have one gradient

    # Layers share an unchanged input. An adapter makes a float32 copy for dropout, or of an input
    # of another type; a compiled stage makes one copy for all its adapters. Stages are not compiled
    # on a CPU, nor with divided weights.
    is_compiled = setup.backend != "cpu" and not setup.divides_weights
    converts = size != FLOAT32 and not is_compiled
    sources = {each.source: each.elements[0] for each in trained}
    inputs = tokens * sum(sources.values())
    if not setup.tune.is_full and (setup.dropout or converts):
        inputs = each_input
        sources = {}
    if setup.is_selective:
        outputs_of_norms = tokens * setup.shape.hidden_size * len({"attention", "mlp"} - {*sources})
        yield Array("outputs of recomputed norms", Alive.F_TO_I, outputs_of_norms, size)
    product = tokens * layer.mlp * _recomputes_product(setup, layer)
    yield Array("inputs of trained linear layers", Alive.F_TO_W, inputs - product, itemsize)
    yield Array("recomputed product of the MLP", Alive.I_TO_W, product, itemsize)
    yield Array("gradients of their outputs", Alive.I_TO_W, outputs, itemsize)
    if setup.dropout:
        yield Array("dropout masks", Alive.F_TO_I, each_input, size)
    if not setup.tune.is_full:
        low_rank = tokens * sum(each.uses for each in trained) * setup.lora.get("rank", 8)
        yield Array("low-rank states", Alive.F_TO_W, low_rank, FLOAT32)
        yield Array("gradients of low-rank states", Alive.I_TO_W, low_rank, FLOAT32)
    if setup.tune.fine_tune_type == "dora":
        # DoRA scales each output.
        yield Array("outputs before DoRA scales them", Alive.F_TO_W, outputs, size)
        yield Array("gradients of the scaled outputs", Alive.I_TO_W, outputs, size)


def _passing_arrays(setup: TrainingSetup, layer: LayerShape) -> tuple[float, float]:
    """Return the bytes of all arrays that the forward of a part of a layer computes, and its
    backward."""
    tokens = setup.tokens
    size = setup.dtype_bytes
    outputs = sum(each.elements[1] for _, each in layer.linears)
    outputs += (1 + layer.experts_per_token) * setup.shape.hidden_size
    # Norms on a CPU compute in float32.
    of_norm = size + FLOAT32 * (setup.backend == "cpu" and size < FLOAT32)
    both = size * outputs + of_norm * sum(norm.elements for _, norm in layer.norms)
    both += size * layer.recurrence.convolved  # with zeros before the first token
    forward = both + size * layer.mlp * max(ACTIVATION_ARRAYS, layer.activation.kept)
    backward = both + size * layer.mlp * (ACTIVATION_ARRAYS + layer.activation.passing)
    backward += size * layer.kept  # their gradients
    if not setup.tune.is_full:
        # Adapters compute in float32, and convert inputs of another type.
        trained = _trained(setup, layer)
        backward += FLOAT32 * sum(each.elements[1] for each in trained)
        if size < FLOAT32:
            inputs = {each.source: each.elements[0] for each in trained}
            backward += FLOAT32 * sum(inputs.values())
    else:
        backward += size * layer.mlp * layer.activation.weights[1]
    if setup.fuses_attention(layer):
        return tokens * forward, tokens * backward + passing_in_fused_attention(setup, layer.heads)
    rows = setup.rows
    heads = layer.heads.queries
    piece = setup.attention_piece
    scores = rows * heads * setup.length * (piece * FLOAT32 if piece else setup.length * size)
    recurrence = layer.recurrence
    recurrent = FLOAT32 * rows * min(setup.length, PIECE) * recurrence.passing
    if recurrence.loops:
        # States of steps to come, and the gradients of what goes into the steps and comes out.
        recurrent += FLOAT32 * rows * TASKS_AHEAD * recurrence.state
        recurrent += 2 * size * tokens * recurrence.convolved
    return tokens * forward + scores, max(tokens * backward + 2 * scores, recurrent)


def _passing(setup: TrainingSetup, layer: LayerShape) -> tuple[float, float, float]:
    """Return the bytes that pass in a layer's forward, in its backward, and in one with the
    gradients of weights.

    The MLP's backward comes first. MLX gets ahead from a short MLP into attention, or into a short
    convolution: their arrays pass at once. A part of a longer one, and all before a recurrence, is
    over then: its arrays are freed, and what they leave for the weights is held. Gradients of
    adapters make it longer.
    """
    mixer, mlp = _parts(layer)
    (held, left), (of_mixer, left_by_it) = _held(setup, layer), _held(setup, mixer)
    freed = (held - of_mixer) - (left - left_by_it)
    (forward, _), (forward_mixer, _) = both = [
        _passing_arrays(setup, each) for each in (mlp, mixer)
    ]
    before, after = map(max, both)
    adapters = 0 if setup.tune.is_full else len(_trained(setup, mlp))
    modules = max(1, len(mlp.linears) + len(mlp.norms) + adapters)
    at_once = before + after
    in_turn = max(before, after - freed)
    # Shares of the layer whose arrays pass at once: less, the more modules it has.
    for_input, for_weights = (
        0.0 if layer.recurrence.state else min(1.0, MODULES_AHEAD / count)
        for count in (modules, modules + adapters)
    )
    return (
        forward + forward_mixer,
        for_input * at_once + (1 - for_input) * in_turn,
        for_weights * at_once + (1 - for_weights) * in_turn,
    )


def _parts(layer: LayerShape) -> tuple[LayerShape, LayerShape]:
    """Return a layer's attention or recurrence, with the first norm of the hidden states, and its
    MLP."""
    inner = [
        path
        for path, each in layer.linears
        if each.source.startswith(("attention", "values", "latent"))
    ]
    modules = tuple({f"{path.rpartition('.')[0]}." for path in inner})
    around = [path for path, _ in layer.norms if not path.startswith(modules)]
    of_mlp = {*around[1:], *dict(layer.linears)} - {*inner}
    mixer = replace(
        layer,
        linears=tuple(each for each in layer.linears if each[0] not in of_mlp),
        norms=tuple(each for each in layer.norms if each[0] not in of_mlp),
    )
    mlp = replace(
        layer,
        linears=tuple(each for each in layer.linears if each[0] in of_mlp),
        norms=tuple(each for each in layer.norms if each[0] in of_mlp),
        heads=NO_HEADS,
        recurrence=NO_RECURRENCE,
        kept=0,
    )
    return mixer, mlp


def passing_in_fused_attention(setup: TrainingSetup, heads: Heads) -> int:
    """Return the bytes of the arrays that pass in the gradient of MLX's attention on Metal.

    The output's gradient comes in. The gradients of queries, keys and values add up in float32,
    with a sum for each query; that of queries is converted while all are held. A tile takes three
    arrays of scores, scaled queries, and its part of the gradients of keys and values, for each
    head of the queries. Found from the peaks that users of mlx 0.32.4 report, which it meets within
    0.3%.
    """
    size = setup.dtype_bytes
    tile = min(setup.length, FUSED_TILE)
    widths = heads.key_dim + heads.value_dim
    sums = heads.queries * (heads.key_dim + 1) + heads.keys * widths
    tiles = setup.rows * tile * heads.queries * (3 * tile + heads.key_dim + widths)
    return setup.tokens * (size * heads.queries * widths + FLOAT32 * sums) + size * tiles


def _trained(setup: TrainingSetup, layer: LayerShape) -> list[Linear]:
    linears = dict(layer.linears)
    keys = setup.lora.get("keys")
    found = [
        linears[key] for key in dict.fromkeys(linears if keys is None else keys) if key in linears
    ]
    return [each for each in found if each.applied is None or setup.tune.is_full]


def shapes_of_layer(setup: TrainingSetup, layer: LayerShape) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of a layer's trained weights, but for the order of a matrix's sides."""
    if setup.tune.is_full:
        for _, each in layer.linears:
            yield (*each.stack, each.outputs, each.inputs)
            yield from [(*each.stack, each.outputs)] * each.bias
        for _, norm in layer.norms:
            yield from [norm.sides] * (1 + norm.bias)
        yield from (sides for _, sides in layer.arrays)
        return
    rank = setup.lora.get("rank", 8)
    has_magnitudes = setup.tune.fine_tune_type == "dora"
    for each in _trained(setup, layer):
        yield (*each.stack, rank, each.inputs)
        yield (*each.stack, each.outputs, rank)
        yield from [(*each.stack, each.outputs)] * has_magnitudes
