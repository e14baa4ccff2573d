"""The options of ``shardmlx.train``: those of ``mlx_lm.lora``, with its defaults, and ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardmlx.common.units import parse_bytes
from shardmlx.config import command_line
from shardmlx.config.checks import (
    FINE_TUNE_TYPES,
    OPTIMIZERS,
    check_hf_dataset,
    check_lora,
    check_lr_schedule,
    check_optimizer_config,
)
from shardmlx.config.command_line import (
    CommandParser,
    Given,
    load_given_options,
    load_options,
)
from shardmlx.config.common_options import (
    AUTO,
    dtype_option,
    hostfile_option,
    memory_limit_option,
    partitioner_option,
    stage_map_option,
    timeout_option,
    weight_cache_option,
    weights_option,
)
from shardmlx.config.options import OptionError, check_options, option
from shardmlx.pipeline.schedules import SCHEDULES, get_schedule

_DATA = "model and data"
_TRAINING = "training, as in mlx_lm.lora"
_PIPELINE = "pipeline"
_CHECKPOINTS = "checkpoints and failures"

REPORTERS = ("wandb", "swanlab", "tensorboard")

STORAGES = ("auto", "shared", "rank0", "neighbour")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The options of a training run, checked as far as neither model nor data is needed.

    ``train`` is implied unless ``test`` alone is given. Mappings are the instance's own copies
    and are read only. Raises ``OptionError``, a ``UserError``.
    """

    model: str = option(
        "Qwen/Qwen3-0.6b", "model directory, or Hugging Face repository", group=_DATA
    )
    weights: str = weights_option(_DATA)
    weight_cache: str | None = weight_cache_option(_DATA)
    data: str = option(
        "mlx-community/WikiSQL",
        "directory with {train,valid,test}.jsonl, or Hugging Face data set",
        group=_DATA,
    )
    data_cache: str = option(
        "auto",
        "directory in which rank 0 keeps the tokens of data files for later runs; auto: "
        "~/.cache/shardmlx/data; none: they are not kept",
        group=_DATA,
    )
    hf_dataset: Mapping[str, Any] | Sequence[Any] | None = option(
        None, "Hugging Face data sets with their splits and features", flag=False
    )
    prompt_feature: str = option("prompt", "key of the prompt in the data", flag=False)
    completion_feature: str = option("completion", "key of the completion", flag=False)
    chat_feature: str = option("messages", "key of the chat messages", flag=False)
    text_feature: str = option("text", "key of plain text", flag=False)
    max_seq_length: int = option(2048, "longest sequence in tokens", minimum=2, group=_DATA)
    long_sequences: str = option(
        "cut", "what to do with sequences longer than that", choices=("cut", "error"), group=_DATA
    )
    mask_prompt: bool = option(False, "leave the prompt out of the loss", group=_DATA)
    trust_remote_code: bool = option(
        False, "run code that comes with model or tokenizer", group=_DATA
    )

    config: str | None = option(
        None, "YAML file with any of these options; flags win over it", short="-c", group=_TRAINING
    )
    train: bool = option(False, "train; implied unless --test is given", group=_TRAINING)
    test: bool = option(False, "evaluate on the test set: alone, or after --train", group=_TRAINING)
    fine_tune_type: str = option(
        "lora",
        "what to train: adapters, or the weights of the decoder layers",
        choices=FINE_TUNE_TYPES,
        group=_TRAINING,
    )
    num_layers: int = option(
        16, "how many of the last layers to train; -1 for all", minimum=-1, group=_TRAINING
    )
    lora_parameters: Mapping[str, Any] = option(
        {"rank": 8, "dropout": 0.0, "scale": 20.0}, "rank, scale, dropout, keys", flag=False
    )
    optimizer: str = option(
        "adam", "optimizer", choices=tuple(OPTIMIZERS), parse=str.lower, group=_TRAINING
    )
    optimizer_config: Mapping[str, Any] = option(
        {name: {} for name in OPTIMIZERS}, "settings of each optimizer", flag=False
    )
    learning_rate: float = option(1e-5, "learning rate", above=0, group=_TRAINING)
    lr_schedule: Mapping[str, Any] | None = option(
        None, "learning-rate schedule: name, arguments, warmup, warmup_init", flag=False
    )
    batch_size: int = option(
        4, "sequences a step, over all replicas together", minimum=1, group=_TRAINING
    )
    iters: int = option(1000, "steps to train for", minimum=1, group=_TRAINING)
    grad_accumulation_steps: int = option(
        1, "steps whose gradients make one optimizer update", minimum=1, group=_TRAINING
    )
    grad_checkpoint: bool | None = option(
        None,
        "recompute activations in backward, to save memory (default: where nothing else fits)",
        group=_TRAINING,
    )
    clear_cache_threshold: int = option(
        0,
        "empty MLX's buffer cache between steps above this size, like 2GiB",
        minimum=0,
        parse=parse_bytes,
        group=_TRAINING,
    )
    val_batches: int = option(
        25, "batches of one validation; -1 for all, 0 for none", minimum=-1, group=_TRAINING
    )
    test_batches: int = option(500, "batches of the test; -1 for all", minimum=-1, group=_TRAINING)
    steps_per_report: int = option(10, "steps between reports", minimum=1, group=_TRAINING)
    steps_per_eval: int = option(200, "steps between validations", minimum=1, group=_TRAINING)
    save_every: int = option(100, "steps between saved adapters", minimum=1, group=_TRAINING)
    adapter_path: str = option("adapters", "directory of the adapters", group=_TRAINING)
    resume_adapter_file: str | None = option(
        None, "adapters or weights to start from", group=_TRAINING
    )
    seed: int = option(0, "seed of data order, dropout and new weights", minimum=0, group=_TRAINING)
    report_to: str | None = option(
        None, f"services to log to, with commas between: {', '.join(REPORTERS)}", group=_TRAINING
    )
    project_name: str | None = option(None, "name of the project there", group=_TRAINING)

    stage_map: str | None = stage_map_option(_PIPELINE)
    pipeline_stages: int | None = option(
        None,
        "ranks in one pipeline; what is left of mpirun's -n becomes replicas",
        minimum=1,
        group=_PIPELINE,
    )
    data_parallel: int | None = option(
        None,
        "replicas: pipelines that each take a part of the batch; instead of --pipeline-stages",
        unset="what --pipeline-stages leaves of the ranks",
        minimum=1,
        group=_PIPELINE,
    )
    virtual_stages: int | None = option(
        None, "stages a rank (default: the schedule's)", minimum=1, group=_PIPELINE
    )
    partitioner: str = partitioner_option(_PIPELINE)
    hostfile: str | None = hostfile_option(_PIPELINE)
    profile: str | None = option(
        None,
        "times measured by shardmlx.profile, for the same; several files with commas between",
        group=_PIPELINE,
    )
    schedule: str = option(
        AUTO,
        "order of forward and backward; auto: the one that is predicted to be the fastest of those "
        "that fit",
        choices=(AUTO, *SCHEDULES),
        group=_PIPELINE,
    )
    micro_batch_size: int | None = option(
        None, "sequences a micro-batch (default: chosen)", minimum=1, group=_PIPELINE
    )
    pack: bool | None = option(
        None,
        "texts of a micro-batch one after the other in one row, none padded; the loss is the same "
        "(default: where that is predicted to be faster)",
        group=_PIPELINE,
    )
    max_grad_norm: float | None = option(
        None, "clip the norm of the whole gradient to this", above=0, group=_PIPELINE
    )
    dtype: str | None = dtype_option(_PIPELINE)
    unfreeze_all: bool = option(
        False,
        "with --fine-tune-type full: train embedding, final norm and lm_head too",
        group=_PIPELINE,
    )
    memory_limit: int | None = memory_limit_option(_PIPELINE)
    metrics_file: str | None = option(
        None, "write one JSON line for every report here", group=_PIPELINE
    )
    metrics_port: int | None = option(
        None,
        "port at which rank 0 shows the run: its page, and /metrics for Prometheus; 0 takes a free "
        "one",
        minimum=0,
        group=_PIPELINE,
    )
    metrics_host: str = option(
        "127.0.0.1",
        "address at which it does; others than this machine's own need it",
        metavar="ADDRESS",
        group=_PIPELINE,
    )
    trace: str | None = option(
        None, "write what every rank did when here, for Perfetto", group=_PIPELINE
    )

    checkpoint_dir: str | None = option(
        None, "save here all that the run is, to resume it later", group=_CHECKPOINTS
    )
    checkpoint_every: int = option(100, "steps between checkpoints", minimum=1, group=_CHECKPOINTS)
    keep_checkpoints: int = option(
        2, "how many checkpoints stay; older ones are deleted", minimum=1, group=_CHECKPOINTS
    )
    checkpoint_storage: str = option(
        "auto",
        "where they lie: on a disk that all ranks see, on rank 0's, or each part on its rank's "
        "with a copy on a neighbour's; auto finds out",
        choices=STORAGES,
        group=_CHECKPOINTS,
    )
    resume: str = option(
        "auto",
        "auto: from the newest good checkpoint, if there is one; never; or the directory of one",
        group=_CHECKPOINTS,
    )
    on_nonfinite: str = option(
        "stop",
        "when loss or gradient is not finite: stop the run, or skip the update and count it",
        choices=("stop", "skip"),
        group=_CHECKPOINTS,
    )
    rebalance: str | None = option(
        None,
        "write here the stage map that the measured times would want",
        group=_CHECKPOINTS,
    )
    timeout: float = timeout_option(_CHECKPOINTS)

    def __post_init__(self) -> None:
        check_options(self)
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
        if self.fine_tune_type != "full":
            check_lora(self.lora_parameters)
        check_optimizer_config(self.optimizer_config)
        if self.lr_schedule is not None:
            check_lr_schedule(self.lr_schedule)
        if self.hf_dataset is not None:
            check_hf_dataset(self.hf_dataset)
        if self.metrics_port is not None and self.metrics_port > 65535:
            raise OptionError("metrics_port", f"is {self.metrics_port}", "give 65535 or less")
        if self.seed >= 2**32:
            raise OptionError("seed", f"is {self.seed}", "give less than 2**32")
        for service in self.services:
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
        allowed = () if self.schedule == AUTO else get_schedule(self.schedule).virtual_choices
        if allowed and self.virtual_stages and self.virtual_stages not in allowed:
            fitting = " or ".join(map(str, allowed))
            raise OptionError(
                "virtual_stages", f"is {self.virtual_stages}: {self.schedule} runs {fitting}"
            )

    @property
    def services(self) -> tuple[str, ...]:
        """The names in ``report_to``, in lower case."""
        names = (name.strip().lower() for name in (self.report_to or "").split(","))
        return tuple(name for name in names if name)

    def to_adapter_config(self) -> dict[str, Any]:
        """Return what ``adapter_config.json`` holds: every option, JSON-able, as mlx_lm writes it.

        ``mlx_lm.tuner.utils.load_adapters`` reads fine_tune_type, num_layers, lora_parameters.
        """
        values = asdict(self)
        if self.fine_tune_type == "full":
            values["lora_parameters"] = None
        return dict(sorted(values.items()))


def build_parser(rank: int = 0) -> CommandParser:
    """Build the command line of ``shardmlx.train``; help is printed on rank 0 only."""
    return command_line.build_parser(
        TrainConfig,
        "train",
        "Fine-tune a language model through pipeline stages, one MPI rank each.",
        rank=rank,
    )


def load_config(argv: Sequence[str], rank: int = 0) -> TrainConfig:
    """Read flags, and the YAML file that ``--config`` names: flags win over it.

    Any YAML file of ``mlx_lm.lora`` can be read. Raises ``UserError``; ``SystemExit`` with
    status 0 after ``--help`` and ``--version``.
    """
    return load_options(TrainConfig, build_parser(rank), argv, rank)


def load_given_config(argv: Sequence[str]) -> tuple[TrainConfig, Given]:
    """Read options as ``load_config``; return also those that were given."""
    return load_given_options(TrainConfig, build_parser(), argv)
