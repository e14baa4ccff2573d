"""Count the arrays that one decoder layer makes of a micro-batch, by name. No MLX, no MPI.

``layer_arrays`` is the table: of each array its name, when it is alive, its elements and their
bytes. Arrays of two kinds stand in it:

- those that outlive an action, one by one: what the graph of ``mx.vjp`` refers to. They were
  counted on real stages in float32 and bfloat16 on the CPU, of llama, mistral, qwen2, qwen3 and
  mixtral; the other families are built alike.
- those that pass while an action runs, by their width: MLX frees nothing before it has run, so that
  several of them exist at a time. How many is ``FROZEN``, ``FORWARD``, ``RECOMPUTED`` and
  ``INPUT_GRADIENT``: fitted to peaks of the same stages (MLX 0.32, CPU, float32 and bfloat16, full,
  LoRA and DoRA), which the sums meet within a fifth. tests/unit/costmodel/test_memory_measured.py
  measures them again wherever it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from shardmlx.config.checks import FINE_TUNE_TYPES, OPTIMIZERS
from shardmlx.models.shape import ModelShape
from shardmlx.partitioners.costs import LayerCosts

FLOAT32 = 4
"""Bytes of an element of the sums of gradients, of adapters, and of what adapters compute."""

BACKENDS = ("metal", "cpu")
"""Backends of MLX."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """The facts that decide the memory of training. ``ValueError`` for what cannot be."""

    shape: ModelShape
    weight_sizes: LayerCosts
    """Bytes of the parameters as held in memory; a tied matrix counts as the embedding."""
    dtype_bytes: int
    """Bytes of an element of an activation."""
    rows: int
    """Rows of a micro-batch."""
    length: int
    """Tokens of a row."""
    fine_tune_type: str = "lora"
    first_trained_layer: int = 0
    """Lowest layer with trained weights; the number of layers if none has any."""
    lora_rank: int = 8
    lora_keys: tuple[str, ...] | None = None
    """Linear layers that get adapters; None for all of them, as in mlx-lm."""
    dropout: bool = False
    """True if adapters drop some of their input."""
    unfreeze_all: bool = False
    """True if a full fine-tune trains embedding, norm and lm_head too."""
    optimizer: str = "adam"
    first_moment: bool = False
    """True if Adafactor has a beta_1: then it keeps a moment as large as the weights."""
    grad_checkpoint: bool = False
    masks: int = 0
    """Number of masks of ``length`` x ``length`` bytes that all layers of packed rows share."""
    dp: int = 1
    """Number of replicas."""
    backend: str = "metal"

    def __post_init__(self) -> None:
        layers = self.shape.num_layers
        if len(self.weight_sizes.layers) != layers:
            raise ValueError(f"weights of {len(self.weight_sizes.layers)} layers for {layers}")
        if not 0 <= self.first_trained_layer <= layers:
            raise ValueError(f"first trained layer {self.first_trained_layer} of {layers}")
        for what, value, known in (
            ("fine-tune type", self.fine_tune_type, FINE_TUNE_TYPES),
            ("backend", self.backend, BACKENDS),
            ("optimizer", self.optimizer, OPTIMIZERS),
        ):
            if value not in known:
                raise ValueError(f"{what} {value!r}: one of {', '.join(known)}")
        sizes = (self.dtype_bytes, self.rows, self.length, self.lora_rank, self.dp)
        if min(sizes) < 1:
            raise ValueError(f"sizes {sizes}: from 1")
        if self.unfreeze_all and self.has_adapters:
            raise ValueError(f"unfreeze_all with {self.fine_tune_type}: full only")

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.rows * self.length

    @property
    def message(self) -> int:
        """Bytes of the hidden states of a micro-batch, which go from stage to stage."""
        return self.dtype_bytes * self.tokens * self.shape.hidden_size

    @property
    def has_adapters(self) -> bool:
        """True if adapters are trained instead of the weights themselves."""
        return self.fine_tune_type != "full"


class Alive(Enum):
    """The time that an array of a micro-batch exists."""

    F_TO_I = "from the forward to the gradient for the input"
    F_TO_W = "from the forward to the gradients for the weights"
    I_TO_W = "from the gradient for the input to the gradients for the weights"
    IN_FROZEN_F = "during the forward of a layer that has no backward"
    IN_F = "during the forward"
    IN_RECOMPUTED_F = "during the forward under gradient checkpointing"
    IN_I = "during the gradient for the input"


class Array(NamedTuple):
    """An array, or several alike, of ``elements`` of ``itemsize`` bytes, fractions where fitted."""

    name: str
    alive: Alive
    elements: float
    itemsize: float

    @property
    def nbytes(self) -> float:
        """Bytes of all elements."""
        return self.elements * self.itemsize


class LayerMemory(NamedTuple):
    """The trained parameters of a layer in number, and bytes of its arrays by when they exist.

    What exists during an action comes on top of what is held.
    """

    parameters: int
    after_forward: float
    after_input: float
    during_frozen: float
    during_forward: float
    during_checkpoint: float
    during_input: float


class _Widths(NamedTuple):
    """Elements for a token of the arrays in a layer."""

    hidden: int
    mlp: int
    queries: int
    keys: int
    scores: int

    @classmethod
    def of(cls, shape: ModelShape, length: int) -> _Widths:
        """Return those of a model in rows of ``length``; of all experts that a token passes."""
        return cls(
            hidden=shape.hidden_size,
            mlp=shape.intermediate_size * max(1, shape.experts_per_token),
            queries=shape.num_heads * shape.head_dim,
            keys=shape.num_kv_heads * shape.head_dim,
            scores=shape.num_heads * length,
        )


class Passing(NamedTuple):
    """Number of arrays of each width that exist at a time while a layer runs; fitted.

    ``hidden``: residual stream and norms. ``queries``, ``keys``: projections, rotary embedding and
    transposition. ``mlp``: gate, up and their product. ``scores``: attention's, one for each head
    and position.
    """

    hidden: float
    mlp: float
    queries: float = 0.0
    keys: float = 0.0
    scores: float = 0.0

    def elements(self, widths: _Widths) -> float:
        """Return the elements for a token, without the scores."""
        return (
            self.hidden * widths.hidden
            + self.mlp * widths.mlp
            + self.queries * widths.queries
            + self.keys * widths.keys
        )


FROZEN = Passing(hidden=7, mlp=2, queries=7, keys=4, scores=1)
"""Arrays that pass in a layer of which only the forward is asked: none is kept for a gradient."""

FORWARD = {
    "adapters": Passing(hidden=4, mlp=2, queries=2),
    "weights": Passing(hidden=2, mlp=0, queries=5, keys=1),
}
"""Arrays that pass in a forward, beside those kept for the gradients, by what is trained."""

RECOMPUTED = {"adapters": Passing(hidden=2, mlp=3), "weights": Passing(hidden=2, mlp=1)}
"""Arrays beyond ``FROZEN`` in a forward whose arrays are to be computed again."""

INPUT_GRADIENT = Passing(hidden=10, mlp=3, queries=6, keys=4, scores=1.5)
"""Arrays that pass in the gradient for the input: gradients, and what they are computed from."""


class _Linear(NamedTuple):
    """A linear layer: ``source`` names its input, which it may share with others.

    It has ``copies`` matrices, one for each expert, of which a token passes through ``uses``.
    """

    source: str
    inputs: int
    outputs: int
    copies: int = 1
    uses: int = 1


@lru_cache(maxsize=64)
def layer_memory(setup: TrainingSetup) -> LayerMemory:
    """Return what a decoder layer of the model takes: all of them are alike."""
    nbytes = dict.fromkeys(Alive, 0.0)
    for array in layer_arrays(setup):
        nbytes[array.alive] += array.nbytes
    return LayerMemory(
        parameters=_trained_parameters(setup),
        after_forward=nbytes[Alive.F_TO_I] + nbytes[Alive.F_TO_W],
        after_input=nbytes[Alive.F_TO_W] + nbytes[Alive.I_TO_W],
        during_frozen=nbytes[Alive.IN_FROZEN_F],
        during_forward=nbytes[Alive.IN_F],
        during_checkpoint=nbytes[Alive.IN_FROZEN_F] + nbytes[Alive.IN_RECOMPUTED_F],
        during_input=nbytes[Alive.IN_I],
    )


def layer_arrays(setup: TrainingSetup) -> list[Array]:
    """Return every array that a micro-batch makes in a trained layer."""
    counted = [*_norms(setup), *_attention_and_mlp(setup), *_trained_linears(setup)]
    mask = Array("causal mask", Alive.F_TO_I, setup.length**2, 1)
    return [*counted, mask, *_passing(setup)]


def _norms(setup: TrainingSetup) -> Iterator[Array]:
    """Yield what RMSNorm keeps.

    On Metal it is one kernel, which keeps its input alone. On a CPU it is computed in float32, and
    where its weight is trained the normalised states are kept too, beside which W needs the
    gradients of the norm's outputs.
    """
    shape, size, on_cpu = setup.shape, setup.dtype_bytes, setup.backend == "cpu"
    widths = _Widths.of(shape, setup.length)
    normed = 2 * widths.hidden
    if shape.qk_norm:
        normed += widths.queries + widths.keys
    elements = setup.tokens * normed
    yield Array("inputs of norms", Alive.F_TO_I, elements, FLOAT32 if on_cpu else size)
    if on_cpu and not setup.has_adapters:
        yield Array("normalised states", Alive.F_TO_W, elements, size)
        yield Array("gradients of the outputs of norms", Alive.I_TO_W, elements, size)


def _attention_and_mlp(setup: TrainingSetup) -> Iterator[Array]:
    """Yield what attention and MLP keep for the gradient of their inputs."""
    shape, tokens, size = setup.shape, setup.tokens, setup.dtype_bytes
    widths = _Widths.of(shape, setup.length)
    for name, width in {
        "scaled queries": widths.queries,
        "keys": widths.keys,
        "values": widths.keys,
        "attention probabilities": widths.scores,
        "gate": widths.mlp,
        "up": widths.mlp,
        "sigmoid of the gate": widths.mlp,
        "silu of the gate": widths.mlp,
    }.items():
        yield Array(name, Alive.F_TO_I, tokens * width, size)
    if shape.num_experts:
        answers = tokens * max(1, shape.experts_per_token) * widths.hidden
        yield Array("experts' answers before they are weighted", Alive.F_TO_I, answers, size)


def _trained_linears(setup: TrainingSetup) -> Iterator[Array]:
    """Yield what trained linear layers keep for the gradients of their weights or adapters."""
    tokens, size, trained = setup.tokens, setup.dtype_bytes, _trained(setup)
    each_input = tokens * sum(each.inputs * each.uses for each in trained)
    outputs = tokens * sum(each.outputs * each.uses for each in trained)
    itemsize = FLOAT32 if setup.has_adapters else size

    # Layers share an input that they use as it is. An adapter makes a float32 copy of its own, with
    # dropout, or where the input is of another type; of these a compiled stage makes one.
    is_compiled = setup.backend != "cpu" and not setup.dropout and not setup.masks
    converts = size != FLOAT32 and not is_compiled
    if setup.has_adapters and (setup.dropout or converts):
        inputs = each_input
    else:
        sources = {each.source: each.inputs * each.uses for each in trained}
        inputs = tokens * sum(sources.values())
    yield Array("inputs of trained linear layers", Alive.F_TO_W, inputs, itemsize)
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


def _passing(setup: TrainingSetup) -> Iterator[Array]:
    """Yield the arrays that exist only while an action runs: see ``Passing``."""
    tokens, size, widths = setup.tokens, setup.dtype_bytes, _Widths.of(setup.shape, setup.length)
    trains = "adapters" if setup.has_adapters else "weights"
    # An adapter's output is in float32, then cast; so is its gradient, and inside norms on a CPU.
    if setup.has_adapters:
        forward, backward = size if size == FLOAT32 else size + FLOAT32, float(FLOAT32)
    else:
        forward, backward = size, (size + FLOAT32) / 2 if setup.backend == "cpu" else size
    for name, alive, passing, itemsize in (
        ("frozen layer", Alive.IN_FROZEN_F, FROZEN, size),
        ("forward", Alive.IN_F, FORWARD[trains], forward),
        ("recomputed forward", Alive.IN_RECOMPUTED_F, RECOMPUTED[trains], forward),
        ("input gradient", Alive.IN_I, INPUT_GRADIENT, backward),
    ):
        yield Array(name, alive, tokens * passing.elements(widths), itemsize)
        yield Array(f"{name}: scores", alive, passing.scores * tokens * widths.scores, size)


def _trained(setup: TrainingSetup) -> list[_Linear]:
    """Return the linear layers that are trained, or that have adapters."""
    linears = _linears(setup.shape)
    keys = linears if setup.lora_keys is None or not setup.has_adapters else setup.lora_keys
    return [linears[key] for key in dict.fromkeys(keys) if key in linears]


def _linears(shape: ModelShape) -> dict[str, _Linear]:
    """Return the linear layers of a decoder layer, by the keys that LoRA knows them by."""
    h, f = shape.hidden_size, shape.intermediate_size
    q, k = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    linears = {
        "self_attn.q_proj": _Linear("attention", h, q),
        "self_attn.k_proj": _Linear("attention", h, k),
        "self_attn.v_proj": _Linear("attention", h, k),
        "self_attn.o_proj": _Linear("values", q, h),
    }
    if not shape.num_experts:
        return linears | {
            "mlp.gate_proj": _Linear("mlp", h, f),
            "mlp.up_proj": _Linear("mlp", h, f),
            "mlp.down_proj": _Linear("product", f, h),
        }
    many = (shape.num_experts, shape.experts_per_token)
    moe = "block_sparse_moe"
    return linears | {
        f"{moe}.gate": _Linear("mlp", h, shape.num_experts),
        f"{moe}.switch_mlp.gate_proj": _Linear("experts", h, f, *many),
        f"{moe}.switch_mlp.up_proj": _Linear("experts", h, f, *many),
        f"{moe}.switch_mlp.down_proj": _Linear("product", f, h, *many),
    }


def _trained_parameters(setup: TrainingSetup) -> int:
    if not setup.has_adapters:
        return setup.shape.layer_parameters(0)
    has_magnitudes = setup.fine_tune_type == "dora"
    return sum(
        each.copies
        * (setup.lora_rank * (each.inputs + each.outputs) + has_magnitudes * each.outputs)
        for each in _trained(setup)
    )
