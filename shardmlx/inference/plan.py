"""Plan a run that generates: which rank holds which layers, and whether it fits. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from shardmlx.common.digests import bytes_digest
from shardmlx.common.formatting import gibibytes, numbers_of, plural
from shardmlx.config.common_options import AUTO, FASTEST, SMALLEST
from shardmlx.config.inference import NO_DRAFT, InferenceConfig
from shardmlx.errors import UserError
from shardmlx.inference.prefix_cache import cuttable, most_copies
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.models.sizes.shares import WHOLE, TensorShares
from shardmlx.partitioners import PARTITIONERS, DoesNotFitError, LayerCosts, Problem
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
        """The ranks: one replica, its stages, and the shares of each."""
        return Mesh(1, self.stage_map.pp, self.shares.size)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The layers of each rank, from and to."""
        of_stages = self.stage_map.partition.ranges
        return tuple(each for each in of_stages for _ in self.shares.weights)

    @property
    def digest(self) -> str:
        """Digest that is equal on two ranks if and only if they have the same plan."""
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
        """The bytes of the KV caches of each rank."""
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
    cluster = inputs.cluster
    shares = asked_shares(config, inputs.sizes, cluster)
    stages = cluster.size // shares.size
    if config.draft != NO_DRAFT:
        check_gives_back(inputs.sizes.shape, config.draft)
    if draft is not None:
        check_gives_back(draft.shape, config.draft)
    setup = _setup(config, inputs, load, stages, draft, head)
    groups = _groups(setup, stages)
    if inputs.stage_map is not None:
        _check_map(inputs.stage_map, config, inputs.sizes, cluster.machines[:: shares.size])
    costs = _costs(inputs.sizes, load, rows=-(-setup.sequences // groups))
    most_cuttable = cuttable(inputs.sizes.shape, setup.max_kv_size)
    planned = partial(
        InferencePlan,
        load=load,
        groups=groups,
        setup=setup,
        model=model,
        cuttable=most_cuttable if draft is None else min(most_cuttable, cuttable(draft.shape)),
        shares=shares,
    )
    less = _less(load, setup)
    try:
        plan = _divided(config, inputs, generation_problem(setup, shares, cluster, costs), planned)
    except DoesNotFitError as error:
        more = "raise --memory-limit, " * (config.memory_limit is not None)
        raise UserError(error.fact, f"{more}{less}, or use more machines") from None
    if excess := _overfull(plan, inputs.budgets):
        is_open = inputs.stage_map is None and stages > 1
        if is_open and config.partitioner not in (AUTO, SMALLEST):
            less += ", try --partitioner memory"
        allowed = how_to_allow(inputs.budgets, plan.memory)
        raise UserError(excess, f"{allowed}{less}, or use more machines")
    return plan


def _setup(
    config: InferenceConfig,
    inputs: PlanInputs[ModelSizes],
    load: GenerationLoad,
    stages: int,
    draft: ModelSizes | None,
    head: int,
) -> GenerationSetup:
    """Return what decides the memory of a run on so many ``stages``."""
    shape = inputs.sizes.shape
    backend = inputs.cluster.backend
    sequences = min(config.batch_size, load.sequences)
    step = max(load.prompt, sequences + config.most_drafts)
    setup = GenerationSetup(
        model=inputs.sizes,
        sequences=sequences,
        context=load.context,
        chunk=config.chunk(stages, backend),
        longest=step if load.capacity is None else None,
        max_kv_size=None if shape.chooses_caches else config.max_kv_size,
        cache_tokens=load.capacity,
        quantisation=config.cache_quantisation,
        state_copies=most_copies(sequences) if load.keeps_prefixes else 0,
        drafts=config.most_drafts,
        head=head,
        backend=backend,
    )
    if draft is None:
        return setup
    drafting = replace(setup, model=draft, max_kv_size=None, quantisation=None, state_copies=0)
    return replace(setup, beside=inference_memory(drafting, 0, draft.shape.num_layers))


def _groups(setup: GenerationSetup, stages: int) -> int:
    """Return the number of groups in which sequences are under way: mlx-lm merges neither rotating
    caches, which keep the first tokens of a sequence, nor quantised ones."""
    is_cut = setup.max_kv_size is not None or setup.quantisation is not None
    if is_cut or not setup.model.shape.takes_batches:
        return setup.sequences
    return min(stages, setup.sequences)


def _divided(
    config: InferenceConfig,
    inputs: PlanInputs[ModelSizes],
    problem: Problem,
    planned: Callable[[StageMap], InferencePlan],
) -> InferencePlan:
    """Return the plan with the user's stages, or the partitioner's: if that is open, the fastest
    division, or the one that takes the least memory. Raises ``DoesNotFitError``."""
    if inputs.stage_map is not None:
        return planned(inputs.stage_map)
    is_open = config.partitioner == AUTO
    plan = planned(PARTITIONERS[FASTEST if is_open else config.partitioner](problem))
    if is_open and problem.num_stages > 1 and _overfull(plan, inputs.budgets):
        return planned(PARTITIONERS[SMALLEST](problem))
    return plan


def _less(load: GenerationLoad, setup: GenerationSetup) -> str:
    """Return the remedies that make a run need less memory."""
    less = "lower --cache-tokens"
    if load.capacity is None:
        less = "lower --max-tokens" + " or --batch-size" * (setup.sequences > 1)
    return f"{less}, leave out --draft" if setup.beside or setup.head else less


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
    setup = plan.setup
    ranges = plan.ranges
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
