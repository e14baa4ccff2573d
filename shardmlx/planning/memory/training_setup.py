"""State the facts that decide the memory of training. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardmlx.config.specs import FULL, NO_SAVINGS, SELECTIVE, FineTune, Savings
from shardmlx.models.sizes.layer_shape import LayerShape, fuses_attention
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.planning.facts.workload import Workload

FLOAT32 = 4
"""Bytes of an element of the sums of gradients, of adapters, and of adapters' arrays."""

BACKENDS = ("metal", "cpu")


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
    """Facts that decide training's memory: ``dp`` replicas, micro-batches ``rows`` x ``length``."""

    workload: Workload = field(hash=False)  # it has dictionaries
    rows: int
    length: int
    dp: int = 1
    backend: str = BACKENDS[0]
    savings: Savings = NO_SAVINGS
    measured: MeasuredRatios | None = None

    @property
    def shape(self) -> ModelShape:
        """The shape of the model, or of a rank's share of it."""
        return self.workload.shape

    @property
    def tune(self) -> FineTune:
        """The part of the model that is trained, and its optimizer."""
        return self.workload.fine_tune

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an element of the activations."""
        return self.workload.dtype_bytes

    @property
    def lora(self) -> Mapping[str, Any]:
        """Parameters of adapters. A full fine-tune ignores them, even invalid ones."""
        return {} if self.tune.is_full else self.tune.lora_parameters

    @property
    def dropout(self) -> bool:
        """True if adapters drop some of their inputs, and keep masks of them."""
        return bool(self.lora.get("dropout"))

    @property
    def divides_weights(self) -> bool:
        """True if each replica holds a part of the weights, and gathers the others."""
        return self.tune.divides_weights and self.dp > 1

    @property
    def masks(self) -> int:
        """Number of masks of ``length`` x ``length`` bytes that all layers of packed rows share."""
        return (1 + any(self.shape.windows)) * bool(self.workload.batch.pack)

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
        chunk = self.savings.attention_chunk
        takes = self.shape.family.takes_pieces
        return chunk if takes and chunk is not None and chunk < self.length else None

    def fuses_attention(self, layer: LayerShape) -> bool:
        """Tell whether MLX computes a layer's attention and its gradient without the scores."""
        return (
            self.backend == "metal"
            and self.shape.family.takes_pieces
            and fuses_attention(
                self.length,
                layer.window,
                (layer.heads.key_dim, layer.heads.value_dim),
                is_packed=bool(self.workload.batch.pack),
                has_sinks=any(path.endswith("sinks") for path, _ in layer.arrays),
            )
        )

    def holds_scores(self, layer: LayerShape) -> bool:
        """Tell whether the scores of all positions of a layer are in memory at a time."""
        return self.attention_piece is None and not self.fuses_attention(layer)

    @property
    def loss_piece(self) -> int | None:
        """Positions whose logits are in memory at a time; None if all are."""
        chunk = self.savings.loss_chunk
        if chunk is None or not self.savings.takes_loss_in_pieces(self.tokens):
            return None
        return min(chunk, 2 * self.tokens)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, padding among them."""
        return self.rows * self.length

    @property
    def message(self) -> int:
        """Bytes of the hidden states of a micro-batch, which go from stage to stage."""
        return self.dtype_bytes * self.tokens * (self.shape.hidden_size + self.shape.carried_size)
