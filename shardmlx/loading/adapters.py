"""Put earlier training results into a model, lazily: all of them, or refuse them by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from shardmlx.checkpoint.export import pieces_in
from shardmlx.common.yaml_reader import did_you_mean
from shardmlx.compat import reads_weight
from shardmlx.config.checks import FINE_TUNE_TYPES, check_lora_values
from shardmlx.config.specs import FineTune
from shardmlx.errors import UserError, file_access, naming, refusing
from shardmlx.loading.peft import (
    PEFT_FILE,
    PICKLED,
    check_peft,
    from_peft,
    has_peft_names,
    is_peft,
    start_file,
)
from shardmlx.modelfiles.sources import ADAPTER_CONFIG_FILE, ADAPTER_FILE, CONFIG_FILE
from shardmlx.models.runtime.tuner import linear_to_lora_layers
from shardmlx.models.sizes.config_reader import parse_config

_PARTS = frozenset({"lora_a", "lora_b", "m"})


def add_adapters(model: nn.Module, config: Mapping[str, Any], files: Iterable[Path]) -> None:
    """Put adapters, mlx-lm's or PEFT's, into a model: the tensors of ``files``, which ``config``
    describes as adapter_config.json. Raises ``UserError``."""
    weights = read_tensors(files)
    if is_peft(config):
        weights, config = from_peft(config, weights, dict(model.named_modules()))
    kind = config.get("fine_tune_type", "lora")
    if kind != "full":
        make_adapters(model, config["num_layers"], config["lora_parameters"], kind)
    known = dict(tree_flatten(model.parameters()))
    if kind != "full":
        known = {name: known[name] for name in known if name.rpartition(".")[2] in _PARTS}
    put(model, weights, known, "use the model that they were made with")


def make_adapters(
    model: nn.Module, num_layers: int, parameters: Mapping[str, Any], kind: str
) -> None:
    """Add new adapters to the last layers, or to modules named in whole. Raises ``UserError``."""
    with refusing(kind):
        linear_to_lora_layers(model, num_layers, dict(parameters), use_dora=kind == "dora")


def check_keys(model: nn.Module, keys: list[str] | None) -> None:
    """Raise ``UserError`` for a module that should get adapters but is missing, or cannot."""
    named = {name: each for layer in model.layers for name, each in layer.named_modules() if name}
    in_layers = {*named}
    linears = {name for name, each in named.items() if "weight" in each and each.weight.ndim > 1}
    read = {
        f"{path}.{child}"
        for path, each in named.items()
        for child in each.children()
        if f"{path}.{child}" in linears and reads_weight(each, child)
    }
    if barred := sorted(read.intersection(linears if keys is None else keys)):
        raise UserError(
            f"lora_parameters: mlx-lm has no adapters for {', '.join(barred)}, whose numbers the "
            "layers of this model read themselves",
            f"name others as keys in lora_parameters: {', '.join(sorted(linears - read))}",
        )
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
    """Begin with a file's adapters or weights, or with those of PEFT's directory: all must be
    trained. Raises ``UserError``."""
    with naming(f"--resume-adapter-file {file}"):
        file = start_file(file)
        if not file.is_file():
            remedy = f"name its {ADAPTER_FILE}" if file.is_dir() else ""
            raise UserError("there is no such file", remedy)
        weights = read_tensors([file])
        remedy = "use the model and lora_parameters that it was made with"
        if not fine_tune.is_full and has_peft_names(weights):
            weights, remedy = _as_trained(model, file, weights, fine_tune)
        known = dict(tree_flatten(model.parameters()))
        if not weights.keys() & known.keys():
            raise UserError("it holds no weight of this model")
        if not fine_tune.is_full:
            known = dict(tree_flatten(model.trainable_parameters()))
            remedy += ": --num-layers, and keys in lora_parameters"
        put(model, weights, known, remedy)


def _as_trained(
    model: nn.Module, file: Path, tensors: dict[str, mx.array], fine_tune: FineTune
) -> tuple[dict[str, mx.array], str]:
    """Return PEFT's tensors as float32 adapters that have their effect with this run's scale, and
    the remedy where it has no such adapters. Raises ``UserError``."""
    described = file.with_name(ADAPTER_CONFIG_FILE)
    if not described.is_file():
        raise UserError("its tensors are PEFT's", f"put PEFT's {ADAPTER_CONFIG_FILE} beside it")
    config = _described(described)
    if not is_peft(config):
        raise UserError(
            f"its tensors are PEFT's, and {described} is not", "put PEFT's own beside it"
        )
    made, own = from_peft(config, tensors, dict(model.named_modules()))
    theirs = own["lora_parameters"]
    factor = theirs["scale"] / fine_tune.lora_parameters["scale"]
    weights = {
        name: array.astype(mx.float32) * (factor if name.endswith(".lora_b") else 1.0)
        for name, array in made.items()
    }
    kind = f"--fine-tune-type {own['fine_tune_type']}"
    return weights, f"give {kind}, rank: {theirs['rank']} in lora_parameters, and its modules"


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


def read_tensors(files: Iterable[Path]) -> dict[str, mx.array]:
    """Return the tensors of files, of which each may have pieces, lazily. Raises ``UserError``."""
    found: dict[str, mx.array] = {}
    for file in files:
        with refusing(str(file)):
            loaded: Any = mx.load(str(file), return_metadata=True)
        weights, metadata = loaded
        for name, piece in pieces_in(metadata).items():
            weights[name] = piece.put(weights[name], piece.everything, found.get(name))
        found |= weights
    return found


def find_adapters(directory: Path) -> tuple[dict[str, Any], Path]:
    """Return the checked adapter_config.json and the file of the tensors. Raises ``UserError``."""
    config = _described(directory / ADAPTER_CONFIG_FILE)
    file = directory / (PEFT_FILE if is_peft(config) else ADAPTER_FILE)
    if file.is_file():
        return config, file
    if is_peft(config) and (pickled := directory / PICKLED).is_file():
        raise UserError(f"{pickled} is pickled", f"save it with PEFT as {PEFT_FILE}")
    raise UserError(f"there is no {file}")


def _described(file: Path) -> dict[str, Any]:
    """Return the checked adapter_config.json, mlx-lm's or PEFT's. Raises ``UserError``."""
    remedy = "name a whole model as --model" if file.with_name(CONFIG_FILE).is_file() else ""
    with file_access("read", file, remedy):
        config = parse_config(file.read_bytes(), file)
    with naming(str(file)):
        _check(config)
    return config


def _check(config: Mapping[str, Any]) -> None:
    if is_peft(config):
        check_peft(config)
        return
    kind = config.get("fine_tune_type", "lora")
    if kind not in FINE_TUNE_TYPES:
        raise UserError(f"fine_tune_type is {kind!r}", f"one of {', '.join(FINE_TUNE_TYPES)}")
    if kind == "full":
        return
    layers = config.get("num_layers")
    parameters = config.get("lora_parameters")
    if not isinstance(layers, int) or isinstance(layers, bool):
        raise UserError(f"num_layers is {layers!r}", "a whole number says which layers have them")
    if not isinstance(parameters, Mapping):
        raise UserError(f"lora_parameters is {parameters!r}", "a mapping says what they are")
    check_lora_values(parameters)
