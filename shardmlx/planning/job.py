"""A job as rank 0 has planned it, for all ranks, before any weight is read. No MLX, no MPI."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shardmlx.checkpoint.resume import Resumption
from shardmlx.config.specs import RunSpec
from shardmlx.models.sizes.shares import TensorShares
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.choice import Choice
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.job_facts import GenerationLoad
from shardmlx.planning.facts.kernels import kernel_warnings
from shardmlx.planning.facts.plan_facts import SequenceLengths
from shardmlx.planning.facts.workload import Workload
from shardmlx.planning.memory.generation import (
    GenerationSetup,
    beside_weights,
    kv_cache_memory,
    setups_of,
    weights_memory,
)
from shardmlx.planning.memory.limits import MemoryLimits, PlannedMemory, unwired
from shardmlx.planning.time.predict import Prediction, planned_memory, predict


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPart:
    """The part of a job that trains: ``way`` is the run with nothing left open, ``choice`` says of
    what it was chosen. The ``plan`` is for the ``workload`` of one rank of each group, ``parts``
    are those of all its ranks."""

    choice: Choice
    way: RunSpec
    workload: Workload
    parts: tuple[Workload, ...]
    plan: Plan
    lengths: SequenceLengths
    resumption: Resumption = field(default_factory=Resumption)
    """The place of the run's checkpoints, and the one to go on from."""

    @property
    def mean_length(self) -> int:
        """Mean length of the rows of a step as they are computed, in tokens."""
        return self.lengths.mean(self.plan.pack)

    def memory(self, cluster: Cluster, lengths: tuple[int, int]) -> list[PlannedMemory]:
        """Return the memory that each rank takes for its part, as ``planned_memory`` does."""
        of_parts = [planned_memory(self.plan, part, cluster, lengths) for part in self.parts]
        mesh = self.plan.mesh
        return [of_parts[mesh.share(rank)][rank] for rank in range(mesh.size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPart:
    """The part of a job that generates: sequences are under way in ``groups``."""

    load: GenerationLoad
    groups: int
    setup: GenerationSetup
    cuttable: int
    """Tokens from which on the caches of a sequence cannot give back drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A plan of what all ranks do together: each has its stages of the ``stage_map``, or its part
    of the ``shares`` of them, and trains, or generates, or does both on the same weights.

    Rank 0 plans it (``shardmlx.planning.think``), and sends it to all ranks. ``cluster`` are the
    machines of single ranks, ``limits`` those of each one's memory: none where only a hostfile is
    known.
    """

    model: str
    """Digest of the model's configuration."""
    mesh: Mesh
    stage_map: StageMap
    shares: TensorShares
    cluster: Cluster
    limits: tuple[MemoryLimits, ...] = ()
    training: TrainingPart | None = None
    generation: GenerationPart | None = None

    def __post_init__(self) -> None:
        if self.training is None and self.generation is None:
            raise ValueError("a job trains or generates")
        if self.mesh.pp != self.stage_map.pp or self.mesh.tp != self.shares.size:
            raise ValueError(f"{self.mesh} for {self.stage_map} and {self.shares}")
        plan = None if self.training is None else self.training.plan
        if plan is not None and (plan.mesh, plan.stage_map) != (self.mesh, self.stage_map):
            raise ValueError("training has other stages than the job")
        in_order = self.stage_map.placement == tuple(range(self.mesh.pp))
        if self.training is None and not in_order:
            raise ValueError(
                f"{self.stage_map}: a rank that only generates has one stage, in order"
            )

    def layers(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the layers of a rank's stages, from and to, in the order of the model."""
        _, pipeline_rank = self.mesh.coordinates(rank)
        ranges = self.stage_map.partition.ranges
        return tuple(ranges[stage] for stage in self.stage_map.stages_of(pipeline_rank))

    @property
    def memory(self) -> tuple[PlannedMemory, ...]:
        """The bytes that each rank holds at most, and between two steps: the weights, once, and
        what training and generation hold beside them."""
        ranks = range(self.mesh.size)
        memory = [PlannedMemory(0, 0) for _ in ranks]
        if self.training is not None:
            memory = self.training.memory(self.cluster, self.training.lengths.longest)
        if self.generation is not None:
            memory = [memory[rank] + self._generating(self.generation, rank) for rank in ranks]
        return tuple(memory)

    def _generating(self, part: GenerationPart, rank: int) -> PlannedMemory:
        """Return what a rank holds to generate: weights too, if these are not trained. The first
        replica generates."""
        if self.mesh.coordinates(rank)[0]:
            return PlannedMemory(0, 0)
        setup = setups_of(part.setup, self.shares)[self.mesh.share(rank)]
        between = replace(setup, chunk=0)
        memory = PlannedMemory(0, 0)
        for ends in self.layers(rank):
            weights = weights_memory(setup, *ends) if self.training is None else 0
            memory += PlannedMemory(
                weights + beside_weights(setup, *ends), weights + beside_weights(between, *ends)
            )
        return memory

    @property
    def caches(self) -> tuple[int, ...]:
        """The bytes of the KV caches of each rank."""
        if self.generation is None:
            return (0,) * self.mesh.size
        of_shares = setups_of(self.generation.setup, self.shares)
        of_first = self.mesh.pipeline_of(0)
        found = [
            sum(
                kv_cache_memory(of_shares[self.mesh.share(rank)], *ends)
                for ends in self.layers(rank)
            )
            for rank in of_first
        ]
        return (*found, *(0 for _ in range(self.mesh.size - len(of_first))))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of ranks whose memory macOS would not keep, of those that lack a kernel, and of
        checkpoints."""
        of_memory = unwired(
            [each.budget for each in self.limits], [each.planned for each in self.limits]
        )
        held = [(machine, self.layers(i)) for i, machine in enumerate(self.cluster.machines)]
        if self.training is None:
            shape = self.generated.setup.model.shape
            return (*of_memory, *kernel_warnings(shape, held, self.generated.load.prompt))
        work = self.training.workload
        length = self.training.lengths.longest[0]
        of_kernels = kernel_warnings(work.shape, held, length, work.first_trained)
        return (*of_memory, *of_kernels, *self.training.resumption.warnings)

    def resuming(self, resumption: Resumption) -> Job:
        """Return the same job, which saves its checkpoints there, and goes on from the one that was
        found."""
        return replace(self, training=replace(self.trained, resumption=resumption))

    def predict(self, length: int) -> Prediction:
        """Return the prediction of a training step of sequences of ``length`` tokens."""
        training = self.trained
        return predict(training.plan, training.workload, self.cluster, length)

    def seconds(self, length: int) -> float | None:
        """Return the predicted seconds of such a step; None where speeds are unknown."""
        return self.predict(length).step_seconds if self.cluster.unit == "seconds" else None

    @property
    def trained(self) -> TrainingPart:
        """The part that trains, of a job that does."""
        assert self.training is not None, "it trains"
        return self.training

    @property
    def generated(self) -> GenerationPart:
        """The part that generates, of a job that does."""
        assert self.generation is not None, "it generates"
        return self.generation
