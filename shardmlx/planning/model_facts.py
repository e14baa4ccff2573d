"""Say what is special about a model that is planned. No MLX, no MPI."""

from __future__ import annotations

from dataclasses import dataclass

from shardmlx.common.formatting import gibibytes
from shardmlx.costmodel.predict import Prediction
from shardmlx.costmodel.workload import ModelSizes, Workload
from shardmlx.models.undeclared import APPROXIMATE


@dataclass(frozen=True, slots=True)
class ExpertTraffic:
    """Bytes that a token sends in the forward pass: with ``stages`` of whole layers, and with the
    ``experts`` of each layer on all machines."""

    stages: int
    experts: int

    @classmethod
    def of(cls, sizes: ModelSizes, machines: int) -> ExpertTraffic:
        """Return those of a model on so many machines.

        A stage sends the hidden states once. A layer of experts would send them to each other
        machine that has one of a token's experts, and get as much back from it.
        """
        message = sizes.dtype_bytes * sizes.shape.hidden_size
        layers = map(sizes.shape.layer, range(sizes.shape.num_layers))
        asked = sum(min(layer.experts_per_token, machines - 1) for layer in layers)
        return cls(message * (machines - 1), 2 * message * asked)


def facts_of(workload: Workload, prediction: Prediction) -> list[str]:
    """Return a line about each."""
    facts = []
    if not workload.shape.is_declared:
        facts.append(APPROXIMATE)
    machines = prediction.plan.mesh.pp
    traffic = ExpertTraffic.of(workload, machines)
    if traffic.experts and machines > 1:
        a_step = traffic.experts * prediction.tokens
        facts.append(
            "why stages hold whole layers with all their experts: a token sends "
            f"{gibibytes(traffic.stages)} forward, and with experts on all machines up to "
            f"{gibibytes(traffic.experts)}, {traffic.experts / traffic.stages:.0f} times as much "
            f"({gibibytes(traffic.stages * prediction.tokens)} and {gibibytes(a_step)} a step)"
        )
    return facts
