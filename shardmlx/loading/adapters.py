"""Put earlier training results into a model, lazily: all of them, or refuse them by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from shardmlx.common.yaml_reader import did_you_mean
from shardmlx.config.specs import FineTune
from shardmlx.errors import UserError, one_line
from shardmlx.loading.adapter_files import (
    MERGE,
    PEFT_TYPE,
    adapter_file,
    check_adapter_file,
    read_adapter_config,
)
from shardmlx.loading.peft import Converted, convert, is_peft

_OTHERS = "use the model that they were made with"
_PARTS = frozenset({"lora_a", "lora_b", "m"})


def add_adapters(model: nn.Module, directory: Path) -> None:
    """Put the adapters of a directory, mlx-lm's or PEFT's, into a model. Raises ``UserError``."""
    config = read_adapter_config(directory)
    file = directory / adapter_file(directory)
    check_adapter_file(file)
    weights = _read(file)
    if PEFT_TYPE in config:
        made = _convert(config, weights, model)
        weights = made.weights
        config = {"num_layers": len(model.layers), "lora_parameters": made.parameters}
    kind = config.get("fine_tune_type", "lora")
    if kind != "full":
        make_adapters(model, config["num_layers"], config["lora_parameters"], kind)
    known = dict(tree_flatten(model.parameters()))
    if kind != "full":
        known = {name: known[name] for name in known if name.rpartition(".")[2] in _PARTS}
    put(model, weights, known, _OTHERS)


def make_adapters(
    model: nn.Module, num_layers: int, parameters: Mapping[str, Any], kind: str
) -> None:
    """Add new adapters to the last layers, or to the modules that are named in whole. Raises
    ``UserError``."""
    try:
        linear_to_lora_layers(model, num_layers, dict(parameters), use_dora=kind == "dora")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{kind}: {one_line(error)}") from None


def check_keys(model: nn.Module, keys: list[str] | None) -> None:
    """Raise ``UserError`` for a module that should get adapters but is missing."""
    in_layers = {name for layer in model.layers for name, _ in layer.named_modules()} - {""}
    whole = {name for name, _ in model.named_modules()}
    for key in keys or ():
        if key not in in_layers and key not in whole:
            ends = sorted(name for name in in_layers if name.endswith(f".{key}"))
            remedy = did_you_mean(ends[0] if ends else key, sorted(in_layers))
            raise UserError(
                f"lora_parameters: no module of this model is called {key!r}",
                remedy or f"there are {', '.join(sorted(in_layers)[:40])}",
            )


def resume_from(model: nn.Module, file: Path, fine_tune: FineTune) -> None:
    """Begin with the adapters or weights of a file: all of them must be trained.

    Raises ``UserError``.
    """
    if not file.is_file():
        remedy = f"name its {adapter_file(file)}" if file.is_dir() else ""
        raise UserError(f"--resume-adapter-file {file}: there is no such file", remedy)
    try:
        weights = _read(file)
        remedy = "use the model and lora_parameters that it was made with"
        if not fine_tune.is_full and is_peft(weights):
            made = _convert(read_adapter_config(file.parent), weights, model)
            weights = _rescaled(made, fine_tune.lora_parameters["scale"])
            remedy = f"give rank: {made.parameters['rank']} in lora_parameters, and its modules"
        known = dict(tree_flatten(model.parameters()))
        if not weights.keys() & known.keys():
            raise UserError("it holds no weight of this model")
        if not fine_tune.is_full:
            known = dict(tree_flatten(model.trainable_parameters()))
            remedy += ": --num-layers, and keys in lora_parameters"
        put(model, weights, known, remedy)
    except UserError as error:
        raise UserError(f"--resume-adapter-file {file}: {error.problem}", error.remedy) from None


def put(
    model: nn.Module, weights: dict[str, mx.array], known: Mapping[str, mx.array], remedy: str
) -> None:
    """Put ``weights`` into a model with the ``known`` names. Raises ``UserError`` for others."""
    for name, array in weights.items():
        if name not in known:
            raise UserError(f"{name} is none of the weights that are trained here", remedy)
        if array.shape != known[name].shape:
            shape = f"{array.shape}, in this model {known[name].shape}"
            raise UserError(f"{name} has the shape {shape}", remedy)
    model.load_weights(list(weights.items()), strict=False)


def _read(file: Path) -> dict[str, mx.array]:
    try:
        weights: Any = mx.load(str(file))
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(one_line(error)) from None
    return weights if isinstance(weights, dict) else {}


def _convert(
    config: Mapping[str, Any], weights: dict[str, mx.array], model: nn.Module
) -> Converted:
    """Convert adapters of PEFT for a model. Raises ``UserError``."""
    if PEFT_TYPE not in config:
        raise UserError("its tensors are PEFT's", "put PEFT's adapter_config.json beside it")
    modules = dict(model.named_modules())
    made = convert(config, weights, modules)
    is_tied = not any(name.rpartition(".")[2] == "lm_head" for name in modules)
    for name in made.parameters["keys"] if is_tied else ():
        if "embed" in name:
            raise UserError(
                f"PEFT has trained {name} without the lm_head that is tied to it, which cannot be "
                "converted",
                MERGE,
            )
    return made


def _rescaled(made: Converted, scale: float) -> dict[str, mx.array]:
    """Return float32 adapters that have the effect of the converted ones with ``scale``."""
    factor = made.parameters["scale"] / scale
    return {
        name: array.astype(mx.float32) * (factor if name.endswith(".lora_b") else 1.0)
        for name, array in made.weights.items()
    }
