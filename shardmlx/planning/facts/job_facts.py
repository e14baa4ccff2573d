"""Facts from which rank 0 plans a job: of the model, the machines, and the work. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardmlx.checkpoint.resume import CheckpointFacts
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.plan_facts import PlanFacts, SequenceLengths
from shardmlx.planning.facts.workload import ModelSizes, Workload
from shardmlx.planning.memory.limits import MemoryBudget, budgets_of, within

TYPICAL_PROMPT = 512
"""Tokens of a prompt, as assumed where none is known yet."""


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

    @classmethod
    def typical(
        cls,
        sequences: int,
        capacity: int,
        context: int,
        most_tokens: int,
        *,
        keeps_prefixes: bool = False,
    ) -> GenerationLoad:
        """Return the load before any prompt is known: of at most ``most_tokens`` an answer."""
        return cls(
            sequences=sequences,
            prompt=min(TYPICAL_PROMPT, context),
            answer=min(most_tokens, context // 2),
            context=context,
            capacity=capacity,
            keeps_prefixes=keeps_prefixes,
        )


@dataclass(frozen=True, slots=True)
class GenerationFacts:
    """The load of what is generated, the model that drafts on rank 0, if one does, or the bytes of
    the model's own ``head`` that drafts on the last rank."""

    load: GenerationLoad
    draft: ModelSizes | None = None
    head: int = 0


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """The work of what is trained, and the ``lengths`` of its rows."""

    workload: Workload
    lengths: SequenceLengths
    trained: Sequence[bool] | None = None
    """Flags of all layers of the model: True if one, with the embedding or the head beside it, has
    weights to train. None before the model is built: the options then say so."""

    def stages(self, ranges: Sequence[tuple[int, int]]) -> tuple[bool, ...] | None:
        """Return whether stages with these ranges of layers have weights to train, if it is
        known."""
        if self.trained is None:
            return None
        return tuple(any(self.trained[start:stop]) for start, stop in ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts that a job is planned from. ``machines`` are the actual ones, one of each rank;
    ``stage_map`` is the user's, and ``digest`` identifies the model's configuration."""

    model: ModelSizes
    machines: Cluster
    budgets: tuple[MemoryBudget, ...] = ()
    """The bytes that each rank's arrays may take, measured; none before the ranks run."""
    stage_map: StageMap | None = None
    digest: str = ""
    training: TrainingFacts | None = None
    generation: GenerationFacts | None = None
    checkpoints: CheckpointFacts | None = None
    """The checkpoints that ranks see; None where nobody looked for any."""

    def with_lengths(self, lengths: SequenceLengths) -> Facts:
        """Return the same facts with rows of other lengths to train."""
        return replace(self, training=replace(self.to_train, lengths=lengths))

    @property
    def to_train(self) -> TrainingFacts:
        """The facts of training, of a job that trains."""
        assert self.training is not None, "it is known what is to be trained"
        return self.training

    @property
    def to_generate(self) -> GenerationFacts:
        """The facts of generation, of a job that generates."""
        assert self.generation is not None, "it is known what is to be generated"
        return self.generation

    @property
    def of_training(self) -> PlanFacts:
        """The facts from which a way to train is chosen."""
        return PlanFacts(
            workload=self.to_train.workload,
            cluster=self.cluster,
            lengths=self.to_train.lengths,
            stage_map=self.stage_map,
        )

    @property
    def allowed(self) -> tuple[MemoryBudget, ...]:
        """The ``budgets``, or the usual share of each machine before the ranks run."""
        return self.budgets or budgets_of(self.machines)

    @property
    def cluster(self) -> Cluster:
        """The machines, with no more memory than their ``budgets``."""
        return within(self.machines, self.budgets) if self.budgets else self.machines
