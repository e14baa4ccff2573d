"""Divide a model, and find the tensors and bytes that each stage needs. No MLX, no MPI."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmlx.costmodel.generation_memory import GenerationSetup, inference_memory
from shardmlx.costmodel.timing import TYPICAL_LENGTH
from shardmlx.costmodel.workload import DTYPE_BYTES, activation_dtype, model_sizes
from shardmlx.errors import UserError
from shardmlx.modelfiles.parts import Inspection, Part
from shardmlx.partitioners import LayerCosts, Problem, get_partitioner
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.layout import costs_by_speed

if TYPE_CHECKING:
    from shardmlx.costmodel.hostfile import Machine


@dataclass(frozen=True)
class Split:
    """A model in stages, and the machine of each pipeline rank, if machines are known."""

    inspection: Inspection
    stage_map: StageMap
    machines: tuple[Machine, ...] = ()
    generation: GenerationSetup | None = None

    def stage(self, stage: int) -> Part:
        return self.inspection.stage(*self.stage_map.partition.ranges[stage])

    def rank(self, rank: int) -> Part:
        """Return the tensors of all stages of a pipeline rank, each once. Raises ``UserError``."""
        if rank >= self.stage_map.pp:
            raise UserError(f"--rank {rank}", f"the ranks are 0 to {self.stage_map.pp - 1}")
        held = (t for stage in self.stage_map.stages_of(rank) for t in self.stage(stage).tensors)
        return Part(tuple({tensor.name: tensor for tensor in held}.values()))

    def host(self, rank: int) -> str | None:
        """Return the host of a pipeline rank, if it is known."""
        return self.machines[rank].host if self.machines else self.stage_map.host_of(rank)

    def memory(self, rank: int) -> float | None:
        """Return the bytes that a pipeline rank may use of its machine, if they are known."""
        return _usable(self.machines[rank]) if self.machines else None

    def nbytes(self, stage: int) -> float:
        """Return the bytes of a stage: weights, and the memory of generating."""
        start, stop = self.stage_map.partition.ranges[stage]
        return _peak(self.inspection, self.generation)(stage, start, stop)


def divide(
    inspection: Inspection,
    partitioner: str,
    num_stages: int,
    machines: tuple[Machine, ...] = (),
    generation: GenerationSetup | None = None,
) -> StageMap:
    """Divide a model among ranks with one stage each, by the cost of a forward pass, or by bytes if
    the family is unknown; ``machines`` has one for each, or none."""
    shape, sizes = inspection.shape, _sizes(inspection)
    costs = sizes
    if shape is not None:
        flops = (shape.layer(i).flops(TYPICAL_LENGTH) for i in range(shape.num_layers))
        costs = LayerCosts(tuple(flops), head=float(shape.head_flops()))
    timed = machines if shape is not None else ()
    problem = Problem(
        placement=tuple(range(num_stages)),
        costs=costs_by_speed(costs, timed, num_stages),
        sizes=sizes,
        peak=_peak(inspection, generation),
        capacity=tuple(_usable(each) or math.inf for each in machines),
        hosts=tuple(each.host for each in timed),
    )
    return get_partitioner(partitioner)(problem)


def _usable(machine: Machine) -> int | None:
    return machine.wired or machine.memory


def _sizes(inspection: Inspection) -> LayerCosts:
    """Return bytes, with a tied matrix on both ends, which both hold it."""
    embedding, head = inspection.embedding.nbytes, inspection.head.nbytes
    layers = tuple(layer.nbytes for layer in inspection.layers)
    return LayerCosts(layers, embedding, head + inspection.tied * embedding)


def _peak(
    inspection: Inspection, generation: GenerationSetup | None
) -> Callable[[int, int, int], float]:
    """Return the bytes of a stage; one that is first and last holds a tied matrix once."""
    sizes, layers = _sizes(inspection), len(inspection.layers)

    def peak(stage: int, start: int, stop: int) -> float:
        if generation is not None:
            return inference_memory(generation, start, stop)
        twice = inspection.tied and start == 0 and stop == layers
        return sizes.total(start, stop) - twice * sizes.embedding

    return peak


def generation_of(inspection: Inspection, sequences: int, context: int) -> GenerationSetup:
    """Return the setup of generating; ``UserError`` for a model without keys and values."""
    if inspection.shape is None:
        raise UserError(
            f"--context: {inspection.files.name} is no decoder with keys and values",
            "leave --context out",
        )
    return GenerationSetup(
        shape=inspection.shape,
        weight_sizes=model_sizes(inspection.files, None).weight_sizes,
        dtype_bytes=DTYPE_BYTES[activation_dtype(inspection)],
        sequences=sequences,
        context=context,
    )
