"""Plan a run that generates: which rank holds which layers, and whether it fits. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial

from shardmlx.common.digests import text_digest
from shardmlx.common.formatting import gibibytes, numbers_of
from shardmlx.config.common_options import AUTO, FASTEST, SMALLEST
from shardmlx.config.inference import InferenceConfig
from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.generation_memory import (
    GenerationSetup,
    inference_memory,
    kv_cache_memory,
)
from shardmlx.costmodel.memory_limits import (
    MemoryBudget,
    PlannedMemory,
    how_to_allow,
    how_to_allow_more,
    in_process,
    within,
)
from shardmlx.costmodel.workload import ModelSizes
from shardmlx.errors import UserError
from shardmlx.models.kv_cache import CacheQuantisation
from shardmlx.models.shape import ModelShape
from shardmlx.partitioners import DoesNotFitError, LayerCosts
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.layout import divide_by_speed, make_mesh

STEP_TOKENS = 20
"""Tokens of a prompt that take as long as a decode step of a group, which reads all weights too;
measured on a CPU with OpenBLAS."""


@dataclass(frozen=True, slots=True)
class Load:
    """The sequences of a run: how many, and the most tokens that one of them may have.

    ``prompt`` and ``answer`` are the tokens of the longest, ``context`` those of the longest
    sequence, both together. With ``capacity`` the KV caches of all sequences together hold no more
    tokens than that.
    """

    sequences: int
    prompt: int
    answer: int
    context: int
    capacity: int | None = None


@dataclass(frozen=True, slots=True)
class InferencePlan:
    """The plan of a run: stage i is on rank i, and at most ``most`` sequences are under way at a
    time, in ``groups``; ``chunk`` tokens of a prompt are computed at a time."""

    stage_map: StageMap
    load: Load
    groups: int
    most: int
    chunk: int
    max_kv_size: int | None
    quantisation: CacheQuantisation | None
    model: str

    @property
    def digest(self) -> str:
        """A digest that is equal on two ranks if and only if they plan the same run."""
        return text_digest(repr(astuple(self)))


def plan_inference(
    config: InferenceConfig,
    given: StageMap | None,
    load: Load,
    sizes: ModelSizes,
    cluster: Cluster,
    budgets: Sequence[MemoryBudget],
    model: str,
) -> InferencePlan:
    """Plan a run on the ranks of ``cluster``, which have these ``budgets``.

    ``given`` is the stage map to use, if there is one; ``model`` is the model's digest. Raises
    ``UserError`` where the stage map does not fit the ranks, or the sequences not the memory.
    """
    size = cluster.size
    limit = None if sizes.shape.chooses_caches else config.max_kv_size
    most = min(config.batch_size, load.sequences)
    quantisation = config.cache_quantisation
    if quantisation is not None:
        _check_quantisation(quantisation, sizes.shape)
    # mlx-lm merges neither rotating caches, which keep the first tokens of a sequence, nor
    # quantised ones.
    is_alone = limit is not None or quantisation is not None or not sizes.shape.takes_batches
    groups = most if is_alone else min(size, most)
    chunk = config.chunk(size, cluster.backend)
    memory = _GenerationMemory(sizes, load, most, chunk, limit, quantisation, cluster.backend)
    is_open = given is None and size > 1
    needing_less = _how_to_need_less(memory, is_open and config.partitioner not in (AUTO, SMALLEST))
    cluster = within(cluster, budgets)
    if given is not None:
        _check_map(given, config, sizes, cluster)
    name = FASTEST if config.partitioner == AUTO else config.partitioner
    divide = partial(
        _divided, rows=-(-most // groups), load=load, sizes=sizes, cluster=cluster, memory=memory
    )
    try:
        stage_map = given or divide(name)
        if config.partitioner == AUTO and is_open and not _fits(stage_map, budgets, memory):
            stage_map = divide(SMALLEST)
    except DoesNotFitError as error:
        more = how_to_allow_more(config.memory_limit, budgets)
        raise UserError(error.fact, more + needing_less) from None
    if not _fits(stage_map, budgets, memory):
        ranges = stage_map.partition.ranges
        allowed = how_to_allow(budgets, [memory.planned(*layers) for layers in ranges])
        raise UserError(_overfull(stage_map, budgets, memory), allowed + needing_less)
    return InferencePlan(stage_map, load, groups, most, chunk, limit, quantisation, model)


def _check_quantisation(how: CacheQuantisation, shape: ModelShape) -> None:
    """Raise ``UserError`` where keys or values are not divided by groups. Sliding windows are not
    quantised."""
    for kind in shape.kinds:
        for size in (kind.heads.key_dim, kind.heads.value_dim):
            if size % how.group_size and (kind.window is None or not shape.chooses_caches):
                raise UserError(
                    f"--kv-group-size {how.group_size} does not divide the heads of "
                    f"{shape.model_type}, which have {size} elements",
                    "give 32" if size % 32 == 0 else "leave --kv-bits out",
                )


@dataclass(frozen=True, slots=True)
class _GenerationMemory:
    """The bytes that a stage holds, by its layers."""

    sizes: ModelSizes
    load: Load
    most: int
    chunk: int
    max_kv_size: int | None
    quantisation: CacheQuantisation | None
    backend: str

    def planned(self, start: int, stop: int) -> PlannedMemory:
        """Return what a stage holds at most, and what stays between two steps: weights, KV caches
        and logits."""
        return PlannedMemory(self.total(start, stop), self._bytes(start, stop, chunk=0))

    def total(self, start: int, stop: int) -> int:
        """Return the most bytes that a stage of these layers holds."""
        return self._bytes(start, stop, self.chunk)

    def _bytes(self, start: int, stop: int, chunk: int) -> int:
        return inference_memory(self._setup(chunk), start, stop)

    def caches(self, start: int, stop: int) -> int:
        """Return the bytes of its KV caches."""
        return kv_cache_memory(self._setup(self.chunk), start, stop)

    def _setup(self, chunk: int) -> GenerationSetup:
        return GenerationSetup(
            shape=self.sizes.shape,
            weight_sizes=self.sizes.weight_sizes,
            dtype_bytes=self.sizes.dtype_bytes,
            sequences=self.most,
            context=self.load.context,
            chunk=chunk,
            max_kv_size=self.max_kv_size,
            cache_tokens=self.load.capacity,
            quantisation=self.quantisation,
            backend=self.backend,
        )


def planned_memory(
    plan: InferencePlan, sizes: ModelSizes, backend: str
) -> tuple[PlannedMemory, ...]:
    """Return the memory that the plan expects of each rank."""
    memory = _memory(plan, sizes, backend)
    return tuple(memory.planned(start, stop) for start, stop in plan.stage_map.partition.ranges)


def planned_caches(plan: InferencePlan, sizes: ModelSizes, backend: str) -> tuple[int, ...]:
    """Return the bytes that the plan expects of each rank's KV caches."""
    memory = _memory(plan, sizes, backend)
    return tuple(memory.caches(start, stop) for start, stop in plan.stage_map.partition.ranges)


def _memory(plan: InferencePlan, sizes: ModelSizes, backend: str) -> _GenerationMemory:
    return _GenerationMemory(
        sizes, plan.load, plan.most, plan.chunk, plan.max_kv_size, plan.quantisation, backend
    )


def _check_map(
    stage_map: StageMap, config: InferenceConfig, sizes: ModelSizes, cluster: Cluster
) -> None:
    stage_map.check_model(config.model, sizes.shape.num_layers)
    for rank in range(stage_map.pp):
        if stage_map.stages_of(rank) != (rank,):
            stages = " and ".join(map(str, stage_map.stages_of(rank)))
            raise UserError(
                f"{stage_map} has stage {stages} on rank {rank}: text is generated with one stage "
                "a rank, in order",
                "use another map, or none",
            )
    if stage_map.pp != cluster.size:
        raise UserError(
            f"{stage_map} needs {stage_map.pp} ranks, and there are {cluster.size}",
            f"start mpirun with -n {stage_map.pp}",
        )
    make_mesh(stage_map, cluster.size, [machine.host for machine in cluster.machines])


def _divided(
    partitioner: str,
    rows: int,
    load: Load,
    sizes: ModelSizes,
    cluster: Cluster,
    memory: _GenerationMemory,
) -> StageMap:
    """Divide the layers; ``rows`` sequences are in a group. Raises ``DoesNotFitError``."""
    return divide_by_speed(
        partitioner,
        cluster.machines,
        costs=inference_costs(sizes, load, rows),
        sizes=sizes.held_sizes,
        peak=lambda _, start, stop: float(memory.total(start, stop)),
        capacity=list(map(cluster.capacity, range(cluster.size))),
        num_stages=cluster.size,
    )


def inference_costs(sizes: ModelSizes, load: Load, rows: int) -> LayerCosts:
    """Return the FLOPs of one sequence in a group of ``rows``.

    A token of the answer counts as much as the tokens of a prompt that take the same time. A
    sequence by itself is in one stage at a time: how its answer is divided makes no difference, and
    only its prompt counts. The lm_head computes the last position only.
    """
    shape = sizes.shape
    answer = 0.0
    if load.sequences > 1:
        answer = load.answer * max(1.0, STEP_TOKENS / rows)
    flops = (shape.layer(i).flops(load.context) for i in range(shape.num_layers))
    tokens = load.prompt + answer
    return LayerCosts(
        tuple(each * tokens for each in flops), head=shape.head_flops() * (1 + answer)
    )


def _fits(stage_map: StageMap, budgets: Sequence[MemoryBudget], memory: _GenerationMemory) -> bool:
    return all(
        memory.total(start, stop) <= budgets[rank].nbytes
        for rank, (start, stop) in enumerate(stage_map.partition.ranges)
    )


def _overfull(
    stage_map: StageMap, budgets: Sequence[MemoryBudget], memory: _GenerationMemory
) -> str:
    """Return how the first rank that does not fit fails."""
    rank, (start, stop) = next(
        (rank, (start, stop))
        for rank, (start, stop) in enumerate(stage_map.partition.ranges)
        if memory.total(start, stop) > budgets[rank].nbytes
    )
    return (
        f"rank {rank} ({budgets[rank].host}) would take "
        f"{in_process(budgets[rank], memory.total(start, stop))} for layers "
        f"{numbers_of(start, stop)}, {gibibytes(memory.caches(start, stop))} for the KV cache of "
        f"{_sequences(memory)}"
    )


def _sequences(memory: _GenerationMemory) -> str:
    if memory.load.capacity is not None:
        return f"{memory.load.capacity} tokens"
    sequences = "a sequence" if memory.most == 1 else f"{memory.most} sequences"
    return f"{sequences} of {memory.load.context} tokens"


def _how_to_need_less(memory: _GenerationMemory, can_divide: bool) -> str:
    if memory.load.capacity is not None:
        fewer = "lower --cache-tokens"
    else:
        fewer = "lower --max-tokens" + " or --batch-size" * (memory.most > 1)
    return f"{fewer}, {'try --partitioner memory, ' * can_divide}or use more machines"
