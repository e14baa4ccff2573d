"""The options of ``shardmlx.train``: those of ``mlx_lm.lora``, with its defaults, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from shardmlx.common.units import parse_bytes
from shardmlx.config import common_options as common
from shardmlx.config.checks import (
    FINE_TUNE_TYPES,
    OPTIMIZERS,
    check_lora,
    check_loss_scale,
    check_lr_schedule,
    check_optimizer_config,
    check_replica_rows,
    filled_lr_schedule,
    parse_loss_scale,
    parse_lr_schedule,
)
from shardmlx.config.command_line import CommandLine
from shardmlx.config.common_options import AUTO, OFF
from shardmlx.config.data import DataConfig
from shardmlx.config.options import OptionError, in_group, option
from shardmlx.config.specs import (
    AUTO_CHUNKS,
    COUNTED,
    FULL,
    NONE,
    RECOMPUTE,
    SUM_DTYPES,
    ZERO,
    OutputOptions,
)
from shardmlx.pipeline.schedules import SCHEDULES

_TRAINING = "training, as in mlx_lm.lora"
_PIPELINE = "pipeline"
_CHECKPOINTS = "checkpoints and failures"

_AUTO_CHUNK = f"{AUTO_CHUNKS['metal']}, or {AUTO_CHUNKS['cpu']} on a CPU"

REPORTERS = ("wandb", "swanlab", "tensorboard")

STORAGES = ("auto", "shared", "rank0", "neighbour")

_SHOWN = (
    *("model", "data", "config", "dry_run", "iters", "batch_size", "learning_rate"),
    *("train", "fine_tune_type", "num_layers", "adapter_path", "resume_adapter_file"),
    *("mask_prompt", "max_seq_length", "pipeline_stages", "hostfile"),
)
"""The options that ``--help`` lists."""

PASSED_OVER: Mapping[str, str] = MappingProxyType(
    {
        "lora_layers": "the number of layers is num_layers",
        "use_dora": "DoRA is fine_tune_type: dora",
        "use_wandb": "W&B is report_to: wandb",
        "wandb": "W&B is report_to: wandb, with the project's name in project_name",
        "adapter_file": "the directory of the adapters is adapter_path",
    }
)
"""Keys of older YAML files that mlx_lm.lora passes over, and what to write instead."""


_training = in_group(_TRAINING)
_rate = in_group("the learning rate")
_pipeline = in_group(_PIPELINE)
_output = in_group("reports")
_checkpoints = in_group(_CHECKPOINTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(DataConfig):
    """The options of a training run, checked as far as neither model nor data is needed.

    ``train`` is implied unless ``test`` alone is given. Mappings are the instance's own copies
    and are read only. Raises ``OptionError``, a ``UserError``.
    """

    config: str | None = common.config(group=_TRAINING)
    dry_run: bool = _training(
        False,
        "print the plan: memory of each rank, time of a step, what would be written; then end",
    )
    train: bool = _training(False, "train; implied unless --test is given")
    test: bool = _training(False, "evaluate on the test set: alone, or after --train")
    batch_size: int = _training(4, "sequences a step, over all replicas together", minimum=1)
    iters: int = _training(1000, "steps to train for", metavar="STEPS", minimum=1)
    epochs: float | None = _training(
        None,
        "passes over the training set, instead of --iters",
        metavar="N",
        unset="as many as --iters makes",
        above=0,
        excludes="iters",
    )
    learning_rate: float = _training(1e-5, "learning rate", metavar="RATE", above=0)
    fine_tune_type: str = _training(
        "lora",
        "what to train: adapters, or the weights of the decoder layers",
        choices=FINE_TUNE_TYPES,
    )
    num_layers: int = _training(16, "how many of the last layers to train; -1 for all", minimum=-1)
    adapter_path: str = _training("adapters", "directory of the adapters", metavar="DIR")
    resume_adapter_file: str | None = _training(
        None, "adapters or weights to start from", metavar="FILE"
    )
    save_every: int = _training(100, "steps between saved adapters", metavar="STEPS", minimum=1)
    steps_per_report: int = _training(10, "steps between reports", metavar="STEPS", minimum=1)
    steps_per_eval: int = _training(200, "steps between validations", metavar="STEPS", minimum=1)
    val_batches: int = _training(
        25, "batches of one validation; -1 for all, 0 for none", metavar="BATCHES", minimum=-1
    )
    test_batches: int = _training(
        500, "batches of the test; -1 for all", metavar="BATCHES", minimum=-1
    )
    optimizer: str = _training("adam", "optimizer", choices=tuple(OPTIMIZERS), parse=str.lower)
    optimizer_config: Mapping[str, Any] = option(
        {name: {} for name in ("adam", "adamw", "muon", "sgd", "adafactor")},
        "settings of each optimizer",
        flag=False,
    )
    grad_accumulation_steps: int = _training(
        1, "steps whose gradients make one optimizer update", metavar="STEPS", minimum=1
    )
    grad_checkpoint: bool | None = _training(
        None, "the same as --recompute full, or none", unset="as --recompute"
    )
    clear_cache_threshold: int = _training(
        0,
        "empty MLX's buffer cache between steps above this size, like 2GiB",
        metavar="SIZE",
        minimum=0,
        parse=parse_bytes,
    )
    seed: int = _training(
        0, "seed of data order, dropout and new weights", minimum=0, maximum=2**32 - 1
    )

    lora_parameters: Mapping[str, Any] = option(
        {"rank": 8, "dropout": 0.0, "scale": 20.0},
        "rank, scale and dropout of the adapters, and keys: the modules that have them",
        flag=False,
    )
    lr_schedule: Mapping[str, Any] | None = _rate(
        None,
        "learning-rate schedule: cosine_decay, or with its arguments "
        "linear_schedule:1e-5,0,1000. Without, both fall from --learning-rate to 0 over the run. "
        "In YAML a mapping of name, arguments, warmup and "
        "warmup_init",
        metavar="NAME[:X,X]",
        unset="none: the rate stays",
        parse=parse_lr_schedule,
    )
    warmup: int | None = _rate(
        None,
        "updates in which the learning rate rises from 0",
        metavar="UPDATES",
        minimum=0,
        unset="none, or warmup in lr_schedule",
    )

    pipeline_stages: int | None = _pipeline(
        None, "ranks in one pipeline; the others become replicas", unset="all ranks", minimum=1
    )
    data_parallel: int | None = _pipeline(
        None,
        "replicas, each with a part of the batch; instead of --pipeline-stages",
        unset="what --pipeline-stages leaves of the ranks",
        minimum=1,
    )
    replica_rows: str | None = _pipeline(
        None,
        "rows of each replica, like 5,3; auto: by the speed of its machines",
        metavar="{auto,N,N}",
        unset="equal",
    )
    hostfile: str | None = common.hostfile(None, group=_PIPELINE)
    profile: str | None = _pipeline(
        None,
        "times measured by shardmlx profile; several files with commas between",
        metavar="FILE",
    )
    micro_batch_size: int | None = _pipeline(
        None,
        "sequences a micro-batch",
        unset="chosen: four micro-batches a rank; fewer of short sequences, more if memory lacks",
        minimum=1,
    )
    schedule: str = _pipeline(
        AUTO,
        "order of forward and backward; auto: of those that fit the one predicted to be fastest",
        choices=(AUTO, *SCHEDULES),
    )
    partitioner: str = common.partitioner(group=_PIPELINE)
    stage_map: str | None = common.stage_map(group=_PIPELINE)
    pack: bool | None = _pipeline(
        None,
        "sequences of a micro-batch in one row, none padded; the loss is the same",
        unset="chosen: on where that is predicted to be faster",
    )
    recompute: str | None = _pipeline(
        None,
        "what backward computes again: selective, norms and activations; full, all of a layer",
        choices=RECOMPUTE,
        unset="chosen: the least that fits",
    )
    attention_chunk: str = _pipeline(
        AUTO,
        f"queries whose attention is computed at a time; auto: {_AUTO_CHUNK}; off: all",
        choices=(AUTO, OFF),
        no=OFF,
    )
    loss_chunk: str = _pipeline(
        AUTO,
        f"positions whose logits are computed at a time; auto: {_AUTO_CHUNK}; counted: where "
        "tokens count; off: all",
        choices=(AUTO, COUNTED, OFF),
        no=OFF,
    )
    zero: int | None = _pipeline(
        None,
        "ZeRO: 1 divides optimizer state, 3 weights too",
        choices=ZERO,
        unset="1 in full fine-tunes",
    )
    master_weights: bool = _pipeline(False, "update float32 copies of trained 16-bit weights")
    sum_dtype: str = _pipeline(
        SUM_DTYPES[0], "type of gradients between replicas", choices=SUM_DTYPES
    )
    loss_scale: float | str | None = _pipeline(
        None,
        "factor of the loss: auto, none, or power of two",
        metavar="{auto,none,N}",
        unset="auto for float16",
        parse=parse_loss_scale,
        no="none",
    )
    max_grad_norm: float | None = _pipeline(
        None, "clip the global gradient norm to this", metavar="NORM", unset="none", above=0
    )
    dtype: str | None = common.dtype(group=_PIPELINE)
    unfreeze_all: bool = _pipeline(
        False, "with --fine-tune-type full: train embedding, final norm and lm_head too"
    )
    memory_limit: int | None = common.memory_limit(group=_PIPELINE)

    metrics_file: str | None = _output(
        None, "write one JSON line for every report here", metavar="FILE"
    )
    report_to: str | None = _output(
        None, f"services to log to, with commas between: {', '.join(REPORTERS)}", metavar="NAMES"
    )
    project_name: str | None = _output(None, "name of the project there", metavar="NAME")
    metrics_port: int | None = _output(
        None,
        "port at which rank 0 shows the run: its page, and /metrics for Prometheus; 0 takes a free "
        "one",
        metavar="PORT",
        minimum=0,
        maximum=65535,
    )
    metrics_host: str = option(
        "127.0.0.1", "address at which it does; others than this machine's own need it", flag=False
    )
    trace: str | None = _output(
        None, "write what every rank did when here, for Perfetto", metavar="FILE"
    )

    checkpoint_dir: str | None = _checkpoints(
        None,
        "save here all that the run is, to resume it later",
        metavar="DIR",
        unset="none; ADAPTER-PATH/checkpoints under launch",
    )
    checkpoint_every: int = _checkpoints(
        100, "steps between checkpoints", metavar="STEPS", minimum=1
    )
    keep_checkpoints: int = _checkpoints(
        2, "how many checkpoints stay; older ones are deleted", minimum=1
    )
    checkpoint_storage: str = _checkpoints(
        "auto",
        "where: on a disk that all ranks see, on rank 0's, or each part on its rank's "
        "with a copy on a neighbour's; auto finds out",
        choices=STORAGES,
    )
    resume: str = _checkpoints(
        "auto",
        "auto: from the newest good checkpoint, if there is one; never; or the directory of one",
        metavar="DIR",
    )
    on_nonfinite: str = _checkpoints(
        "stop",
        "when loss or gradient is not finite: stop, or skip the update and count it",
        choices=("stop", "skip"),
    )
    timeout: float = common.timeout(group=_CHECKPOINTS)

    def __post_init__(self) -> None:
        super(TrainConfig, self).__post_init__()
        if self.num_layers == 0:
            raise OptionError(
                "num_layers",
                "is 0",
                "give -1 to train all of them, as mlx_lm.lora does with 0, or the number of the "
                "last layers to train",
            )
        if not self.test:
            object.__setattr__(self, "train", True)
        if not self.train and self.resume not in ("auto", "never"):
            raise OptionError("resume", f"is {self.resume} with --test alone", "nothing is trained")
        self._merge_recompute()
        if self.fine_tune_type != "full":
            check_lora(self.lora_parameters)
        check_optimizer_config(self.optimizer_config)
        self._fill_lr_schedule()
        if self.train and self.epochs is None and self.grad_accumulation_steps > self.iters:
            raise OptionError(
                "grad_accumulation_steps",
                f"is {self.grad_accumulation_steps} with iters {self.iters}: no update is made",
                f"give {self.iters} or less",
            )
        if self.replica_rows is not None:
            check_replica_rows(self.replica_rows)
        if self.loss_scale is not None:
            check_loss_scale(self.loss_scale)
        for service in OutputOptions.of(self).services:
            if service not in REPORTERS:
                raise OptionError(
                    "report_to", f"names {service!r}", f"choose from {', '.join(REPORTERS)}"
                )
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise OptionError(
                "micro_batch_size",
                f"is {self.micro_batch_size}",
                f"give at most the batch size, {self.batch_size}",
            )
        if self.data_parallel is not None and self.stage_map is not None:
            raise OptionError(
                "data_parallel",
                f"is {self.data_parallel} with a stage map, which gives the ranks of a replica",
                "leave one out",
            )
        if self.unfreeze_all and self.fine_tune_type != "full":
            raise OptionError(
                "unfreeze_all", f"is set with fine_tune_type {self.fine_tune_type}", "use full"
            )
        if self.master_weights and self.fine_tune_type != "full":
            raise OptionError(
                "master_weights",
                f"is set with fine_tune_type {self.fine_tune_type}, whose adapters are float32",
                "leave it out",
            )
        if self.master_weights and self.dtype == "float32":
            raise OptionError("master_weights", "is set with dtype float32", "leave one out")

    def _merge_recompute(self) -> None:
        """Let ``recompute`` say what ``grad_checkpoint`` says, mlx_lm's option."""
        if self.grad_checkpoint is None:
            return
        meant = FULL if self.grad_checkpoint else NONE
        if self.recompute not in (None, meant):
            given = "--grad-checkpoint" if self.grad_checkpoint else "--no-grad-checkpoint"
            raise OptionError("recompute", f"is {self.recompute} with {given}", "leave one out")
        object.__setattr__(self, "recompute", meant)

    def _fill_lr_schedule(self) -> None:
        """Check the schedule, and give it the arguments and the warm-up that it lacks.

        With ``epochs`` these follow once the data is read.
        """
        if self.lr_schedule is None and not self.warmup:
            return
        updates = max(1, self.iters // self.grad_accumulation_steps)
        schedule = filled_lr_schedule(self.lr_schedule, self.warmup, self.learning_rate, updates)
        check_lr_schedule(schedule)
        if self.epochs is None:
            object.__setattr__(self, "lr_schedule", schedule)

    def with_iters(self, iters: int) -> TrainConfig:
        """Return the same for so many steps, in the place of ``epochs``."""
        return replace(self, iters=iters, epochs=None)

    @property
    def changed(self) -> list[str]:
        """The names of the options that are not at their defaults."""
        defaults = type(self)()
        names = (each.name for each in fields(self))
        return [name for name in names if getattr(self, name) != getattr(defaults, name)]

    def to_adapter_config(self) -> dict[str, Any]:
        """Return what ``adapter_config.json`` holds: every option, JSON-able, as mlx_lm writes it.

        ``mlx_lm.tuner.utils.load_adapters`` reads fine_tune_type, num_layers, lora_parameters.
        """
        values = asdict(self)
        if self.fine_tune_type == "full":
            values["lora_parameters"] = None
        return dict(sorted(values.items()))


LINE = CommandLine(
    options=TrainConfig,
    command="train",
    description="Fine-tune a language model through pipeline stages, one MPI rank each.",
    shown=_SHOWN,
    passed_over=PASSED_OVER,
)
