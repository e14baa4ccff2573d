"""Parts of the options: code takes the part that it needs, not all options of a command.

Each part is made of a command's options by name: ``FineTune.of(config)``. No MLX, no MPI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from shardmlx.config.common_options import AUTO, OFF
from shardmlx.config.options import split_names
from shardmlx.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A part of the options. Its fields have the names and the meaning of the options."""

    @classmethod
    def of(cls, options: object) -> Self:
        """Take the part out of ``options``; what these lack must have a default here."""
        names = (each.name for each in fields(cls))
        return cls(**{name: getattr(options, name) for name in names if hasattr(options, name)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource(Spec):
    """The model, and who reads its weights."""

    model: str
    revision: str | None
    weights: str
    weight_cache: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions(Spec):
    """The files that say what the machines have, and the bytes that a rank may use."""

    hostfile: str | None
    memory_limit: int | None
    profile: str | None = None


SUM_DTYPES = ("float32", "bfloat16", "int8")
"""Types in which replicas send gradients that are summed."""


ZERO = (0, 1, 3)
"""Stages of ZeRO: of what replicas divide nothing, the optimizer's state, or the weights too."""

DIVIDED_WEIGHTS = ZERO[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTune(Spec):
    """The part of a model that is trained, the optimizer, and where checkpoints go. Where ``train``
    is False nothing is trained: the run only evaluates."""

    train: bool
    fine_tune_type: str
    num_layers: int
    lora_parameters: Mapping[str, Any]
    unfreeze_all: bool
    dtype: str | None
    optimizer: str
    optimizer_config: Mapping[str, Any]
    learning_rate: float
    lr_schedule: Mapping[str, Any] | None
    zero: int | None = None
    master_weights: bool = False
    sum_dtype: str = SUM_DTYPES[0]
    checkpoint_dir: str | None = None

    @property
    def divides_optimizer(self) -> bool:
        """True if replicas divide the optimizer's state among them: by default where it is large,
        that of the weights themselves."""
        return self.is_full if self.zero is None else self.zero > 0

    @property
    def divides_weights(self) -> bool:
        """True if replicas divide the weights themselves, and gather them layer by layer."""
        return self.zero == DIVIDED_WEIGHTS

    @property
    def keeps_errors(self) -> bool:
        """True if what is rounded off of a sum over replicas is kept for the next."""
        return self.sum_dtype == "int8"

    @property
    def error_copies(self) -> int:
        """Number of copies of what is rounded off that a replica holds: where checkpoints are
        saved, that of the last update too."""
        return self.keeps_errors * (1 + (self.checkpoint_dir is not None))

    @property
    def is_full(self) -> bool:
        """True if the weights of layers are trained themselves, without adapters."""
        return self.fine_tune_type == "full"

    @property
    def optimizer_settings(self) -> Mapping[str, Any]:
        """The settings of the optimizer that is used."""
        settings: Mapping[str, Any] = self.optimizer_config.get(self.optimizer) or {}
        return settings


RECOMPUTE = NONE, SELECTIVE, FULL = ("none", "selective", "full")
"""Amounts that the backward pass computes again, in ascending order."""

COUNTED = "counted"
"""The word for logits that are computed only where a token counts."""

AUTO_CHUNKS = {"cpu": 128, "metal": 512}
"""Tokens of a chunk that is left to the run, by backend: on a CPU the fastest that was measured; a
GPU does more at a time."""

AUTO_LOGITS = 2**20
"""Logits that are computed at once where the chunk is left to the run, even if they are of more
tokens: pieces of 4 MiB would save little, and a trained lm_head computes pieces twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """Means by which a stage holds less; the loss and the gradients are the same.

    ``recompute`` is one of ``RECOMPUTE``: what is large and cheap, or all but the inputs of layers.
    ``attention_chunk`` and ``loss_chunk`` are the most queries whose scores, and the most positions
    whose logits, are in memory at a time; None for all. With ``counted_only`` logits are computed
    only where a token counts, also where those of all positions would be one piece.
    """

    recompute: str = NONE
    attention_chunk: int | None = None
    loss_chunk: int | None = None
    counted_only: bool = False

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute {self.recompute!r}: one of {', '.join(RECOMPUTE)}")
        for chunk in (self.attention_chunk, self.loss_chunk):
            if chunk is not None and chunk < 1:
                raise ValueError(f"a chunk of {chunk}: from 1")
        if self.counted_only and self.loss_chunk is None:
            raise ValueError("counted_only with logits of all positions")

    def takes_loss_in_pieces(self, positions: int) -> bool:
        """Return False where the logits of a micro-batch of so many positions are held at once."""
        chunk = self.loss_chunk
        return chunk is not None and (self.counted_only or chunk < positions)


NO_SAVINGS = Savings()
"""The choice of those who hold all, as mlx-lm does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions(Spec):
    """The batch of a step, and how a stage takes it; None is left to the run.

    ``attention_chunk`` and ``loss_chunk`` are ``auto`` or ``off``; the latter also ``counted``.
    """

    batch_size: int
    micro_batch_size: int | None
    max_seq_length: int
    pack: bool | None
    grad_accumulation_steps: int
    recompute: str | None
    attention_chunk: str = AUTO
    loss_chunk: str = AUTO
    replica_rows: str | None = None

    @property
    def given_rows(self) -> tuple[int, ...]:
        """Rows of each replica, as numbers that are given; empty where none are."""
        if self.replica_rows in (None, AUTO):
            return ()
        return tuple(map(int, str(self.replica_rows).split(",")))

    @property
    def with_defaults(self) -> Self:
        """The same, where options are left to the run, as mlx_lm.lora does it."""
        return replace(self, pack=bool(self.pack), recompute=self.recomputed)

    @property
    def recomputed(self) -> str:
        """The amount that is recomputed; none where that is left to the run."""
        return self.recompute or NONE

    def savings(self, recompute: str, backend: str, vocab_size: int) -> Savings:
        """Return what stages do to hold less, on machines of one backend."""
        usual = AUTO_CHUNKS[backend]
        positions = max(usual, AUTO_LOGITS // vocab_size)
        return Savings(
            recompute=recompute,
            attention_chunk=None if self.attention_chunk == OFF else usual,
            loss_chunk=None if self.loss_chunk == OFF else positions,
            counted_only=self.loss_chunk == COUNTED,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions(Spec):
    """The division of the layers into stages, and the order in which these compute."""

    stage_map: str | None
    pipeline_stages: int | None
    data_parallel: int | None
    partitioner: str
    schedule: str

    def for_ranks(self, ranks: int) -> Self:
        """Return the same with pipeline stages in the place of ``data_parallel``, for so many
        ranks. Raises ``UserError`` where the replicas do not divide them."""
        replicas = self.data_parallel
        if replicas is None:
            return self
        if ranks % replicas:
            fitting = [str(each) for each in range(1, ranks + 1) if ranks % each == 0]
            raise UserError(
                f"--data-parallel {replicas} does not divide {ranks} ranks",
                f"use {', '.join(fitting[:-1])} or {fitting[-1]}" if ranks > 1 else "leave it out",
            )
        stages = ranks // replicas
        if self.pipeline_stages not in (None, stages):
            raise UserError(
                f"--data-parallel {replicas} of --pipeline-stages {self.pipeline_stages} are not "
                f"{ranks} ranks",
                "leave one out",
            )
        return replace(self, pipeline_stages=stages, data_parallel=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureKeys(Spec):
    """The keys of rows that hold the text to learn."""

    prompt_feature: str = "prompt"
    completion_feature: str = "completion"
    chat_feature: str = "messages"
    text_feature: str = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions(FeatureKeys):
    """The data sets that a run needs, and how their rows become sequences."""

    train: bool
    test: bool
    data: str
    hf_dataset: Mapping[str, Any] | Sequence[Any] | None
    max_seq_length: int
    long_sequences: str
    mask_prompt: bool
    trust_remote_code: bool
    batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions(Spec):
    """The steps of a run, what stands between them, and what each update does."""

    iters: int
    seed: int
    grad_accumulation_steps: int
    steps_per_report: int
    steps_per_eval: int
    val_batches: int
    test_batches: int
    save_every: int
    on_nonfinite: str
    max_grad_norm: float | None
    loss_scale: float | str | None
    clear_cache_threshold: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions(Spec):
    """The places to which a run writes its weights, its events and its trace."""

    adapter_path: str
    metrics_file: str | None
    metrics_port: int | None
    metrics_host: str
    report_to: str | None
    project_name: str | None
    trace: str | None

    @property
    def services(self) -> tuple[str, ...]:
        """The names in ``report_to``, in lower case."""
        return tuple(name.lower() for name in split_names(self.report_to))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions(Spec):
    """The place of checkpoints, and the one from which a run of ``iters`` steps goes on."""

    checkpoint_dir: str | None
    checkpoint_every: int
    keep_checkpoints: int
    checkpoint_storage: str
    resume: str
    iters: int

    @property
    def named(self) -> Path | None:
        """The directory of the checkpoint that the user names; None for auto and never."""
        return None if self.resume in ("auto", "never") else Path(self.resume)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """A training run as far as its plan depends on it."""

    model: str
    revision: str | None
    fine_tune: FineTune
    batch: BatchOptions
    layout: LayoutOptions
    machines: MachineOptions

    def for_ranks(self, ranks: int) -> RunSpec:
        """Return the same with a layout for so many ranks. Raises ``UserError``."""
        return replace(self, layout=self.layout.for_ranks(ranks))

    def answers(self, asked: RunSpec) -> dict[str, Any]:
        """Return what this says where ``asked`` leaves something open, by option."""
        return {
            name: value
            for mine, theirs in (
                (self.fine_tune, asked.fine_tune),
                (self.batch, asked.batch),
                (self.layout, asked.layout),
            )
            for name, value in asdict(mine).items()
            if value != getattr(theirs, name)
        }

    @classmethod
    def of(cls, options: Any) -> RunSpec:
        """Take the parts out of the options of ``shardmlx.train``."""
        return cls(
            model=options.model,
            revision=options.revision,
            fine_tune=FineTune.of(options),
            batch=BatchOptions.of(options),
            layout=LayoutOptions.of(options),
            machines=MachineOptions.of(options),
        )
