"""A model and what a run trains of it: what times and memory depend on, beside the layout. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardmlx.config.train import TrainConfig
from shardmlx.costmodel.memory import TrainingSetup
from shardmlx.costmodel.profile_file import Profile, work_of
from shardmlx.costmodel.timing import Measured, Speed
from shardmlx.errors import UserError
from shardmlx.modelfiles.model_files import ModelFiles
from shardmlx.modelfiles.parts import Part, inspect_files
from shardmlx.models.shape import ModelShape
from shardmlx.partitioners.costs import LayerCosts

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Of weights that compute, as a header and as MLX name them."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training run's work.

    ``dtype`` is that of activations, ``weight_sizes`` in memory, ``quantization`` as config.json
    has it.
    """

    shape: ModelShape
    weight_sizes: LayerCosts
    dtype: str
    config: TrainConfig
    quantization: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, files: ModelFiles, config: TrainConfig) -> Workload:
        """The work of ``config`` on a model of which the headers are known."""
        inspection = inspect_files(files)
        if inspection.shape is None:
            # The shape says by itself what is wrong with the configuration.
            ModelShape.from_config(files.config)
            raise UserError(f"{files.name} is no model that can be trained: name one with weights")
        dtype = config.dtype or activation_dtype(inspection.head)
        sizes = LayerCosts(
            tuple(_held(layer, config.dtype) for layer in inspection.layers),
            _held(inspection.embedding, config.dtype),
            _held(inspection.head, config.dtype),
        )
        return cls(
            shape=inspection.shape,
            weight_sizes=sizes,
            dtype=dtype,
            config=config,
            quantization=files.config.get("quantization"),
        )

    def __post_init__(self) -> None:
        if self.config.num_layers > self.shape.num_layers:
            raise UserError(
                f"--num-layers {self.config.num_layers}: the model has {self.shape.num_layers} "
                "layers; -1 trains all of them"
            )
        is_full = self.config.train and self.config.fine_tune_type == "full"
        if is_full and self.quantization is not None:
            raise UserError(
                "--fine-tune-type full: MLX has no gradients for quantised weights, which this "
                "model has: use lora, or the model before it was quantised"
            )

    @property
    def held_sizes(self) -> LayerCosts:
        """``weight_sizes`` with a tied matrix at both ends, whose stages both hold it."""
        sizes = self.weight_sizes
        return replace(sizes, head=sizes.head + self.shape.tied * sizes.embedding)

    @property
    def first_trained(self) -> int:
        """Where the backward pass ends: at the lowest layer with trained weights.

        A trained embedding counts as layer 0: its gradient comes down through all of them.
        """
        return 0 if self.config.unfreeze_all else self.first_trained_layer

    @property
    def first_trained_layer(self) -> int:
        """The lowest layer with trained weights, ``num_layers`` where none has."""
        config, count = self.config, self.shape.num_layers
        if not config.train:
            return count
        return count - config.num_layers if config.num_layers > 0 else 0

    def micro_batch(self, rows: int, length: int) -> tuple[int, int]:
        """(rows, tokens a row) that are computed for so many sequences of ``length``; with --pack
        one row of all."""
        return (1, rows * length) if self.config.pack else (rows, length)

    def setup(
        self, rows: int, length: int, *, checkpoint: bool, dp: int, backend: str
    ) -> TrainingSetup:
        """What decides the memory of the run with micro-batches of ``rows`` x ``length``."""
        config = self.config
        rows, length = self.micro_batch(rows, length)
        # A full fine-tune may have anything there: it is not looked at.
        lora = {} if config.fine_tune_type == "full" else config.lora_parameters
        keys = lora.get("keys")
        return TrainingSetup(
            shape=self.shape,
            weight_sizes=self.weight_sizes,
            dtype_bytes=DTYPE_BYTES[self.dtype],
            rows=rows,
            length=length,
            fine_tune_type=config.fine_tune_type,
            first_trained_layer=self.first_trained_layer,
            dropout=bool(lora.get("dropout")),
            lora_rank=lora.get("rank", 8),
            lora_keys=None if keys is None else tuple(keys),
            unfreeze_all=config.unfreeze_all,
            optimizer=config.optimizer,
            first_moment=_has_first_moment(config),
            grad_checkpoint=checkpoint,
            masks=(1 + any(self.shape.windows)) * config.pack,
            dp=dp,
            backend=backend,
        )

    def at_speed(self, flops: float, checkpoint: bool) -> Speed:
        """Its times on a machine of which only the speed is known."""
        return Speed(
            shape=self.shape,
            flops=flops,
            first_trained=self.first_trained,
            trains_weights=self.config.fine_tune_type == "full",
            trains_ends=self.config.unfreeze_all,
            checkpoint=checkpoint,
        )

    def measured(self, profile: Profile, host: str, kind: str | None, checkpoint: bool) -> Measured:
        """Its times on a machine that was measured; ``UserError`` if it was not, or otherwise."""
        profile.check(work_of(self.config, self.shape, self.dtype, self.quantization))
        return profile.measured(host, kind, self.shape.num_layers, self.first_trained, checkpoint)


def _has_first_moment(config: TrainConfig) -> bool:
    """Whether Adafactor keeps a mean of gradients too; the others do or not by their nature."""
    settings = config.optimizer_config.get("adafactor") or {}
    return config.optimizer == "adafactor" and settings.get("beta_1") is not None


def activation_dtype(head: Part) -> str:
    """What activations are computed in: the final norm is never quantised."""
    stored = next((t.place.dtype for t in head.tensors if t.name == "model.norm.weight"), "none")
    if stored not in DTYPES:
        raise UserError(
            f"the weights are stored as {stored}: use --dtype float32, bfloat16 or float16"
        )
    return DTYPES[stored]


def _held(part: Part, dtype: str | None) -> float:
    """Bytes in memory: a --dtype casts what is stored in a floating type."""
    tensors: Iterable[tuple[int, str, int]] = (
        (tensor.place.nbytes, tensor.place.dtype, math.prod(tensor.place.shape))
        for tensor in part.tensors
    )
    return float(
        sum(
            nbytes if dtype is None or stored not in DTYPES else count * DTYPE_BYTES[dtype]
            for nbytes, stored, count in tensors
        )
    )
