"""Checks of the structured options: LoRA, optimizer, learning-rate schedule, data sets.

Each takes an option's value and raises ``OptionError``. The names and meanings are mlx-lm's
(``mlx_lm.tuner.utils``, ``mlx.optimizers``). A key that nobody reads is an error. The settings of
optimizers and schedules are tried by MLX itself (``engine.optimizer.build_optimizer``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from shardmlx.common.yaml_reader import did_you_mean, is_number
from shardmlx.config.common_options import AUTO
from shardmlx.config.options import OptionError, refuse

Check = tuple[str, Callable[[Any], bool]]
"""The condition that a value must meet: in words, and as a test."""


_NUMBER: Check = ("a number", is_number)
_COUNT: Check = (
    "a whole number above 0",
    lambda value: is_number(value) and isinstance(value, int) and value > 0,
)
_TEXT: Check = ("text", lambda value: value is None or isinstance(value, str))
_MAPPING: Check = ("a mapping", lambda value: value is None or isinstance(value, Mapping))
_SHARE: Check = ("a number from 0 to below 1", lambda value: is_number(value) and 0 <= value < 1)

_LORA: Mapping[str, Check] = {"rank": _COUNT, "scale": _NUMBER, "dropout": _SHARE}

LORA_DEFAULTS: Mapping[str, Any] = MappingProxyType({"rank": 8, "dropout": 0.0, "scale": 20.0})
"""The adapters of mlx_lm.lora; each holds where the others are given."""

_SCHEDULE = ("name", "arguments", "warmup", "warmup_init")
"""Keys that ``mlx_lm.tuner.utils.build_schedule`` reads."""

_DATASET: Mapping[str, Check] = {
    "path": _TEXT,
    "weight": ("a number above 0", lambda value: is_number(value) and 0 < value < 1e6),
    "config": _MAPPING,
    **{f"{name}_split": _TEXT for name in ("train", "valid", "test")},
    **{
        f"{name}_feature": _TEXT
        for name in ("prompt", "completion", "chat", "text", "chosen", "rejected", "label")
    },
}
"""Keys that ``mlx_lm.tuner.datasets`` reads, and our weight."""

DYNAMIC = "dynamic"
"""The word for a factor of the loss that follows the gradients."""

_LOSS_SCALES = "give dynamic, or a number above 0"

FINE_TUNE_TYPES = ("lora", "dora", "full")


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """An optimizer: its class in mlx.optimizers or ours, and the copies of trained weights that it
    needs in memory.

    ``states`` it keeps: Adafactor's rows and columns are few, but with a beta_1 it keeps one.
    ``passing`` its update of a layer makes and drops, ``passing_alone`` that of a single long
    matrix, and ``square`` more that of a square one, if each kind of arrays is waited for;
    ``at_once`` if there is one wait, and if that is for many matrices, at most ``ahead`` copies of
    the largest: MLX goes so far ahead. They are measured
    (tests/unit/planning/test_memory_of_updates.py).
    """

    class_name: str
    states: int
    passing: int
    passing_alone: int
    at_once: int
    ahead: int
    square: int = 0

    def alone(self, shape: Sequence[int]) -> float:
        """Return the copies of a weight that its update makes and drops, if it is the only one and
        each kind of arrays is waited for: products of its shorter sides come to long ones."""
        sides = (shape[0], math.prod(shape[1:]))
        return self.passing_alone + self.square * min(sides) / max(sides)


OPTIMIZERS: Mapping[str, OptimizerFacts] = MappingProxyType(
    {
        "adam": OptimizerFacts("Adam", 2, 2, 2, 5, 17),
        "adamw": OptimizerFacts("AdamW", 2, 2, 2, 5, 17),
        "muon": OptimizerFacts("Muon", 1, 4, 9, 22, 25, square=9),
        "sgd": OptimizerFacts("SGD", 1, 1, 1, 2, 14),
        "adafactor": OptimizerFacts("Adafactor", 0, 3, 5, 7, 9),
        "lars": OptimizerFacts("LARS", 1, 2, 3, 5, 11),
        "lamb": OptimizerFacts("LAMB", 2, 3, 5, 9, 14),
    }
)
"""The optimizers of mlx_lm.lora, and two for large batches (``engine.large_batch_optimizers``)."""

LR_SCHEDULES = ("exponential_decay", "step_decay", "cosine_decay", "linear_schedule")
"""The learning-rate schedules of mlx.optimizers."""

RUN = "run"
"""Word for the updates of the run, among the arguments of a schedule that ends with it."""

_STEPS_AT: Mapping[str, int] = MappingProxyType({"cosine_decay": 1, "linear_schedule": 2})
"""Place of the steps among the arguments of a schedule that can end with the run."""


STEADY = "linear_schedule"
"""The schedule that says of a rate that it stays, as one that leads from it to itself."""


def checked_lora(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters with the defaults of those that are not given, and with the ``scale``
    that ``alpha`` means in its place. Raises ``OptionError``, also for a key that nobody reads."""
    name = "lora_parameters"
    _check_known(name, "key", parameters, (*_LORA, "alpha", "keys"))
    full = {**LORA_DEFAULTS, **parameters}
    if "alpha" in parameters:
        if "scale" in parameters:
            raise OptionError(name, "has alpha and scale", "leave one out: scale is alpha / rank")
        alpha = full.pop("alpha")
        _require(name, "alpha", alpha, _LORA["scale"])
        check_lora_values(full)
        full["scale"] = alpha / full["rank"]
    check_lora_values(full)
    return full


def check_lora_values(parameters: Mapping[str, Any]) -> None:
    """Check that rank, scale and dropout are there; ``keys`` may choose the layers."""
    name = "lora_parameters"
    for key, check in _LORA.items():
        if key not in parameters:
            raise OptionError(name, f"lacks {key!r}", f"add {check[0]}")
        _require(name, key, parameters[key], check)
    keys = parameters.get("keys")
    are_names = isinstance(keys, list) and keys and all(isinstance(key, str) for key in keys)
    remedy = "list module names, like ['self_attn.q_proj']"
    refuse(name, f"has keys {keys!r}", remedy, when=keys is not None and not are_names)


def check_optimizer_config(config: Mapping[str, Any]) -> None:
    """Check that it has mappings by optimizer, for instance ``adamw: {weight_decay: 0.1}``."""
    _check_known("optimizer_config", "optimizer", config, OPTIMIZERS)
    for optimizer, settings in config.items():
        _require("optimizer_config", optimizer, settings, _MAPPING)


def check_lr_schedule(schedule: Mapping[str, Any]) -> None:
    """Check ``name``, and ``warmup`` in steps; ``arguments`` and ``warmup_init`` MLX checks."""
    name = "lr_schedule"
    _check_known(name, "key", schedule, _SCHEDULE)
    if schedule.get("name") not in LR_SCHEDULES:
        choices = f"choose from {', '.join(LR_SCHEDULES)}"
        raise OptionError(name, f"has name {schedule.get('name')!r}", choices)
    _check_run(schedule)
    warmup = schedule.get("warmup", 0)
    if not (isinstance(warmup, int) and warmup >= 0):
        raise OptionError(name, f"has warmup {warmup!r}", "give a whole number of steps")


def _check_run(schedule: Mapping[str, Any]) -> None:
    """Check that the run's length stands only where a schedule has its steps."""
    arguments = schedule.get("arguments")
    place = _STEPS_AT.get(schedule["name"])
    for index, value in enumerate(arguments if isinstance(arguments, list) else ()):
        if value == RUN and index != place:
            raise OptionError(
                "lr_schedule",
                f"has 'run' as argument {index + 1} of {schedule['name']}",
                "it stands for the updates of cosine_decay (the second argument) or "
                "linear_schedule (the third)",
            )


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a text like 5,3; 0 for what is none."""
    return tuple(int(each) if each.strip().isdecimal() else 0 for each in text.split(","))


def rows_of(text: str | None) -> tuple[int, ...]:
    """Return the rows of each replica; () if they are open. Raises ``OptionError``."""
    rows = () if text in (None, AUTO) else _numbers(str(text))
    remedy = "give auto, or the rows of each replica, like 5,3"
    refuse("replica_rows", f"is {text}", remedy, when=0 in rows)
    return rows


def shares_of(text: str | None, ranks: int) -> tuple[int, ...]:
    """Return the shares, in proportion, of so many ranks that compute a layer together; () if they
    are open. Raises ``OptionError``."""
    shares = () if text is None else _numbers(text)
    others = shares and (len(shares) != ranks or 0 in shares)
    complaint = f"{text}: --tensor-parallel {ranks} takes as many numbers from 1"
    refuse("tensor_shares", complaint, "give one for each rank that shares a layer", when=others)
    return shares


def parse_loss_scale(text: str) -> float | str:
    """Return the factor of the loss that a text means. Raises ``ValueError``."""
    try:
        return text if text == DYNAMIC else float(text)
    except ValueError:
        raise ValueError(_LOSS_SCALES) from None


def check_loss_scale(value: float | str | None) -> None:
    """Check that a factor of the loss is above 0. Raises ``OptionError``."""
    is_none = isinstance(value, float) and value <= 0
    refuse("loss_scale", f"is {value}", _LOSS_SCALES, when=is_none)


def parse_lr_schedule(text: str) -> dict[str, Any]:
    """Return the schedule that ``NAME`` or ``NAME:X,X`` stands for. Raises ``ValueError``."""
    name, colon, rest = text.partition(":")
    if name not in LR_SCHEDULES:
        names = ", ".join(LR_SCHEDULES)
        raise ValueError(did_you_mean(name, LR_SCHEDULES) or f"choose from {names}")
    if not colon:
        return {"name": name}
    try:
        numbers = [_argument(word) for word in rest.split(",")]
    except ValueError:
        raise ValueError("give numbers after the colon") from None
    return {"name": name, "arguments": numbers}


def steady_schedule(rate: float) -> dict[str, Any]:
    """Return the schedule of a rate that stays."""
    return {"name": STEADY, "arguments": [rate, rate, 1]}


def _argument(word: str) -> int | float | str:
    if word == RUN:
        return word
    return int(word) if word.isdecimal() else float(word)


def filled_lr_schedule(
    schedule: Mapping[str, Any] | None, warmup: int | None, rate: float, updates: int
) -> dict[str, Any]:
    """Return a schedule with ``warmup`` and the arguments that it lacks, as far as these follow
    from rate and updates. Without a schedule the rate stays at ``rate``.

    Where the steps are left out, or are ``RUN``, the schedule ends with the last update.
    """
    filled: dict[str, Any] = dict(steady_schedule(rate) if schedule is None else schedule)
    if warmup is not None:
        filled["warmup"] = warmup
    left = max(1, updates - (filled.get("warmup") or 0))
    place = _STEPS_AT.get(filled["name"])
    if place is None:
        return filled
    beginning = {"cosine_decay": [rate], "linear_schedule": [rate, 0.0]}[filled["name"]]
    arguments = filled.get("arguments", beginning)
    if isinstance(arguments, list) and len(arguments) == place:
        filled["arguments"] = [*arguments, left]
    elif isinstance(arguments, list):
        filled["arguments"] = [left if value == RUN else value for value in arguments]
    return filled


def opened_lr_schedules(schedule: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the forms of a filled schedule in which less is given, the barest first."""
    yield {key: value for key, value in schedule.items() if key != "arguments"}
    place = _STEPS_AT.get(schedule["name"])
    arguments = schedule.get("arguments")
    if place is not None and isinstance(arguments, list) and len(arguments) > place:
        yield {**schedule, "arguments": [*arguments[:place], RUN, *arguments[place + 1 :]]}


def check_hf_dataset(dataset: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
    """Return the Hugging Face data sets that are given, one or a list, once they are checked."""
    given = list(dataset) if isinstance(dataset, list) and dataset else [dataset]
    for each in given:
        if not (isinstance(each, Mapping) and isinstance(each.get("path"), str)):
            raise OptionError("hf_dataset", f"has {each!r}", "give a mapping with 'path: NAME'")
        _check_known("hf_dataset", "key", each, _DATASET)
        for key, value in each.items():
            _require("hf_dataset", f"{each['path']} with {key}", value, _DATASET[key])
    return given


def _check_known(name: str, what: str, mapping: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise ``OptionError`` for the first key of a mapping that nobody reads."""
    for key in mapping:
        if key not in known:
            remedy = did_you_mean(key, known) or f"it takes {', '.join(known)}"
            raise OptionError(name, f"has unknown {what} {key!r}", remedy)


def _require(name: str, key: str, value: Any, check: Check) -> None:
    words, fits = check
    if not fits(value):
        raise OptionError(name, f"has {key} {value!r}", f"give {words}")
