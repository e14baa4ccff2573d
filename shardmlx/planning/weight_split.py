"""Divide a model, and find the tensors and bytes that each stage needs. No MLX, no MPI."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmlx.errors import UserError
from shardmlx.modelfiles.parts import Inspection, Part
from shardmlx.models.sizes.shares import WHOLE, TensorShares
from shardmlx.partitioners import LayerCosts, Problem, get_partitioner
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.facts.workload import model_sizes, shared
from shardmlx.planning.layout import costs_by_speed
from shardmlx.planning.memory.generation import GenerationSetup, inference_memory, setups_of
from shardmlx.planning.time.parts import TYPICAL_LENGTH

if TYPE_CHECKING:
    from shardmlx.planning.facts.hostfile import Machine


@dataclass(frozen=True)
class Split:
    """A model in stages, which ranks have whole, or ``shares`` of, and the machine of each rank, if
    machines are known."""

    inspection: Inspection
    stage_map: StageMap
    machines: tuple[Machine, ...] = ()
    generation: GenerationSetup | None = None
    shares: TensorShares = WHOLE

    @property
    def places(self) -> tuple[tuple[int, int, int], ...]:
        """The stage, rank, and share of the stage, in the order of stages."""
        of_stages = enumerate(self.stage_map.placement)
        size = self.shares.size
        return tuple((i, rank * size + j, j) for i, rank in of_stages for j in range(size))

    def stage(self, stage: int) -> Part:
        """Return the tensors of a stage."""
        return self.inspection.stage(*self.stage_map.partition.ranges[stage])

    def rank(self, rank: int) -> Part:
        """Return the tensors of all stages of a pipeline rank, each once. Raises ``UserError``."""
        if rank >= self.stage_map.pp:
            raise UserError(f"--rank {rank}", f"the ranks are 0 to {self.stage_map.pp - 1}")
        held = (t for stage in self.stage_map.stages_of(rank) for t in self.stage(stage).tensors)
        return Part(tuple({tensor.name: tensor for tensor in held}.values()))

    def host(self, rank: int) -> str | None:
        """Return the host of a rank, if it is known."""
        known = self.stage_map.host_of(rank // self.shares.size)
        return self.machines[rank].host if self.machines else known

    def memory(self, rank: int) -> float | None:
        """Return the bytes that a rank may use of its machine, if they are known."""
        return _usable(self.machines[rank]) if self.machines else None

    def held(self, stage: int, share: int) -> tuple[int, int]:
        """Return the parameters of a share of a stage, and their bytes."""
        part = self.stage(stage)
        shape = self.inspection.shape
        if shape is None or self.shares.size == 1:
            return part.parameters, part.nbytes
        sizes = _sizes(self.inspection)
        own, own_sizes = shared(shape, sizes, self.shares, share)
        layers = range(*self.stage_map.partition.ranges[stage])
        fewer = sum(shape.layer(i).parameters - own.layer(i).parameters for i in layers)
        less = sum(sizes.layers[i] - own_sizes.layers[i] for i in layers)
        return part.parameters - fewer, round(part.nbytes - less)

    def nbytes(self, stage: int, share: int) -> float:
        """Return the bytes of a share of a stage: weights, and the memory of generating."""
        if self.generation is None:
            return self.held(stage, share)[1]
        own = setups_of(self.generation, self.shares)[share]
        return inference_memory(own, *self.stage_map.partition.ranges[stage])


def divide(
    inspection: Inspection,
    partitioner: str,
    num_stages: int,
    machines: tuple[Machine, ...] = (),
    generation: GenerationSetup | None = None,
) -> StageMap:
    """Divide a model among ranks with one stage each, by the cost of a forward pass, or by bytes if
    the family is unknown; ``machines`` has one for each, or none."""
    shape = inspection.shape
    sizes = _sizes(inspection)
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
    embedding = inspection.embedding.nbytes
    head = inspection.head.nbytes
    layers = tuple(layer.nbytes for layer in inspection.layers)
    return LayerCosts(layers, embedding, head + inspection.tied * embedding)


def _peak(
    inspection: Inspection, generation: GenerationSetup | None
) -> Callable[[int, int, int], float]:
    """Return the bytes of a stage; one that is first and last holds a tied matrix once."""
    sizes = _sizes(inspection)
    layers = len(inspection.layers)

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
            f"--context: {inspection.files.name} is not a decoder with keys and values",
            "leave --context out",
        )
    model = model_sizes(inspection.files, None)
    return GenerationSetup(model=model, sequences=sequences, context=context)
