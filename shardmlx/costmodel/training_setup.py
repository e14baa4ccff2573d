"""State the facts that decide the memory of training. No MLX, no MPI."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardmlx.config.checks import FINE_TUNE_TYPES, OPTIMIZERS
from shardmlx.config.specs import FULL, NO_SAVINGS, SELECTIVE, Savings
from shardmlx.models.shape import ModelShape
from shardmlx.partitioners import LayerCosts

FLOAT32 = 4
"""Bytes of an element of the sums of gradients, of adapters, and of adapters' arrays."""

BACKENDS = ("metal", "cpu")
"""Backends of MLX."""


class Ratios(NamedTuple):
    """Measured bytes over those of the rule: held after F and I, passing in F and in the rest."""

    after_forward: float = 1.0
    after_input: float = 1.0
    during_forward: float = 1.0
    during_backward: float = 1.0


class MeasuredRatios(NamedTuple):
    """Ratios of the first layers, of the last ones, and of each kind of layer."""

    first: Ratios
    last: Ratios
    kinds: tuple[Ratios, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """The facts that decide the memory of training. Raises ``ValueError`` for a contradiction."""

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
    savings: Savings = NO_SAVINGS
    masks: int = 0
    """Number of masks of ``length`` x ``length`` bytes that all layers of packed rows share."""
    dp: int = 1
    """Number of replicas."""
    divides_optimizer: bool = False
    """True if each replica holds the optimizer's state only for its part of the weights."""
    divides_weights: bool = False
    """True if each replica holds a part of the weights, and gathers the others layer by layer."""
    master_weights: bool = False
    """True if weights of 16 bits are updated as float32 copies, with state in float32."""
    error_copies: int = 0
    """Number of copies of the sums' rounding errors that a replica holds."""
    backend: str = "metal"
    measured: MeasuredRatios | None = None
    """Measurements of a profile, if there are any of such micro-batches."""

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
        if self.divides_weights and not (self.divides_optimizer and self.dp > 1):
            raise ValueError(f"divides_weights without the optimizer, or with dp {self.dp}")
        if self.unfreeze_all and self.has_adapters:
            raise ValueError(f"unfreeze_all with {self.fine_tune_type}: full only")

    @property
    def grad_checkpoint(self) -> bool:
        """True if a layer holds its input alone."""
        return self.savings.recompute == FULL

    @property
    def joins_weights(self) -> bool:
        """True if the gradients of weights are computed with those of the stage's input."""
        return self.grad_checkpoint or self.divides_weights

    @property
    def is_selective(self) -> bool:
        """True if norms and activations hold their inputs alone."""
        return self.savings.recompute == SELECTIVE

    @property
    def attention_piece(self) -> int | None:
        """Queries of a piece of attention; None if attention is computed at once."""
        chunk, takes = self.savings.attention_chunk, self.shape.family.takes_pieces
        return chunk if takes and chunk is not None and chunk < self.length else None

    @property
    def loss_piece(self) -> int | None:
        """Positions whose logits are in memory at a time; None if all are."""
        chunk = self.savings.loss_chunk
        if chunk is None or not self.savings.takes_loss_in_pieces(self.tokens):
            return None
        return min(chunk, 2 * self.tokens)

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
