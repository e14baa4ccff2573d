"""Name what a run's options make of it that nobody may have meant, though each of them is right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardmlx.common.formatting import plural
from shardmlx.common.reporter import Reporter
from shardmlx.config.checks import LORA_DEFAULTS, checked_lora
from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError, file_access
from shardmlx.loading.peft import is_peft, kind_of, start_file
from shardmlx.modelfiles.sources import ADAPTER_CONFIG_FILE
from shardmlx.models.sizes.config_reader import parse_config

_FALLS: Mapping[str, int] = {"cosine_decay": 1, "linear_schedule": 2}
"""The place, among a schedule's arguments, of the updates over which the rate falls or rises."""


def warn_of(config: TrainConfig, replicas: int, reporter: Reporter) -> None:
    """Print the warnings about a run of so many replicas. On rank 0, which has its files."""
    for text in warnings_of(config, replicas):
        reporter.warn(text)


def warnings_of(config: TrainConfig, replicas: int) -> list[str]:
    """Return the warnings about a run of so many replicas, whose files this machine has."""
    if not config.tune.train:
        return [*_of_test(config)]
    return [
        *_of_adapters(config),
        *_of_steps(config),
        *_of_schedule(config),
        *_of_start(config),
        *_of_replicas(config, replicas),
    ]


def _of_replicas(config: TrainConfig, replicas: int) -> Iterator[str]:
    """Yield the options that were given and do nothing without several replicas."""
    if replicas > 1:
        return
    for name, value in (("zero", config.tune.zero), ("replica-rows", config.batch.replica_rows)):
        if value:
            yield f"--{name} {value} does nothing: this run has one replica"


def _of_adapters(config: TrainConfig) -> Iterator[str]:
    if config.tune.is_full and config.tune.lora_parameters not in ({}, LORA_DEFAULTS):
        given = ", ".join(f"{key} {value}" for key, value in config.tune.lora_parameters.items())
        yield f"a full fine-tune has no adapters: nothing uses {given} of lora_parameters"


def _of_test(config: TrainConfig) -> Iterator[str]:
    if config.resume_adapter_file is not None:
        yield (
            f"--resume-adapter-file {config.resume_adapter_file} is not read: --test alone tests "
            f"what is in --adapter-path {config.adapter_path}"
        )


def _of_steps(config: TrainConfig) -> Iterator[str]:
    every = config.batch.grad_accumulation_steps
    if left := config.iters % every:
        yield (
            f"the last {plural(left, 'step')} will make no update: --iters {config.iters} is not "
            f"a multiple of --grad-accumulation-steps {every}"
        )


def _of_schedule(config: TrainConfig) -> Iterator[str]:
    """Yield how a schedule's updates and those of the run differ."""
    schedule = config.tune.lr_schedule
    updates = config.updates
    if schedule is None:
        return
    warmup = schedule.get("warmup") or 0
    if warmup >= updates:
        yield (
            f"the warm-up takes {plural(warmup, 'update')}, and the run makes {updates}: the "
            "learning rate does not reach its full height"
        )
        return
    name = schedule["name"]
    arguments = list(schedule.get("arguments") or ())
    place = _FALLS.get(name)
    if place is None or len(arguments) <= place:
        return
    steps = arguments[place]
    first = arguments[0]
    end = arguments[1] if name == "linear_schedule" else [*arguments, 0.0][2]
    if first != end and warmup + steps > updates:
        yield (
            f"lr_schedule {name} takes {plural(warmup + steps, 'update')} with its warm-up, and "
            f"the run makes {updates}: the learning rate does not reach {end:g}"
        )
    if end == 0 and warmup + steps + 1 < updates:
        yield (
            f"lr_schedule {name} is at 0 after {plural(warmup + steps, 'update')}, and the run "
            f"makes {updates}: the others change nothing"
        )


def _of_start(config: TrainConfig) -> Iterator[str]:
    """Yield why the adapters to start from do something else in this run than in their own."""
    file = config.resume_adapter_file
    if file is None or config.tune.is_full:
        return
    described = start_file(Path(file)).with_name(ADAPTER_CONFIG_FILE)
    theirs: dict[str, Any] = {}
    with suppress(UserError), file_access("read", described):
        theirs = parse_config(described.read_bytes(), described)
    kind = theirs.get("fine_tune_type", config.tune.fine_tune_type)
    if is_peft(theirs):
        kind = kind_of(theirs)
    if kind != config.tune.fine_tune_type:
        yield (
            f"--resume-adapter-file {file} has adapters of fine_tune_type {kind}, which do "
            f"something else as {config.tune.fine_tune_type}"
        )
    before = theirs.get("lora_parameters")
    now = config.tune.lora_parameters["scale"]
    if not isinstance(before, Mapping) or before.keys().isdisjoint(("scale", "alpha")):
        return
    with suppress(UserError):
        then = checked_lora(before)["scale"]
        if then != now:
            yield (
                f"--resume-adapter-file {file} was trained with scale {then:g}, and this run has "
                f"{now:g}: what its adapters do is multiplied by {now / then if then else 0:.3g}"
            )
