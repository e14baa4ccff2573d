"""Sections of the options of a training run, as code takes them. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardmlx.config import common_options as common
from shardmlx.config.checks import (
    FINE_TUNE_TYPES,
    LORA_DEFAULTS,
    OPTIMIZERS,
    parse_lr_schedule,
    rows_of,
)
from shardmlx.config.common_options import AUTO, OFF
from shardmlx.config.objective import ObjectiveOptions
from shardmlx.config.options import in_group, option
from shardmlx.errors import UserError
from shardmlx.pipeline.schedules import SCHEDULES

_model = in_group("model")
_training = in_group("training, as in mlx_lm.lora")
_lora = in_group("adapters")
_rate = in_group("the learning rate")
_pipeline = in_group("pipeline")


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The model, the ranks that read its weights (each one that can, all, or rank 0 for all), and
    the device that computes with them."""

    model: str = common.model("Qwen/Qwen3-0.6b")
    revision: str | None = _model(
        None, "branch, tag or commit of a Hugging Face repository", metavar="NAME", unset="main"
    )
    weights: str = _model(
        AUTO,
        "who reads the weights: each rank that can, and rank 0 for the others; each; or rank 0",
        choices=(AUTO, "local", "rank0"),
    )
    weight_cache: str | None = _model(
        None, "directory for weights that a rank is sent", metavar="DIR", unset="they are not kept"
    )
    device: str = common.device(group="model")


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The files that say what the machines have, and the bytes that a rank may use."""

    hostfile: str | None = common.hostfile(None, group="pipeline")
    memory_limit: int | None = common.memory_limit(group="pipeline")
    profile: str | None = _pipeline(
        None, "times that shardmlx profile measured; files with commas between", metavar="FILE"
    )


SUM_DTYPES = ("float32", "bfloat16", "int8")
"""Types in which replicas send gradients that are summed."""

ZERO = (0, 1, 3)
"""Stages of ZeRO: of what replicas divide nothing, the optimizer's state, or the weights too."""

DIVIDED_WEIGHTS = ZERO[-1]


@dataclass(frozen=True, kw_only=True)
class LoraParts:
    """The keys of ``lora_parameters``, each as an option of its own."""

    lora_rank: int = _lora(LORA_DEFAULTS["rank"], "rank of the adapters", minimum=1)
    lora_scale: float = _lora(LORA_DEFAULTS["scale"], "factor of their output", metavar="FACTOR")
    lora_alpha: float | None = _lora(
        None,
        "this factor times the rank, as other programs count",
        metavar="ALPHA",
        unset="--lora-scale x --lora-rank",
        excludes="lora_scale",
    )
    lora_dropout: float = _lora(
        LORA_DEFAULTS["dropout"], "share of their input that is 0", metavar="P", minimum=0, below=1
    )
    lora_keys: Sequence[str] = _lora(
        [],
        "modules that have them, like self_attn.q_proj self_attn.v_proj",
        metavar="NAME",
        unset="all linear layers",
    )


@dataclass(frozen=True, kw_only=True)
class FineTune:
    """The part of a model that is trained, and the optimizer."""

    train: bool = _training(False, "train; implied unless --test is given")
    fine_tune_type: str = _training(
        "lora", "train adapters, or the weights of decoder layers", choices=FINE_TUNE_TYPES
    )
    num_layers: int = _training(16, "how many of the last layers to train; -1 for all", minimum=-1)
    lora_parameters: Mapping[str, Any] = option(
        dict(LORA_DEFAULTS),
        "rank, scale (or alpha) and dropout of the adapters, and keys: the modules that have them",
        flag=False,
        parts=LoraParts,
    )
    unfreeze_all: bool = option(
        False, "in a full fine-tune: all else than layers is trained too", flag=False
    )
    dtype: str | None = common.dtype(group="pipeline")
    optimizer: str = _training("adam", "optimizer", choices=tuple(OPTIMIZERS), parse=str.lower)
    optimizer_config: Mapping[str, Any] = option(
        {name: {} for name in ("adam", "adamw", "muon", "sgd", "adafactor")},
        "settings of each optimizer",
        flag=False,
    )
    learning_rate: float = _training(1e-5, "learning rate", metavar="RATE", above=0)
    lr_schedule: Mapping[str, Any] | None = _rate(
        None,
        "cosine_decay or linear_schedule, from --learning-rate to 0 over the run; or with "
        "arguments, like linear_schedule:1e-5,0,1000, or run for the updates of the run; in YAML "
        "name, arguments, warmup, warmup_init",
        metavar="NAME[:X,X]",
        unset="none: the rate stays",
        parse=parse_lr_schedule,
    )
    zero: int | None = _pipeline(
        None, "1 divides optimizer state, 3 weights too", choices=ZERO, unset="1 in full fine-tunes"
    )
    master_weights: bool = option(
        False, "update float32 copies of trained 16-bit weights", flag=False
    )
    sum_dtype: str = option(
        SUM_DTYPES[0], "type of gradients between replicas", flag=False, choices=SUM_DTYPES
    )

    @property
    def divides_optimizer(self) -> bool:
        """True if replicas divide the optimizer's state: by default where it is large."""
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

_AUTO_CHUNK = f"{AUTO_CHUNKS['metal']}, or {AUTO_CHUNKS['cpu']} on a CPU"

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
"""The choice to hold all, as mlx-lm does."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The batch of a step, and how a stage takes it; None is left to the run."""

    batch_size: int = _training(4, "sequences a step, over all replicas together", minimum=1)
    micro_batch_size: int | None = _pipeline(
        None,
        "sequences a micro-batch",
        unset="chosen: four micro-batches a rank; fewer if short, more if memory lacks",
        minimum=1,
    )
    max_seq_length: int = common.max_seq_length(group="data")
    pack: bool | None = _pipeline(
        None,
        "sequences of a micro-batch in one row, none padded",
        unset="chosen: where it is faster",
    )
    grad_accumulation_steps: int = _training(
        1, "steps whose gradients make one optimizer update", metavar="STEPS", minimum=1
    )
    recompute: str | None = _pipeline(
        None,
        "what backward computes again: norms and activations, or all of a layer",
        choices=RECOMPUTE,
        unset="chosen: the least that fits",
    )
    attention_chunk: str = option(
        AUTO,
        f"queries whose attention is computed at a time; auto: {_AUTO_CHUNK}; off: all",
        flag=False,
        choices=(AUTO, OFF),
        no=OFF,
    )
    loss_chunk: str = option(
        AUTO,
        "positions whose logits are computed at a time; auto: as above; counted: that count",
        flag=False,
        choices=(AUTO, COUNTED, OFF),
        no=OFF,
    )
    replica_rows: str | None = _pipeline(
        None,
        "rows of each replica, like 5,3; auto: by the speed of its machines",
        metavar="{auto,N,N}",
        unset="equal",
    )

    @property
    def given_rows(self) -> tuple[int, ...]:
        """Rows of each replica, as numbers that are given; empty where none are."""
        return rows_of(self.replica_rows)

    @property
    def recomputed(self) -> str:
        """The amount that is recomputed; none where that is left to the run."""
        return self.recompute or NONE

    def savings(self, backend: str, vocab_size: int) -> Savings:
        """Return what stages do to hold less, on machines of one backend."""
        usual = AUTO_CHUNKS[backend]
        positions = max(usual, AUTO_LOGITS // vocab_size)
        return Savings(
            recompute=self.recomputed,
            attention_chunk=None if self.attention_chunk == OFF else usual,
            loss_chunk=None if self.loss_chunk == OFF else positions,
            counted_only=self.loss_chunk == COUNTED,
        )


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """The division of the layers into stages, and the order in which these compute."""

    stage_map: str | None = common.stage_map(group="pipeline")
    pipeline_stages: int | None = _pipeline(
        None, "ranks in one pipeline; the others become replicas", unset="all ranks", minimum=1
    )
    data_parallel: int | None = _pipeline(
        None, "replicas; instead of --pipeline-stages", unset="ranks / --pipeline-stages", minimum=1
    )
    tensor_parallel: int | None = _pipeline(
        None,
        "ranks that compute each layer together",
        metavar="RANKS",
        minimum=1,
        unset="chosen: 1, or more where a step is clearly faster or nothing else fits",
    )
    tensor_shares: str | None = common.tensor_shares(flag=False)
    expert_parallel: bool = common.expert_parallel(flag=False)
    partitioner: str = common.partitioner(group="pipeline")
    schedule: str = _pipeline(
        AUTO,
        "order of forward and backward; auto: the fastest that fits, as predicted",
        choices=(AUTO, *SCHEDULES),
    )

    @property
    def across(self) -> int:
        """Ranks that compute each layer together; 1 where that is left to the run."""
        return self.tensor_parallel or 1


def unlike_shares(tune: FineTune, layout: LayoutOptions) -> Iterator[tuple[str, object, str]]:
    """Yield each option that may not stand beside tensor shares, whether it does, and the
    remedy."""
    yield "optimizer", tune.optimizer in ("muon", "adafactor"), "use adam, adamw, sgd, lars or lamb"
    yield "zero", tune.zero, "leave it out"
    yield "unfreeze_all", tune.unfreeze_all, "leave it out"
    yield "sum_dtype", tune.keeps_errors, "use bfloat16"
    yield "stage_map", layout.stage_map is not None, "give --pipeline-stages"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """A training run as far as its plan depends on it; ``runs`` like it train side by side. It
    ``saves`` checkpoints, or none."""

    model: str
    revision: str | None
    fine_tune: FineTune
    batch: BatchOptions
    layout: LayoutOptions
    machines: MachineOptions
    loss: ObjectiveOptions
    saves: bool = False
    runs: int = 1

    def for_ranks(self, ranks: int) -> RunSpec:
        """Return the same with pipeline stages in the place of ``data_parallel``, for so many
        ranks. Raises ``UserError`` where the replicas do not divide them."""
        replicas = self.layout.data_parallel
        asked = self.layout.pipeline_stages
        if replicas is None:
            return self
        if ranks % replicas:
            fitting = ", ".join(str(each) for each in range(1, ranks + 1) if ranks % each == 0)
            raise UserError(
                f"--data-parallel {replicas} does not divide {ranks} ranks", f"use one of {fitting}"
            )
        stages = ranks // replicas
        if asked not in (None, stages):
            raise UserError(
                f"--data-parallel {replicas} of --pipeline-stages {asked} are not {ranks} ranks",
                "leave one out",
            )
        layout = replace(self.layout, pipeline_stages=stages, data_parallel=None)
        return replace(self, layout=layout)

    def with_shares(self, across: int) -> RunSpec:
        """Return the same with so many ranks for each layer; replicas of shares divide nothing."""
        tune = replace(self.fine_tune, zero=0) if across > 1 else self.fine_tune
        layout = replace(self.layout, tensor_parallel=across)
        return replace(self, fine_tune=tune, layout=layout)

    def answers(self, asked: RunSpec) -> dict[str, Any]:
        """Return what this says where ``asked`` leaves something open, by option."""
        return {
            name: value
            for part in ("fine_tune", "batch", "layout")
            for name, value in asdict(getattr(self, part)).items()
            if value != getattr(getattr(asked, part), name)
        }
