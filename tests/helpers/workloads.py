"""The work of a run on a model of which nothing but its shape is here."""

from __future__ import annotations

from typing import Any

from shardmlx.config.train import TrainConfig
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.partitioners import LayerCosts
from shardmlx.planning.facts.workload import DTYPE_BYTES, Workload


def parameter_bytes(shape: ModelShape, size: int = 4) -> LayerCosts:
    """Return the bytes of parameters that have so many each."""
    layers = tuple(shape.layer(i).parameters * float(size) for i in range(shape.num_layers))
    embedding, head = shape.vocab_size * shape.hidden_size, shape.head_parameters()
    return LayerCosts(layers, embedding * float(size), head * float(size))


def workload(
    shape: ModelShape, dtype: str = "float32", sizes: LayerCosts | None = None, **options: Any
) -> Workload:
    """Return the work of a run with these options, which trains all layers if they say no less."""
    config = TrainConfig.from_flat(**{"num_layers": -1, **options})
    return Workload(
        shape=shape,
        weight_sizes=sizes or parameter_bytes(shape, DTYPE_BYTES[dtype]),
        dtype=dtype,
        fine_tune=config.tune,
        batch=config.batch,
        saves=config.spec.saves,
    )
