"""Plan a run that generates: which rank holds which layers, and whether it fits. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardmlx.common.digests import bytes_digest
from shardmlx.common.formatting import gibibytes, numbers_of, plural
from shardmlx.config.common_options import AUTO, FASTEST, SMALLEST
from shardmlx.config.inference import NO_DRAFT, InferenceConfig
from shardmlx.errors import UserError
from shardmlx.inference.prefix_cache import cuttable, most_copies
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.models.sizes.shares import WHOLE, TensorShares
from shardmlx.partitioners import PARTITIONERS, DoesNotFitError, LayerCosts
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.facts.workload import ModelSizes
from shardmlx.planning.generation import generation_problem
from shardmlx.planning.groups import asked_shares
from shardmlx.planning.layout import make_mesh
from shardmlx.planning.memory.generation import (
    GenerationSetup,
    inference_memory,
    kv_cache_memory,
    setups_of,
)
from shardmlx.planning.memory.limits import MemoryBudget, PlannedMemory, how_to_allow, would_take

if TYPE_CHECKING:
    from shardmlx.loading.rank_setup import PlanInputs

STEP_TOKENS = 20
"""Tokens of a prompt that take as long as a decode step of a group, on a CPU with OpenBLAS."""


@dataclass(frozen=True, slots=True)
class GenerationLoad:
    """The sequences of a run, and the most tokens of a ``prompt``, of an ``answer``, and of both
    together. The KV caches of all sequences together hold at most ``capacity``. If it
    ``keeps_prefixes``, there is a prefix cache."""

    sequences: int
    prompt: int
    answer: int
    context: int
    capacity: int | None = None
    keeps_prefixes: bool = False


@dataclass(frozen=True, slots=True)
class InferencePlan:
    """The plan of a run: stage i is on rank i, or on the ranks that have ``shares`` of it, and
    sequences are under way in ``groups``."""

    stage_map: StageMap
    load: GenerationLoad
    groups: int
    setup: GenerationSetup
    model: str
    cuttable: int
    """Tokens from which on the caches of a sequence cannot give back drafts."""
    shares: TensorShares = WHOLE

    @property
    def mesh(self) -> Mesh:
        return Mesh(1, self.stage_map.pp, self.shares.size)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The layers of each rank, from and to."""
        of_stages = self.stage_map.partition.ranges
        return tuple(each for each in of_stages for _ in self.shares.weights)

    @property
    def digest(self) -> str:
        return bytes_digest(repr(self).encode())

    @property
    def memory(self) -> tuple[PlannedMemory, ...]:
        """The bytes that each rank holds at most, and between two steps."""
        return tuple(
            PlannedMemory(
                inference_memory(setup, *each), inference_memory(replace(setup, chunk=0), *each)
            )
            for setup, each in self._setups()
        )

    @property
    def caches(self) -> tuple[int, ...]:
        return tuple(kv_cache_memory(setup, *each) for setup, each in self._setups())

    def _setups(self) -> Iterator[tuple[GenerationSetup, tuple[int, int]]]:
        """Yield the facts of each rank, and its layers."""
        of_shares = setups_of(self.setup, self.shares)
        for each in self.stage_map.partition.ranges:
            yield from ((setup, each) for setup in of_shares)


def plan_inference(
    config: InferenceConfig,
    inputs: PlanInputs[ModelSizes],
    load: GenerationLoad,
    model: str,
    draft: ModelSizes | None = None,
    head: int = 0,
) -> InferencePlan:
    """Plan a run on the ranks of ``inputs``; ``model`` is the model's digest, and ``draft`` a model
    that drafts on rank 0, or ``head`` the bytes of the model's own. Raises ``UserError`` where
    layers cannot be divided so, the stage map does not fit the ranks, or the sequences not the
    memory."""
    sizes, cluster, given = inputs.sizes, inputs.cluster, inputs.stage_map
    shape, shares = sizes.shape, asked_shares(config, sizes, cluster)
    across, size = shares.size, cluster.size // shares.size
    limit = None if shape.chooses_caches else config.max_kv_size
    most = min(config.batch_size, load.sequences)
    quantisation = config.cache_quantisation
    most_cuttable = cuttable(shape, limit)
    if config.draft != NO_DRAFT:
        check_gives_back(shape, config.draft)
    if draft is not None:
        check_gives_back(draft.shape, config.draft)
        most_cuttable = min(most_cuttable, cuttable(draft.shape))
    # mlx-lm merges neither rotating caches, which keep the first tokens of a sequence, nor
    # quantised ones.
    is_alone = limit is not None or quantisation is not None or not shape.takes_batches
    groups = most if is_alone else min(size, most)
    setup = GenerationSetup(
        model=sizes,
        sequences=most,
        context=load.context,
        chunk=config.chunk(size, cluster.backend),
        longest=max(load.prompt, most + config.most_drafts) if load.capacity is None else None,
        max_kv_size=limit,
        cache_tokens=load.capacity,
        quantisation=quantisation,
        state_copies=most_copies(most) if load.keeps_prefixes else 0,
        drafts=config.most_drafts,
        head=head,
        backend=cluster.backend,
    )
    if draft is not None:  # for the same sequences
        drafting = replace(setup, model=draft, max_kv_size=None, quantisation=None, state_copies=0)
        held_beside = inference_memory(drafting, 0, draft.shape.num_layers)
        setup = replace(setup, beside=held_beside)
    if given is not None:
        _check_map(given, config, sizes, cluster.machines[::across])
    costs = _costs(sizes, load, rows=-(-most // groups))
    problem = generation_problem(setup, shares, cluster, costs)

    def plan_by(partitioner: str) -> InferencePlan:
        stage_map = given or PARTITIONERS[partitioner](problem)
        return InferencePlan(stage_map, load, groups, setup, model, most_cuttable, shares)

    is_open = given is None and size > 1
    less = "lower --cache-tokens"
    if load.capacity is None:
        less = "lower --max-tokens" + " or --batch-size" * (most > 1)
    if draft is not None or head:
        less += ", leave out --draft"
    try:
        plan = plan_by(FASTEST if config.partitioner == AUTO else config.partitioner)
        if config.partitioner == AUTO and is_open and _overfull(plan, inputs.budgets):
            plan = plan_by(SMALLEST)
    except DoesNotFitError as error:
        more = "raise --memory-limit, " * (config.memory_limit is not None)
        raise UserError(error.fact, f"{more}{less}, or use more machines") from None
    if excess := _overfull(plan, inputs.budgets):
        if is_open and config.partitioner not in (AUTO, SMALLEST):
            less += ", try --partitioner memory"
        allowed = how_to_allow(inputs.budgets, plan.memory)
        raise UserError(excess, f"{allowed}{less}, or use more machines")
    return plan


def check_gives_back(shape: ModelShape, draft: str) -> None:
    """Raise ``UserError`` where caches of the model cannot forget drafts that are rejected."""
    if cuttable(shape) == 0 or shape.has_dynamic_rope:
        raise UserError(
            f"--draft {draft}: models of type {shape.model_type} cannot give back the tokens of a "
            "draft that are rejected",
            "leave it out",
        )


def _check_map(
    stage_map: StageMap, config: InferenceConfig, sizes: ModelSizes, firsts: Sequence[Machine]
) -> None:
    stage_map.check_model(config.source.model, sizes.shape.num_layers)
    for rank in range(stage_map.pp):
        if stage_map.stages_of(rank) != (rank,):
            raise UserError(
                f"{stage_map} does not have stage {rank} alone on rank {rank}: text is generated "
                "with one stage a rank, in order",
                "use another map, or none",
            )
    if stage_map.pp != len(firsts):
        across = config.tensor_parallel
        raise UserError(
            f"{stage_map} needs {stage_map.pp * across} ranks, and there are "
            f"{len(firsts) * across}",
            f"start mpirun with -n {stage_map.pp * across}",
        )
    make_mesh(stage_map, len(firsts), [machine.host for machine in firsts])


def _costs(sizes: ModelSizes, load: GenerationLoad, rows: int) -> LayerCosts:
    """Return the FLOPs of one sequence in a group of ``rows``: a token of the answer counts as the
    tokens of a prompt that take as long. The lm_head computes the last position only."""
    shape = sizes.shape
    # A sequence by itself is in one stage at a time: how its answer is divided is all the same.
    answer = load.answer * max(1.0, STEP_TOKENS / rows) if load.sequences > 1 else 0.0
    tokens = load.prompt + answer
    flops = tuple(tokens * shape.layer(i).flops(load.context) for i in range(shape.num_layers))
    return LayerCosts(flops, head=shape.head_flops() * (1 + answer))


def _overfull(plan: InferencePlan, budgets: Sequence[MemoryBudget]) -> str:
    """Return how the first rank would take more than its budget; "" if none does."""
    setup, ranges = plan.setup, plan.ranges
    for rank, (budget, memory) in enumerate(zip(budgets, plan.memory, strict=True)):
        if memory.peak > budget.nbytes:
            tokens = f"{setup.cache_tokens} tokens"
            if setup.cache_tokens is None:
                tokens = f"{plural(setup.sequences, 'sequence')} of {setup.context} tokens"
            drafting = f", {gibibytes(setup.beside)} for the model that drafts"
            return (
                f"{would_take(rank, budget, memory.peak)} for layers {numbers_of(*ranges[rank])}, "
                f"{gibibytes(plan.caches[rank])} for the KV cache of {tokens}"
                f"{drafting if rank == 0 and setup.beside else ''}"
            )
    return ""
