"""What training costs on each layer: the numbers that a partitioner balances."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardmlx.errors import UserError
from shardmlx.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Cost of each decoder layer, of the embedding (first stage), of norm and head (last stage).

    Any one unit: seconds, FLOPs, bytes. ``ValueError`` for what is negative or not finite.
    """

    layers: tuple[float, ...]
    embedding: float = 0.0
    head: float = 0.0

    def __post_init__(self) -> None:
        for cost in (*self.layers, self.embedding, self.head):
            if not (math.isfinite(cost) and cost >= 0):
                raise ValueError(f"a cost of {cost}")

    def total(self, start: int, stop: int) -> float:
        """Cost of the stage with layers ``start`` to ``stop``, embedding and head included."""
        ends = (self.embedding * (start == 0), self.head * (stop == len(self.layers)))
        return math.fsum((*self.layers[start:stop], *ends))

    def check_stages(self, num_stages: int) -> None:
        """``UserError`` unless the layers make that many stages, none of them empty."""
        if num_stages < 1:
            raise UserError(f"{num_stages} pipeline stages: give 1 or more")
        if num_stages > len(self.layers):
            raise UserError(
                f"{num_stages} stages, but the model has {len(self.layers)} layers: "
                f"use at most {len(self.layers)} stages"
            )


def train_costs(
    shape: ModelShape, sequence_length: int, first_trained_layer: int, trains_weights: bool
) -> LayerCosts:
    """FLOPs a token of one training step, in the manner of the 6N rule (Kaplan et al. 2020).

    Every layer and the head pay their forward. From the first trained layer up, head included,
    they pay the same again for the gradient of their input; when the weights themselves are
    trained, those layers pay it a third time. The weight gradients of LoRA, a stage's optimizer
    step and the embedding's lookup count nothing, and the lowest trained layer pays for a whole
    input gradient, of which it needs only the part above its lowest trained weight.
    ``first_trained_layer = num_layers`` means evaluation: nothing but forward.
    """
    if not 0 <= first_trained_layer <= shape.num_layers:
        raise ValueError(f"first trained layer {first_trained_layer} of {shape.num_layers}")
    backward = 2 if trains_weights else 1
    layers = tuple(
        shape.layer_flops(layer, sequence_length) * (1 + backward * (layer >= first_trained_layer))
        for layer in range(shape.num_layers)
    )
    is_training = first_trained_layer < shape.num_layers
    return LayerCosts(layers, head=shape.head_flops() * (1 + is_training))


def weight_sizes(shape: ModelShape, parameter_bytes: float = 2.0) -> LayerCosts:
    """Bytes of the parameters of a model that is not quantised.

    A tied head counts as the embedding it is: the last stage holds it too.
    """
    return LayerCosts(
        tuple(shape.layer_parameters(i) * parameter_bytes for i in range(shape.num_layers)),
        embedding=shape.embedding_parameters() * parameter_bytes,
        head=(shape.hidden_size + shape.embedding_parameters()) * parameter_bytes,
    )
