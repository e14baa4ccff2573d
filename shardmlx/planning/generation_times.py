"""Times of machines that generate: prompts by FLOP/s, answers by bandwidth. No MLX, no MPI.

A prompt's tokens go through a layer together, as products of matrices. A step of an answer is one
token of each sequence in a group, for which a machine reads the layer's weights once. So a machine
of many FLOP/s and a slow memory is quick with prompts, and slow with answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardmlx.partitioners import LayerCosts
from shardmlx.planning.facts.chips import bandwidth_of
from shardmlx.planning.facts.cluster import EFFICIENCY
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.facts.job_facts import GenerationLoad
from shardmlx.planning.facts.kernels import token_seconds, tokens_in_turn
from shardmlx.planning.facts.workload import ModelSizes


@dataclass(frozen=True, slots=True)
class GenerationSeconds:
    """Seconds of the parts of a model on one machine: for the ``prompt`` of a sequence, and for its
    ``answer`` as a share of its group's steps."""

    prompt: LayerCosts
    answer: LayerCosts

    @property
    def both(self) -> LayerCosts:
        """The sum."""
        pairs = zip(self.prompt.layers, self.answer.layers, strict=True)
        head = self.prompt.head + self.answer.head
        return LayerCosts(tuple(map(sum, pairs)), head=head)


def are_unlike(machines: Sequence[Machine]) -> bool:
    """Return whether speeds of all machines are known, of computing and of memory, and differ."""
    speeds = {(each.flops, bandwidth_of(each), token_seconds(each)) for each in machines}
    known = all(flops and bandwidth for flops, bandwidth, _ in speeds)
    return known and len(speeds) > 1


def seconds_on(
    machine: Machine, sizes: ModelSizes, load: GenerationLoad, rows: int
) -> GenerationSeconds:
    """Return the seconds of one sequence of a group of ``rows`` on a machine of known speeds; the
    lm_head computes one position of a prompt."""
    shape = sizes.shape
    weights = sizes.weight_sizes
    flops = EFFICIENCY * (machine.flops or 0.0)
    bandwidth = bandwidth_of(machine) or 0.0

    def step(nbytes: float, products: float) -> float:
        """Return the seconds of a token of an answer: a group reads weights once for all rows."""
        return max(nbytes / bandwidth / rows, products / flops)

    prompt = []
    answer = []
    for i, nbytes in enumerate(weights.layers):
        layer = shape.layer(i)
        products = layer.flops(load.context)
        in_turn = tokens_in_turn(layer, load.prompt) * token_seconds(machine)
        prompt.append(load.prompt * products / flops + in_turn)
        # A group reads the experts that its tokens use, each of them once.
        read = min(1.0, rows * layer.active_parameters / layer.parameters) * nbytes
        answer.append(load.answer * step(read, products))
    head = shape.head_flops()
    head_bytes = weights.head + shape.tied * weights.embedding
    return GenerationSeconds(
        prompt=LayerCosts(tuple(prompt), head=head / flops),
        answer=LayerCosts(tuple(answer), head=load.answer * step(head_bytes, head)),
    )
