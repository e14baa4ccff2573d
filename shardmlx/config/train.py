"""The options of ``shardmlx.train``: those of ``mlx_lm.lora``, with its defaults, and ours."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardmlx.common.units import parse_bytes
from shardmlx.config import common_options as common
from shardmlx.config.checks import (
    check_hf_dataset,
    check_lr_schedule,
    check_optimizer_config,
    checked_lora,
    filled_lr_schedule,
    opened_lr_schedules,
    rows_of,
    shares_of,
)
from shardmlx.config.command_line import CommandLine
from shardmlx.config.common_options import AUTO, OFF
from shardmlx.config.data import LAST, DataOptions
from shardmlx.config.objective import ObjectiveOptions
from shardmlx.config.options import (
    Spec,
    check_options,
    in_group,
    option,
    refuse,
    same_as,
    split_names,
    with_home,
)
from shardmlx.config.specs import (
    FULL,
    NONE,
    BatchOptions,
    FineTune,
    LayoutOptions,
    MachineOptions,
    ModelSource,
)

_TRAINING = "training, as in mlx_lm.lora"
_training = in_group(_TRAINING)
_steps = partial(_training, metavar="STEPS", minimum=1)
_batches = partial(_training, metavar="BATCHES", minimum=-1)
_rate = in_group("the learning rate")
_pipeline = in_group("pipeline")
_output = in_group("reports")
_checkpoints = in_group("checkpoints and failures")
_islands = in_group("islands")

BEST = "best"

LAST_PLACE = "last"
"""Directory in --adapter-path of the last weights where the best are kept."""

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

REPORTERS = ("wandb", "swanlab")


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Spec):
    """The place of checkpoints, and the one from which a run of ``iters`` steps goes on."""

    checkpoint_dir: str | None = same_as(FineTune, "checkpoint_dir")
    checkpoint_every: int = _checkpoints(
        100, "steps between checkpoints", metavar="STEPS", minimum=1
    )
    keep_checkpoints: int = option(
        2, "checkpoints that are kept, the newest", flag=False, minimum=1
    )
    checkpoint_storage: str = option(
        AUTO,
        "on a disk that all ranks see, on rank 0's, or each part on its rank's and a neighbour's",
        flag=False,
        choices=(AUTO, "shared", "rank0", "neighbour"),
    )
    resume: str = _checkpoints(
        AUTO,
        "auto (from the newest good checkpoint), never, or the directory of one",
        metavar="DIR",
    )
    iters: int = _steps(1000, "steps to train for")

    @property
    def named(self) -> Path | None:
        """The directory of the checkpoint that the user names; None for auto and never."""
        return None if self.resume in (AUTO, "never") else Path(self.resume)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    CheckpointOptions,
    LayoutOptions,
    MachineOptions,
    BatchOptions,
    FineTune,
    ObjectiveOptions,
    DataOptions,
    ModelSource,
):
    """The options of a training run, checked as far as neither model nor data is needed.

    ``train`` is implied unless ``test`` alone is given. Mappings are the instance's own copies
    and are read only. Raises ``OptionError``, a ``UserError``.
    """

    config: str | None = common.config(group=_TRAINING)
    dry_run: bool = _training(False, "print the plan, memory and time of a step; then end")
    epochs: float | None = _training(
        None,
        "passes over the training set, instead of --iters",
        metavar="N",
        unset="as many as --iters makes",
        above=0,
        excludes="iters",
    )
    resume_adapter_file: str | None = _training(None, "adapters to start from", metavar="FILE")
    grad_checkpoint: bool | None = _training(
        None, "the same as --recompute full, or none", unset="as --recompute"
    )
    warmup: int | None = _rate(
        None,
        "updates in which the learning rate rises from 0",
        metavar="UPDATES",
        minimum=0,
        unset="none, or warmup in lr_schedule",
    )
    sweep: str | None = _training(
        None, "adapters to train side by side: a YAML file of names and options", metavar="FILE"
    )
    seed: int = _training(0, "seed of data, dropout, new weights", minimum=0, maximum=2**32 - 1)
    steps_per_report: int = _steps(10, "steps between reports")
    steps_per_eval: int = _steps(200, "steps between validations")
    val_batches: int = _batches(25, "batches of one validation; -1 for all, 0 for none")
    test_batches: int = _batches(500, "batches of the test; -1 for all")
    save_every: int = _steps(100, "steps between saved adapters")
    early_stop: int | None = _checkpoints(
        None,
        "stop after this many validations in a row without a better loss",
        flag=False,
        metavar="VALIDATIONS",
        minimum=1,
        unset="never",
    )
    keep: str = _checkpoints(
        "last",
        "best: --adapter-path has the weights of the best validation; the last are in last/",
        choices=("last", BEST),
    )
    on_nan: str = _checkpoints(
        "stop",
        "if loss or gradient is not finite: stop, or skip",
        flag=False,
        choices=("stop", "skip"),
    )
    max_grad_norm: float | None = _pipeline(
        None, "clip the global gradient norm to this", metavar="NORM", above=0
    )
    clear_cache_threshold: int = _training(
        0, "size above which MLX's cache is emptied", metavar="SIZE", minimum=0, parse=parse_bytes
    )
    adapter_path: str = _training("adapters", "directory of the adapters", metavar="DIR")
    metrics_file: str | None = _output(None, "file of one JSON line a report", metavar="FILE")
    metrics_port: int | None = common.port(
        None, help="port of rank 0's page of the run; 0 takes a free one", group="reports"
    )
    metrics_host: str = option(
        "127.0.0.1", "address at which it does; others than this machine's own need it", flag=False
    )
    report_to: str | None = _output(
        None, f"services to log to, with commas between: {', '.join(REPORTERS)}", metavar="NAMES"
    )
    project_name: str | None = _output(None, "name of the project there", metavar="NAME")
    trace: str | None = _output(None, "file of what each rank did, for Perfetto", metavar="FILE")
    island: str | None = _islands(
        None,
        "train as an island: address of the shardmlx hub, like http://HOST:8750",
        metavar="URL",
        unset="none: the run trains alone",
    )
    name: str | None = _islands(None, "name of the island at the hub", metavar="NAME")
    timeout: float = common.timeout(group="checkpoints and failures")

    def __post_init__(self) -> None:
        check_options(self)
        if not self.test:
            object.__setattr__(self, "train", True)
        if self.hf_dataset is not None:
            for each in check_hf_dataset(self.hf_dataset):
                each["path"] = with_home("hf_dataset", each["path"])
        if self.grad_checkpoint is not None:
            meant = FULL if self.grad_checkpoint else NONE
            complaint = f"is {self.recompute} with grad_checkpoint {self.grad_checkpoint}"
            agrees = self.recompute in (None, meant)
            refuse("recompute", complaint, "leave one out", when=not agrees)
            object.__setattr__(self, "recompute", meant)
        if not self.is_full:
            object.__setattr__(self, "lora_parameters", checked_lora(self.lora_parameters))
        check_optimizer_config(self.optimizer_config)
        shares_of(self.tensor_shares, self.tensor_parallel)
        self._fill_lr_schedule()
        rows_of(self.replica_rows)
        self.check_objective()
        self._check_together()
        if self.tensor_parallel > 1:
            object.__setattr__(self, "zero", 0)  # replicas then divide nothing

    def _check_together(self) -> None:
        address = r"https?://([\w.-]+|\[[\w:.%]+\])(:\d{1,5})?(/.*)?"
        fits = self.island is None or re.fullmatch(address, self.island)
        refuse("island", f"is {self.island!r}", "give http://HOST:PORT", when=not fits)
        for name, other in (("island", "name"), ("name", "island")):
            complaint, lacks = f"is {getattr(self, name)} without {other}", not getattr(self, other)
            refuse(name, complaint, f"give --{other}", when=getattr(self, name) and lacks)
        refuse("num_layers", "is 0", "give -1 to train all layers", when=self.num_layers == 0)
        for service in self.services:
            known = f"choose from {', '.join(REPORTERS)}"
            refuse("report_to", f"names {service!r}", known, when=service not in REPORTERS)
        for other, name, is_refused, remedy in self._pairs():
            refuse(name, f"is {getattr(self, name)} with {other}", remedy, when=is_refused)

    def _pairs(self) -> Iterator[tuple[str, str, object, str]]:
        """Yield what is given, an option that may not stand beside it, whether this one does, and
        the remedy."""
        facts = self.preferences
        if self.tensor_parallel > 1:
            other = f"--tensor-parallel {self.tensor_parallel}"
            unlike = self.optimizer in ("muon", "adafactor")
            yield other, "optimizer", unlike, "use adam, adamw or sgd"
            yield other, "zero", self.zero, "leave it out"
            yield other, "unfreeze_all", self.unfreeze_all, "leave it out"
            yield other, "sum_dtype", self.keeps_errors, "use bfloat16"
            yield other, "stage_map", self.stage_map is not None, "give --pipeline-stages"
        if self.sweep is not None:
            remedy = "give --metrics-file: one for each run"
            yield "--sweep", "fine_tune_type", self.is_full, "train adapters"
            yield "--sweep", "metrics_port", self.metrics_port is not None, remedy
            yield "--sweep", "report_to", self.services, remedy
            yield "--sweep", "test", not self.train, "train, or test one of the adapters"
        if self.island is not None:  # all islands train the same tensors, whole
            yield "--island", "train", not self.train, "train, or test without it"
            yield "--island", "sweep", self.sweep is not None, "train one after the other"
            yield "--island", "tensor_parallel", self.tensor_parallel > 1, "give --pipeline-stages"
            yield "--island", "early_stop", self.early_stop is not None, "end the run at the hub"
            yield "--island", "keep", self.keep == BEST, "take the hub's weights"
        if self.val_batches == 0:
            other, remedy = "val_batches 0: nothing is validated", "give more, or leave it out"
            yield other, "early_stop", self.early_stop, remedy
            yield other, "keep", self.keep == BEST, remedy
        if not self.train:
            other, goes_on = "--test alone", self.resume not in (AUTO, "never")
            yield other, "resume", goes_on, "nothing is trained"
            compares = facts is not None and facts.has_reference
            yield other, "objective", compares, "train, with --test: it compares with the start"
        elif self.epochs is None:
            other, remedy = f"iters {self.iters}: no update is made", f"give {self.iters} or less"
            too_many = self.grad_accumulation_steps > self.iters
            yield other, "grad_accumulation_steps", too_many, remedy
        if self.stage_map is not None:
            other = "a stage map, which gives the ranks of a replica"
            yield other, "data_parallel", self.data_parallel is not None, "leave one out"
        if facts is not None:
            other = f"objective {self.objective}"
            yield other, "loss_chunk", self.loss_chunk == OFF, "leave it out"
            yield other, "mask_prompt", self.mask_prompt, "answers alone count"
            yield other, "loss_on", self.loss_on, "answers alone count"
            # KTO compares with the answers of a batch's other rows.
            remedy = "give 2 or more: it compares a row with others of its batch"
            yield other, "batch_size", self.objective == "kto" and self.batch_size == 1, remedy
        if not self.is_full:
            other = f"fine_tune_type {self.fine_tune_type}"
            yield other, "unfreeze_all", self.unfreeze_all, "use full"
            yield other, "master_weights", self.master_weights, "leave it out"
        exceeds = (self.micro_batch_size or 0) > self.batch_size
        other, remedy = f"batch_size {self.batch_size}", f"give {self.batch_size} or less"
        yield other, "micro_batch_size", exceeds, remedy
        differs = self.mask_prompt and self.loss_on not in (None, LAST)
        yield "mask_prompt", "loss_on", differs, "leave one out"
        is_float32 = self.master_weights and self.dtype == "float32"
        yield "dtype float32", "master_weights", is_float32, "leave one out"

    def _fill_lr_schedule(self) -> None:
        """Fill and check the schedule; with ``epochs`` it follows once the data is read."""
        if self.lr_schedule is None and not self.warmup:
            return
        if self.lr_schedule is not None:
            check_lr_schedule(self.lr_schedule)
        if self.epochs is None:
            object.__setattr__(self, "lr_schedule", self._filled(self.lr_schedule))

    def _filled(self, schedule: Mapping[str, Any] | None) -> dict[str, Any]:
        updates = max(1, self.updates)
        return filled_lr_schedule(schedule, self.warmup, self.learning_rate, updates)

    @property
    def asked_lr_schedule(self) -> Mapping[str, Any] | None:
        """The schedule without what followed from learning rate, warm-up and steps."""
        schedule = self.lr_schedule
        if schedule is None or schedule == self._filled(None):
            return None
        forms = opened_lr_schedules(schedule)
        return next((form for form in forms if self._filled(form) == schedule), schedule)

    @property
    def open_lr_schedule(self) -> Mapping[str, Any] | None:
        """The schedule that is asked for, where some of it follows from the number of steps."""
        asked = self.asked_lr_schedule
        return None if asked is None or "arguments" in asked else asked

    @property
    def last_path(self) -> Path:
        """The directory of the last weights."""
        place = Path(self.adapter_path)
        return place / LAST_PLACE if self.keep == BEST else place

    @property
    def updates(self) -> int:
        """The updates of the weights that ``iters`` steps make."""
        return self.iters // self.grad_accumulation_steps

    def steps_of(self, rows: int) -> int:
        """Return the steps that ``epochs`` make of so many rows, or ``iters``."""
        if self.epochs is None:
            return self.iters
        # A pass leaves out an incomplete last batch, as in mlx-lm.
        return max(1, round(self.epochs * max(1, rows // self.batch_size)))

    @property
    def services(self) -> tuple[str, ...]:
        """The names in ``report_to``, in lower case."""
        return tuple(name.lower() for name in split_names(self.report_to))

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
        """Return what ``adapter_config.json`` holds: every option, as mlx_lm writes it."""
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
    needs=("data", "hf_dataset", "train", "test"),
    needs_remedy="give --model and --data, or --train for mlx_lm.lora's own",
)
