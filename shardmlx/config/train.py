"""The options of ``shardmlx.train``: those of ``mlx_lm.lora``, with its defaults, and ours."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardmlx.common.units import parse_bytes
from shardmlx.config import common_options as common
from shardmlx.config.checks import (
    check_hf_dataset,
    check_loss_scale,
    check_lr_schedule,
    check_optimizer_config,
    checked_lora,
    filled_lr_schedule,
    opened_lr_schedules,
    parse_loss_scale,
    rows_of,
    shares_of,
)
from shardmlx.config.command_line import CommandLine
from shardmlx.config.common_options import AUTO, OFF
from shardmlx.config.data import LAST, DataOptions, WantedData
from shardmlx.config.objective import ObjectiveOptions
from shardmlx.config.options import (
    Options,
    in_group,
    option,
    refuse,
    section,
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
    RunSpec,
    unlike_shares,
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
    *("train", "fine_tune_type", "num_layers", "lora_rank", "adapter_path"),
    *("resume_adapter_file",),
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

REPORTERS = ("tensorboard", "mlflow", "wandb", "swanlab", "trackio")

Pair = tuple[str, str, object, str]
"""A given option; an option that may not stand beside it; whether this one does; remedy."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """The place of checkpoints, and the one from which a run goes on."""

    checkpoint_dir: str | None = _checkpoints(
        None,
        "directory of checkpoints, to resume from",
        metavar="DIR",
        unset="none; ADAPTER-PATH/checkpoints under launch",
    )
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

    @property
    def named(self) -> Path | None:
        """The directory of the checkpoint that the user names; None for auto and never."""
        return None if self.resume in (AUTO, "never") else Path(self.resume)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Options):
    """The options of a training run, checked as far as neither model nor data is needed.

    ``from_flat`` takes them by the names that they have in a YAML file, and fills in what follows
    from others: ``train`` is implied unless ``test`` alone is given. Mappings are read only. Raises
    ``OptionError``, a ``UserError``.
    """

    source: ModelSource = section(ModelSource)
    sets: DataOptions = section(DataOptions)
    loss: ObjectiveOptions = section(ObjectiveOptions)
    tune: FineTune = section(FineTune)
    batch: BatchOptions = section(BatchOptions)
    machines: MachineOptions = section(MachineOptions)
    layout: LayoutOptions = section(LayoutOptions)
    checkpoints: CheckpointOptions = section(CheckpointOptions)
    iters: int = _steps(1000, "steps to train for")
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
    resume_adapter_file: str | None = _training(
        None, "adapters to start from, or PEFT's directory", metavar="FILE"
    )
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
    loss_scale: float | str | None = _pipeline(
        None,
        "factor of the loss, for float16: a number, or dynamic, which follows the gradients",
        flag=False,
        parse=parse_loss_scale,
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

    @classmethod
    def settled(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return flat values with what follows from others. Raises ``OptionError``."""
        settled = dict(values)
        if not values["test"]:
            settled["train"] = True
        if values["grad_checkpoint"] is not None:
            settled["recompute"] = _recomputed(values["recompute"], values["grad_checkpoint"])
        if values["fine_tune_type"] != "full":
            settled["lora_parameters"] = checked_lora(values["lora_parameters"])
        if (values["tensor_parallel"] or 1) > 1 and not values["zero"]:
            settled["zero"] = 0  # replicas then divide nothing
        if values["hf_dataset"] is not None:
            settled["hf_dataset"] = _with_homes(values["hf_dataset"])
        if (schedule := values["lr_schedule"]) is not None:
            check_lr_schedule(schedule)
        if (schedule is not None or values["warmup"]) and values["epochs"] is None:
            updates = max(1, values["iters"] // values["grad_accumulation_steps"])
            settled["lr_schedule"] = filled_lr_schedule(
                schedule, values["warmup"], values["learning_rate"], updates
            )
        return settled

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optimizer_config(self.tune.optimizer_config)
        check_loss_scale(self.loss_scale)
        shares_of(self.layout.tensor_shares, self.layout.across)
        rows_of(self.batch.replica_rows)
        self.loss.check_objective()
        self._check_island()
        refuse("num_layers", "is 0", "give -1 to train all layers", when=self.tune.num_layers == 0)
        for service in self.services:
            known = f"choose from {', '.join(REPORTERS)}"
            refuse("report_to", f"names {service!r}", known, when=service not in REPORTERS)
        values = self.flat()
        for pairs in (
            self._beside_tensor_parallel(),
            self._beside_sweep(),
            self._beside_island(),
            self._without_validation(),
            self._by_work(),
            self._beside_layout(),
            self._beside_preferences(),
            self._of_adapters(),
            self._of_loss_scale(),
            self._of_batches(),
        ):
            for other, name, is_refused, remedy in pairs:
                refuse(name, f"is {values[name]} with {other}", remedy, when=is_refused)

    def _check_island(self) -> None:
        address = r"https?://([\w.-]+|\[[\w:.%]+\])(:\d{1,5})?(/.*)?"
        fits = self.island is None or re.fullmatch(address, self.island)
        refuse("island", f"is {self.island!r}", "give http://HOST:PORT", when=not fits)
        nameless = self.island and not self.name
        refuse("island", f"is {self.island} without name", "give --name", when=nameless)
        alone = self.name and not self.island
        refuse("name", f"is {self.name} without island", "give --island", when=alone)

    def _beside_tensor_parallel(self) -> Iterator[Pair]:
        if self.layout.across > 1:
            for each in unlike_shares(self.tune, self.layout):
                yield f"--tensor-parallel {self.layout.across}", *each

    def _beside_sweep(self) -> Iterator[Pair]:
        if self.sweep is not None:
            remedy = "give --metrics-file: one for each run"
            yield "--sweep", "fine_tune_type", self.tune.is_full, "train adapters"
            yield "--sweep", "metrics_port", self.metrics_port is not None, remedy
            yield "--sweep", "report_to", self.services, remedy
            remedy = "train, or test one of the adapters"
            yield "--sweep", "test", not self.tune.train, remedy

    def _beside_island(self) -> Iterator[Pair]:
        if self.island is not None:  # all islands train the same tensors, whole
            is_shared = self.layout.across > 1
            yield "--island", "train", not self.tune.train, "train, or test without it"
            yield "--island", "sweep", self.sweep is not None, "train one after the other"
            yield "--island", "tensor_parallel", is_shared, "give --pipeline-stages"
            yield "--island", "early_stop", self.early_stop is not None, "end the run at the hub"
            yield "--island", "keep", self.keep == BEST, "take the hub's weights"

    def _without_validation(self) -> Iterator[Pair]:
        if self.val_batches == 0:
            other = "val_batches 0: nothing is validated"
            yield other, "early_stop", self.early_stop, "give more, or leave it out"
            yield other, "keep", self.keep == BEST, "give more, or leave it out"

    def _by_work(self) -> Iterator[Pair]:
        """Yield what does not go with a test alone, or with so few steps."""
        if not self.tune.train:
            goes_on = self.checkpoints.named is not None
            yield "--test alone", "resume", goes_on, "nothing is trained"
            facts = self.loss.preferences
            compares = facts is not None and facts.has_reference
            remedy = "train, with --test: it compares with the start"
            yield "--test alone", "objective", compares, remedy
        elif self.epochs is None:
            too_many = self.batch.grad_accumulation_steps > self.iters
            remedy = f"give {self.iters} or less"
            other = f"iters {self.iters}: no update is made"
            yield other, "grad_accumulation_steps", too_many, remedy

    def _beside_layout(self) -> Iterator[Pair]:
        if self.layout.stage_map is not None:
            other = "a stage map, which gives the ranks of a replica"
            yield other, "data_parallel", self.layout.data_parallel is not None, "leave one out"

    def _beside_preferences(self) -> Iterator[Pair]:
        if self.loss.preferences is not None:
            other = f"objective {self.loss.objective}"
            yield other, "loss_chunk", self.batch.loss_chunk == OFF, "leave it out"
            yield other, "mask_prompt", self.sets.mask_prompt, "answers alone count"
            yield other, "loss_on", self.sets.loss_on, "answers alone count"
            # KTO compares with the answers of a batch's other rows.
            is_alone = self.loss.objective == "kto" and self.batch.batch_size == 1
            remedy = "give 2 or more: it compares a row with others of its batch"
            yield other, "batch_size", is_alone, remedy

    def _of_adapters(self) -> Iterator[Pair]:
        if not self.tune.is_full:
            other = f"fine_tune_type {self.tune.fine_tune_type}"
            yield other, "unfreeze_all", self.tune.unfreeze_all, "use full"
            yield other, "master_weights", self.tune.master_weights, "leave it out"

    def _of_loss_scale(self) -> Iterator[Pair]:
        if self.loss_scale is not None:
            # Numbers rounded off of scaled gradients would be added to gradients of another scale.
            other = f"loss_scale {self.loss_scale}"
            yield other, "sum_dtype", self.tune.keeps_errors, "use bfloat16"

    def _of_batches(self) -> Iterator[Pair]:
        exceeds = (self.batch.micro_batch_size or 0) > self.batch.batch_size
        other = f"batch_size {self.batch.batch_size}"
        yield other, "micro_batch_size", exceeds, f"give {self.batch.batch_size} or less"
        differs = self.sets.mask_prompt and self.sets.loss_on not in (None, LAST)
        yield "mask_prompt", "loss_on", differs, "leave one out"
        is_float32 = self.tune.master_weights and self.tune.dtype == "float32"
        yield "dtype float32", "master_weights", is_float32, "leave one out"

    @property
    def can_share(self) -> bool:
        """True if nothing that is given stands against tensor shares."""
        unlike = any(is_given for _, is_given, _ in unlike_shares(self.tune, self.layout))
        return not (unlike or self.island or self.sweep) and self.tune.train

    @property
    def spec(self) -> RunSpec:
        """The run as far as its plan depends on it."""
        layout = self.layout
        if layout.tensor_parallel is None and not self.can_share:
            layout = replace(layout, tensor_parallel=1)
        return RunSpec(
            model=self.source.model,
            revision=self.source.revision,
            fine_tune=self.tune,
            batch=self.batch,
            layout=layout,
            machines=self.machines,
            loss=self.loss,
            saves=self.checkpoints.checkpoint_dir is not None,
        )

    @property
    def wanted_data(self) -> WantedData:
        """The rows that the run needs."""
        return WantedData(
            options=self.sets,
            train=self.tune.train,
            batch_size=self.batch.batch_size,
            max_seq_length=self.batch.max_seq_length,
            objective=self.loss.objective,
        )

    def _filled(self, schedule: Mapping[str, Any] | None) -> dict[str, Any]:
        updates = max(1, self.updates)
        return filled_lr_schedule(schedule, self.warmup, self.tune.learning_rate, updates)

    @property
    def asked_lr_schedule(self) -> Mapping[str, Any] | None:
        """The schedule without what followed from learning rate, warm-up and steps."""
        schedule = self.tune.lr_schedule
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
        return self.iters // self.batch.grad_accumulation_steps

    def steps_of(self, rows: int) -> int:
        """Return the steps that ``epochs`` make of so many rows, or ``iters``."""
        if self.epochs is None:
            return self.iters
        # A pass leaves out an incomplete last batch, as in mlx-lm.
        return max(1, round(self.epochs * max(1, rows // self.batch.batch_size)))

    @property
    def services(self) -> tuple[str, ...]:
        """The names in ``report_to``, in lower case."""
        return tuple(name.lower() for name in split_names(self.report_to))

    def with_iters(self, iters: int) -> TrainConfig:
        """Return the same for so many steps, in the place of ``epochs``."""
        return self.changed(iters=iters, epochs=None)

    @property
    def not_usual(self) -> list[str]:
        """The names of the options that are not at their defaults."""
        usual = self.from_flat().flat()
        return [name for name, value in self.flat().items() if value != usual[name]]

    def to_adapter_config(self) -> dict[str, Any]:
        """Return what ``adapter_config.json`` holds: every option, as mlx_lm writes it."""
        values = deepcopy(self.flat())
        if self.tune.is_full:
            values["lora_parameters"] = None
        return dict(sorted(values.items()))


def _recomputed(given: str | None, grad_checkpoint: bool) -> str:
    """Return the amount that ``--grad-checkpoint`` means. Raises ``OptionError`` if another one is
    ``given`` beside it."""
    meant = FULL if grad_checkpoint else NONE
    complaint = f"is {given} with grad_checkpoint {grad_checkpoint}"
    refuse("recompute", complaint, "leave one out", when=given not in (None, meant))
    return meant


def _with_homes(dataset: Mapping[str, Any] | Sequence[Any]) -> Mapping[str, Any] | list[Any]:
    """Return ``hf_dataset`` with the home directory for ``~``. Raises ``OptionError``."""
    found = [
        {**each, "path": with_home("hf_dataset", each["path"])}
        for each in check_hf_dataset(dataset)
    ]
    return found if isinstance(dataset, list) else found[0]


LINE = CommandLine(
    options=TrainConfig,
    command="train",
    description="Fine-tune a language model through pipeline stages, one MPI rank each.",
    shown=_SHOWN,
    passed_over=PASSED_OVER,
    needs=("data", "hf_dataset", "train", "test"),
    needs_remedy="give --model and --data, or --train for mlx_lm.lora's own",
)
