"""A model and what a run trains of it: facts behind times and memory. No MLX, no MPI."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from shardmlx.config.specs import COUNTED, BatchOptions, FineTune, Savings
from shardmlx.distributed.wire_formats import WIRE_FORMATS
from shardmlx.errors import UserError
from shardmlx.modelfiles.model_files import ModelFiles
from shardmlx.modelfiles.parts import Inspection, Part, inspect_files, needed_shape
from shardmlx.modelfiles.published_packing import check_packing, published_packing
from shardmlx.modelfiles.safetensors_header import DTYPE_BITS
from shardmlx.modelfiles.tensors import scale_group
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.models.sizes.shares import TensorShares
from shardmlx.partitioners import LayerCosts

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The types of weights that compute, as a header and as MLX name them."""

DTYPE_BYTES = {name: DTYPE_BITS[stored] // 8 for stored, name in DTYPES.items()}
"""Bytes of an element of each type, as MLX names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """A model as ranks hold it: ``dtype`` of activations, bytes of weights in memory."""

    shape: ModelShape
    weight_sizes: LayerCosts
    dtype: str
    quantization: Mapping[str, Any] | None = None
    group_size: int = 1
    """The most weights that share a scale."""

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an element of the activations."""
        return DTYPE_BYTES[self.dtype]

    @property
    def held_sizes(self) -> LayerCosts:
        """The ``weight_sizes`` with a tied matrix at both ends, whose stages both hold it."""
        sizes = self.weight_sizes
        return replace(sizes, head=sizes.head + self.shape.tied * sizes.embedding)


def shared(
    whole: ModelShape, sizes: LayerCosts, shares: TensorShares, rank: int
) -> tuple[ModelShape, LayerCosts]:
    """Return the shape and the bytes of weights of the part that a rank of a group holds."""
    own = shares.of(whole, rank)
    layers = tuple(
        size * own.layer(i).parameters / whole.layer(i).parameters
        for i, size in enumerate(sizes.layers)
    )
    return own, replace(sizes, layers=layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(ModelSizes):
    """A model, what a run trains of it, and its batches; ``counted`` is the share of the tokens
    that count in the loss, ``copies`` how many float32 copies of trained weights an island holds.
    It ``saves`` checkpoints, or none. Raises ``UserError`` if the model cannot be trained so."""

    fine_tune: FineTune
    batch: BatchOptions
    counted: float = 1.0
    copies: int = 0
    saves: bool = False

    @classmethod
    def of(
        cls, files: ModelFiles, fine_tune: FineTune, batch: BatchOptions, saves: bool = False
    ) -> Workload:
        """Return the work of a run on a model with known headers."""
        sizes = model_sizes(files, fine_tune.dtype)
        known = {each.name: getattr(sizes, each.name) for each in fields(ModelSizes)}
        # Options that are left to the run, as mlx_lm.lora has them.
        batch = replace(batch, pack=bool(batch.pack), recompute=batch.recomputed)
        return cls(**known, fine_tune=fine_tune, batch=batch, saves=saves)

    def __post_init__(self) -> None:
        if self.fine_tune.num_layers > self.shape.num_layers:
            raise UserError(
                f"--num-layers {self.fine_tune.num_layers}: the model has {self.shape.num_layers} "
                "layers; -1 trains all of them"
            )
        if self.shape.untrained and self.fine_tune.train:
            raise UserError(
                f"{self.shape.model_type} models cannot be trained: {self.shape.untrained}",
                "generate with it, or train another model",
            )
        if self.fine_tune.train and self.fine_tune.master_weights and self.dtype_bytes > 2:
            raise UserError(
                f"master_weights: the model's weights are {self.dtype} already",
                "leave it out, or give --dtype bfloat16",
            )
        is_full = self.fine_tune.train and self.fine_tune.is_full
        if is_full and self.quantization is not None:
            raise UserError(
                "--fine-tune-type full: MLX has no gradients for quantised weights, which this "
                "model has",
                "use lora, or the model before it was quantised",
            )

    @property
    def first_trained(self) -> int:
        """Lowest layer with a backward pass; a trained embedding's comes down through all."""
        return 0 if self.fine_tune.unfreeze_all else self.first_trained_layer

    @property
    def first_trained_layer(self) -> int:
        """The lowest layer with trained weights, ``num_layers`` where none has."""
        count = self.shape.num_layers
        trained = self.fine_tune.num_layers
        if not self.fine_tune.train:
            return count
        return count - trained if trained > 0 else 0

    @property
    def error_copies(self) -> int:
        """Copies of what is rounded off that a replica holds: for checkpoints the last one too."""
        return self.fine_tune.keeps_errors * (1 + self.saves)

    @property
    def head_share(self) -> float:
        """Share of the tokens for which the lm_head computes logits."""
        return self.counted if self.batch.loss_chunk == COUNTED else 1.0

    def micro_batch(self, rows: int, length: int) -> tuple[int, int]:
        """Return (rows, tokens a row) as they are computed: with --pack one row of all."""
        return (1, rows * length) if self.batch.pack else (rows, length)

    def sum_bytes(self, gradients: int) -> int:
        """Return the bytes sent once for gradients of these bytes in float32."""
        return WIRE_FORMATS[self.fine_tune.sum_dtype].nbytes(gradients // DTYPE_BYTES["float32"])

    def savings(self, backend: str) -> Savings:
        """Return what stages do to hold less, on machines of one backend."""
        return self.batch.savings(backend, self.shape.vocab_size)


def model_sizes(files: ModelFiles, dtype: str | None) -> ModelSizes:
    """Return the sizes of a model cast to ``dtype``, if any; ``UserError`` if it is not a model."""
    inspection = inspect_files(files)
    if inspection.shape is None:
        needed_shape(files)
        raise UserError(f"{files.name} is not a model that can be trained", "name one with weights")
    check_packing(files.config, inspection.shape, files.tensors)
    packing = published_packing(files.config)
    unpacked = None if packing is None or packing.loaded is not None else dtype or "bfloat16"
    return ModelSizes(
        shape=inspection.shape,
        weight_sizes=LayerCosts(
            tuple(_held(layer, dtype, unpacked) for layer in inspection.layers),
            _held(inspection.embedding, dtype, unpacked),
            _held(inspection.head, dtype, unpacked),
        ),
        dtype=dtype or activation_dtype(inspection),
        quantization=files.config.get("quantization"),
        group_size=scale_group(files.config),
    )


def activation_dtype(inspection: Inspection) -> str:
    """Return the type that activations are computed in: that of the final norm, which is never
    quantised, or of the embedding, if the norm has no weight."""
    shape = inspection.shape
    norm = "model.norm" if shape is None else shape.names.norm or shape.names.embedding
    ends = (*inspection.head.tensors, *inspection.embedding.tensors)
    named = {each.name: each.place.dtype for each in ends}
    stored = named.get(f"{norm}.scales") or named.get(f"{norm}.weight", "none")
    if stored not in DTYPES:
        raise UserError(
            f"the weights are stored as {stored}", "use --dtype float32, bfloat16 or float16"
        )
    return DTYPES[stored]


def only_dtype(files: ModelFiles) -> str | None:
    """Return the type of all weights of a model that are not packed; None if they have several."""
    stored = {each.dtype for each in files.tensors.values() if "F" in each.dtype}
    return DTYPES.get(stored.pop()) if len(stored) == 1 else None


def _held(part: Part, dtype: str | None, unpacked: str | None) -> float:
    """Return bytes in memory: --dtype casts weights of floating types, 8-bit floats are loaded in
    the type ``unpacked``, and AWQ's zeros of 4 bits become biases."""
    total = 0
    for tensor in part.tensors:
        stored = tensor.place.dtype
        to = dtype
        if stored.startswith("F8") and unpacked is not None:
            to = unpacked
        elif stored not in DTYPES:
            to = None
        size = math.prod(tensor.place.shape)
        if tensor.name.endswith(".qzeros"):
            size = 8 * size
            to = dtype or "float16"
        total += tensor.place.nbytes if to is None else size * DTYPE_BYTES[to]
    return float(total)
