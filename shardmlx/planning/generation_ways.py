"""Compare the ways in which given machines generate a text: stages, tensor shares, and both. No
MLX, no MPI."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from shardmlx.common.formatting import plural
from shardmlx.config.common_options import FASTEST, SMALLEST
from shardmlx.config.inference import PIPELINED_CHUNK, WHOLE_CHUNK
from shardmlx.errors import UserError
from shardmlx.models.sizes.layer_shape import LayerShape
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.models.sizes.shares import TensorShares
from shardmlx.partitioners import DoesNotFitError, fastest_in_order, get_partitioner
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.facts.chips import bandwidth_of, shares_by_bandwidth
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.job_facts import GenerationLoad
from shardmlx.planning.facts.workload import ModelSizes
from shardmlx.planning.generation import generation_problem
from shardmlx.planning.job import GenerationPart
from shardmlx.planning.memory.generation import GenerationSetup, inference_memory, setups_of


@dataclass(frozen=True, slots=True)
class GenerationWay:
    """A way to generate a text: stages on ``tensor_parallel`` ranks each, the ``peak`` bytes of the
    fullest rank and its ``capacity``, and the most tokens of the text a second. Ranks may have
    ``whole_experts``, and sum over RDMA. ``layers`` are those of each stage, where unlike machines
    get them by their speeds."""

    hosts: tuple[str, ...]
    tensor_parallel: int
    peak: float
    capacity: float
    tokens_per_second: float
    whole_experts: bool = False
    has_rdma: bool = False
    layers: tuple[int, ...] = ()

    @property
    def fits(self) -> bool:
        """True if the fullest rank holds its part."""
        return self.peak <= self.capacity

    @property
    def options(self) -> str:
        """The options of ``generate`` that ask for it."""
        if self.tensor_parallel == 1:
            return ""
        experts = " --expert-parallel" * self.whole_experts
        return f"--tensor-parallel {self.tensor_parallel}{experts}"

    def __str__(self) -> str:
        if len(self.hosts) == 1:
            return f"{self.hosts[0]} alone"
        stages = plural(len(self.hosts) // self.tensor_parallel, "stage")
        if self.layers:
            stages += f" of {' + '.join(map(str, self.layers))} layers"
        links = "over RDMA" * self.has_rdma
        return ", ".join(filter(None, (stages, self.options, links)))


def generation_ways(sizes: ModelSizes, cluster: Cluster, context: int) -> list[GenerationWay]:
    """Return the ways to generate a text of so many tokens, the fastest first, those that fit
    before the others; none if the bandwidth of a memory is unknown. Sums are counted over TCP, too,
    where there is RDMA."""
    if None in map(bandwidth_of, cluster.machines):
        return []
    count = cluster.size
    alone = [Cluster(machines=(each,), backend=cluster.backend) for each in cluster.machines]
    tried = [_way(sizes, each, 1, context) for each in (alone if count > 1 else [])]
    found = [max(tried, key=_worth)] if tried else []
    tcp = replace(cluster, machines=tuple(replace(each, rdma=None) for each in cluster.machines))
    for across in (each for each in range(1, count + 1) if count % each == 0):
        links = [cluster, tcp] if across > 1 and cluster.has_rdma else [tcp]
        for whole_experts, each in product((False, True), links):
            with suppress(UserError):  # heads, experts or layers are too few
                found.append(_way(sizes, each, across, context, whole_experts))
    return sorted(found, key=_worth, reverse=True)


def _worth(way: GenerationWay) -> tuple[bool, float]:
    return way.fits, way.tokens_per_second


def _way(
    sizes: ModelSizes, cluster: Cluster, across: int, context: int, whole_experts: bool = False
) -> GenerationWay:
    """Return the way with groups of ``across`` ranks. Raises ``UserError`` if there is none."""
    shape = sizes.shape
    weights = shares_by_bandwidth(cluster.machines, across)
    shares = TensorShares(weights, sizes.group_size, whole_experts)
    shares.check(shape)
    stages = shares.groups(cluster.size)
    is_whole = stages == 1 and cluster.backend != "cpu"
    setup = GenerationSetup(
        model=sizes,
        sequences=1,
        context=context,
        chunk=WHOLE_CHUNK if is_whole else PIPELINED_CHUNK,
        backend=cluster.backend,
    )
    load = GenerationLoad.typical(1, context, context, context)
    part = GenerationPart(load=load, groups=1, setup=setup, cuttable=context)
    problem = generation_problem(part, shares, cluster)
    way = None
    for divide in (
        *([fastest_in_order] if problem.once else []),
        get_partitioner(FASTEST),
        get_partitioner(SMALLEST),
    ):
        with suppress(DoesNotFitError):
            stage_map = divide(problem)
            way = _predicted(setup, shares, cluster, stage_map)
            if problem.once:
                way = replace(way, layers=stage_map.partition.sizes)
            if way.fits:
                break
    if way is None:
        raise UserError("no division fits", "use more machines")
    return way


def _predicted(
    setup: GenerationSetup, shares: TensorShares, cluster: Cluster, stage_map: StageMap
) -> GenerationWay:
    """Return the way with these stages. A rank reads what a token uses of its weights; each layer
    sums its hidden state twice, and each stage sends it on."""
    across = shares.size
    shape = setup.model.shape
    of_shares = setups_of(setup, shares)
    ranges = stage_map.partition.ranges
    bandwidths = [bandwidth_of(each) or math.inf for each in cluster.machines]
    seconds = 0.0
    fullest = (0.0, math.inf)
    hidden = setup.model.dtype_bytes * shape.hidden_size
    for stage, (start, stop) in enumerate(ranges):
        ranks = range(stage * across, (stage + 1) * across)
        reading = 0.0
        for rank, own in zip(ranks, of_shares, strict=True):
            reading = max(reading, _read(own, shape, start, stop) / bandwidths[rank])
            held = inference_memory(own, start, stop), cluster.capacity(rank)
            fullest = max(fullest, held, key=lambda each: each[0] / each[1])
        seconds += reading + 2 * (stop - start) * cluster.ring(ranks).sum_seconds(hidden)
        after = ranks[-1] + 1
        if after < cluster.size:
            seconds += cluster.latency(ranks[0], after)
            seconds += cluster.link_seconds(ranks[0], after, hidden)
        else:
            seconds += cluster.latency(ranks[0], 0)  # the token goes back
    return GenerationWay(
        hosts=tuple(each.host for each in cluster.machines),
        tensor_parallel=across,
        peak=fullest[0],
        capacity=fullest[1],
        tokens_per_second=1 / seconds,
        whole_experts=shares.whole_experts,
        has_rdma=across > 1 and cluster.has_rdma,
    )


def _read(setup: GenerationSetup, whole: ModelShape, start: int, stop: int) -> float:
    """Return the bytes of weights that a token reads in a stage: of experts those that it uses, or
    of whole ones as many as on the busiest rank, on average."""
    shape = setup.model.shape
    sizes = setup.model.weight_sizes
    nbytes = 0.0
    for layer, size in zip(range(start, stop), sizes.layers[start:stop], strict=True):
        own = shape.layer(layer)
        of_all = whole.layer(layer)
        read: float = own.active_parameters
        if own.experts < of_all.experts:
            one = sum(each.parameters / each.copies for _, each in own.linears if each.experts)
            read -= one * (own.experts_per_token - _busiest(of_all, own.experts))
        nbytes += size * read / own.parameters
    if stop == shape.num_layers:
        nbytes += sizes.head + shape.tied * sizes.embedding
    return nbytes


def _busiest(layer: LayerShape, held: int) -> float:
    """Return how many of the ``held`` experts a token takes on the busiest rank, on average: half a
    normal distribution above the mean, if it takes any as likely."""
    count = layer.experts
    taken = layer.experts_per_token
    mean = taken * held / count
    variance = mean * (1 - held / count) * (count - taken) / (count - 1)
    return min(mean + math.sqrt(2 * variance / math.pi), taken, held)
