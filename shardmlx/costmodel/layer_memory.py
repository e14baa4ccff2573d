"""What one decoder layer holds and makes of one micro-batch, array by array. No MLX, no MPI.

The arrays are those that the graph of ``mx.vjp`` refers to, counted on real stages in float32 and
bfloat16 on the CPU: llama, mistral, qwen2, qwen3 and mixtral; the others are built alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardmlx.config.checks import FINE_TUNE_TYPES, OPTIMIZERS
from shardmlx.models.shape import ModelShape
from shardmlx.partitioners.costs import LayerCosts

FLOAT32 = 4
"""Bytes. Sums of gradients, adapters and what they compute are in float32."""

BACKENDS = ("metal", "cpu")
"""What MLX computes with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """What decides the memory of training. ``ValueError`` for what cannot be.

    ``weight_sizes`` are bytes of parameters as held in memory, a tied matrix in ``embedding``;
    ``dtype_bytes`` those of an activation; ``rows`` x ``length`` the tokens of a micro-batch.
    ``first_trained_layer`` is the number of layers if none is trained. ``lora_keys`` None means
    all linear layers, as in mlx-lm. ``dropout``: the adapters drop some of their input.
    ``first_moment``: Adafactor with a beta_1, which then keeps one as large as the weights.
    ``masks``: of ``length`` x ``length`` bytes, that all layers share.
    """

    shape: ModelShape
    weight_sizes: LayerCosts
    dtype_bytes: int
    rows: int
    length: int
    fine_tune_type: str = "lora"
    first_trained_layer: int = 0
    lora_rank: int = 8
    lora_keys: tuple[str, ...] | None = None
    dropout: bool = False
    unfreeze_all: bool = False
    optimizer: str = "adam"
    first_moment: bool = False
    grad_checkpoint: bool = False
    masks: int = 0
    dp: int = 1
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
        """Of a micro-batch."""
        return self.rows * self.length

    @property
    def message(self) -> int:
        """Bytes of the hidden states of a micro-batch, as they go from stage to stage."""
        return self.dtype_bytes * self.tokens * self.shape.hidden_size

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained, not the weights themselves."""
        return self.fine_tune_type != "full"


class LayerMemory(NamedTuple):
    """Of one trained layer: its trained parameters in number, the rest in bytes.

    ``after_*`` is held by each micro-batch, ``during_*`` exists while the layer runs, beside
    what is held: in a layer without backward, in F, under checkpointing, in I.
    """

    parameters: int
    after_forward: float
    after_input: float
    during_frozen: float
    during_forward: float
    during_checkpoint: float
    during_input: float


class _Linear(NamedTuple):
    """A linear layer: ``source`` names its input, which it may share with others.

    ``copies`` matrices, experts, of which each token passes through ``uses``.
    """

    source: str
    inputs: int
    outputs: int
    copies: int = 1
    uses: int = 1


def layer_memory(setup: TrainingSetup) -> LayerMemory:
    """Of any decoder layer of the model: they are alike."""
    shape, size = setup.shape, setup.dtype_bytes
    uses = max(1, shape.experts_per_token)
    h, f = shape.hidden_size, shape.intermediate_size * uses
    q, k = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    scores = shape.num_heads * setup.length
    has_adapters, on_cpu = setup.has_adapters, setup.backend == "cpu"

    linears = _linears(shape)
    keys = linears if setup.lora_keys is None or not has_adapters else setup.lora_keys
    trained = {key: linears[key] for key in keys if key in linears}
    inputs_each = sum(each.inputs * each.uses for each in trained.values())
    outputs_each = sum(each.outputs * each.uses for each in trained.values())

    # RMSNorm: its input. Without a kernel for it, computed in float32, and where its weight is
    # trained the normalised states too, beside which W needs the gradient of the output.
    normed = 2 * h + (q + k) * shape.qk_norm
    norms = normed * (FLOAT32 if on_cpu else size)
    norms_for_weight = 2 * normed * size if on_cpu and not has_adapters else 0

    # Scaled queries, keys, values, probabilities; gate, up, sigmoid, and their product silu;
    # what experts answer, before it is weighted.
    core = (q + 2 * k + scores + 4 * f) * size
    if shape.num_experts:
        core += uses * h * size

    # Inputs of trained linear layers, shared where they are used as they are. An adapter makes
    # its own of it, in float32, with dropout, or where that is another type; of these a compiled
    # stage makes one.
    compiled = not (on_cpu or setup.dropout or setup.masks)
    if has_adapters and (setup.dropout or (size != FLOAT32 and not compiled)):
        inputs = inputs_each * FLOAT32
    else:
        sources = {each.source: each.inputs * each.uses for each in trained.values()}
        inputs = sum(sources.values()) * (FLOAT32 if has_adapters else size)
    masks = inputs_each * size * setup.dropout
    outputs = outputs_each * (FLOAT32 if has_adapters else size)
    low_rank = sum(each.uses for each in trained.values()) * setup.lora_rank * FLOAT32
    low_rank *= has_adapters
    # DoRA scales each output, and needs it and the gradient of the scaled one.
    scaled = outputs_each * size * (setup.fine_tune_type == "dora")

    after_forward = norms + norms_for_weight / 2 + core + inputs + masks + low_rank + scaled
    after_input = norms_for_weight + inputs + outputs + 2 * low_rank + 2 * scaled

    # The arrays that pass; these numbers are fitted. Residual and norm: h; projections, rotary
    # embedding, transposition: q, k; MLP: f. In F those that no gradient needs.
    frozen = (7 * h + 2 * f + 7 * q + 4 * k + scores) * size
    # An adapter's output is in float32, then cast; so is its gradient, and inside norms on a CPU.
    wide = size if size == FLOAT32 or not has_adapters else size + FLOAT32
    forward = (4 * h + 2 * f + 2 * q) * wide if has_adapters else (2 * h + 5 * q + k) * size
    widened = FLOAT32 if has_adapters else (size + FLOAT32) / 2 if on_cpu else size
    backward = (10 * h + 3 * f + 6 * q + 4 * k) * widened + 1.5 * scores * size
    tokens = setup.tokens
    return LayerMemory(
        parameters=_trained_parameters(setup, trained),
        after_forward=tokens * after_forward + setup.length**2,  # and the mask, one byte each
        after_input=tokens * after_input,
        during_frozen=tokens * frozen,
        during_forward=tokens * forward,
        during_checkpoint=tokens * (frozen + (2 * h + (3 if has_adapters else 1) * f) * wide),
        during_input=tokens * backward,
    )


def _linears(shape: ModelShape) -> dict[str, _Linear]:
    """The linear layers of a decoder layer, by the keys that LoRA knows them by."""
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


def _trained_parameters(setup: TrainingSetup, trained: dict[str, _Linear]) -> int:
    if not setup.has_adapters:
        return setup.shape.layer_parameters(0)
    magnitudes = setup.fine_tune_type == "dora"
    return sum(
        each.copies * (setup.lora_rank * (each.inputs + each.outputs) + magnitudes * each.outputs)
        for each in trained.values()
    )
