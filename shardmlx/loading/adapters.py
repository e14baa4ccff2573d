"""Put earlier training results into a model, lazily: all of them, or refuse them by name.

PEFT's LoRA is converted into mlx-lm's, so that both compute W + scale B A. PEFT keeps ``lora_A`` as
(rank, in) and ``lora_B`` as (out, rank), and scales each module by alpha / rank. mlx-lm keeps
``lora_a`` as (in, rank) and ``lora_b`` as (rank, out), of one rank and scale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from shardmlx.checkpoint.export import pieces_in
from shardmlx.common.yaml_reader import did_you_mean, is_number
from shardmlx.compat import reads_weight
from shardmlx.config.checks import FINE_TUNE_TYPES, check_lora_values
from shardmlx.config.specs import FineTune
from shardmlx.errors import UserError, file_access, one_line
from shardmlx.modelfiles.sources import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from shardmlx.models.config_reader import parse_config

PEFT_FILE = "adapter_model.safetensors"
PEFT_TYPE = "peft_type"

PICKLED = "adapter_model.bin"

MERGE = "merge it into its model with PEFT (merge_and_unload), and name the result as the model"

_REFUSED = (
    *("modules_to_save", "layer_replication", "trainable_token_indices", "target_parameters"),
    *("lora_bias", "megatron_config", "alora_invocation_tokens", "arrow_config", "kasa_config"),
    "monteclora_config",
)
"""Settings of PEFT that train more than pairs of matrices, or use these otherwise."""

_MOVES_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of ``init_lora_weights`` that change the weights of the model too."""

_PARTS = frozenset({"lora_a", "lora_b", "m"})

_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?:embedding_)?(?P<part>[AB])"
    r"(?:\.(?P<adapter>\w+?))??(?:\.weight)?"
)

_NAMES = (
    ("", ""),
    ("model.language_model.", "language_model.model."),
    ("model.language_model.", "model."),
    ("language_model.", ""),
    ("transformer.", "model."),
    ("", "language_model."),
)
"""Prefixes of transformers' module names, and mlx-lm's for them."""


def add_adapters(model: nn.Module, config: Mapping[str, Any], files: Iterable[Path]) -> None:
    """Put adapters, mlx-lm's or PEFT's, into a model: the tensors of ``files``, which ``config``
    describes as adapter_config.json. Raises ``UserError``."""
    weights = _read(files)
    if PEFT_TYPE in config:
        weights, parameters = convert(config, weights, dict(model.named_modules()))
        config = {"num_layers": len(model.layers), "lora_parameters": parameters}
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
    try:
        linear_to_lora_layers(model, num_layers, dict(parameters), use_dora=kind == "dora")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{kind}: {one_line(error)}") from None


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
    """Begin with a file's adapters or weights: all must be trained. Raises ``UserError``."""
    if not file.is_file():
        remedy = f"name its {adapter_file(file)}" if file.is_dir() else ""
        raise UserError(f"--resume-adapter-file {file}: there is no such file", remedy)
    try:
        weights = _read([file])
        remedy = "use the model and lora_parameters that it was made with"
        if not fine_tune.is_full and any(map(_TENSOR.fullmatch, weights)):
            config = read_adapter_config(file.parent)
            if PEFT_TYPE not in config:
                fix = "put PEFT's adapter_config.json beside it"
                raise UserError("its tensors are PEFT's", fix)
            made, parameters = convert(config, weights, dict(model.named_modules()))
            # Float32 adapters that have the effect of the converted ones with this run's scale.
            factor = parameters["scale"] / fine_tune.lora_parameters["scale"]
            weights = {
                name: array.astype(mx.float32) * (factor if name.endswith(".lora_b") else 1.0)
                for name, array in made.items()
            }
            remedy = f"give rank: {parameters['rank']} in lora_parameters, and its modules"
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


def _read(files: Iterable[Path]) -> dict[str, mx.array]:
    """Return the tensors of files, of which each may have pieces, lazily. Raises ``UserError``."""
    found: dict[str, mx.array] = {}
    for file in files:
        try:
            loaded: Any = mx.load(str(file), return_metadata=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(one_line(error)) from None
        weights, metadata = loaded
        for name, piece in pieces_in(metadata).items():
            weights[name] = piece.put(weights[name], piece.everything, found.get(name))
        found |= weights
    return found


def convert(
    config: Mapping[str, Any], tensors: Mapping[str, mx.array], modules: Collection[str]
) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Return PEFT's ``tensors`` as mlx-lm's weights and ``lora_parameters``, lazily.

    Modules of a smaller rank are padded with zeros, and differing scales are multiplied into
    ``lora_b``. Raises ``UserError`` for any tensor but a pair of one of the ``modules``.
    """
    pairs: dict[str, dict[str, mx.array]] = {}
    scales: dict[str, float] = {}
    paths: dict[str, str] = {}
    for name, array in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None or array.ndim != 2:
            raise UserError(f"tensor {name} of PEFT is no matrix lora_A or lora_B", MERGE)
        path, part = match["module"], match["part"]
        module = _module(path, modules)
        if part in pairs.setdefault(module, {}) or paths.setdefault(module, path) != path:
            raise UserError(f"there are several {name} of PEFT, or two for one {module}")
        pairs[module][part] = array.T
    for module, pair in pairs.items():
        if pair.keys() != {"A", "B"} or pair["A"].shape[1] != pair["B"].shape[0]:
            raise UserError(f"lora_A and lora_B of {paths[module]} are no pair")
        if "embed" in module and not any(n.rpartition(".")[2] == "lm_head" for n in modules):
            raise UserError(
                f"PEFT has trained {module} without the lm_head that is tied to it, which cannot "
                "be converted",
                MERGE,
            )
        scales[module] = _scale(config, paths[module], pair["A"].shape[1])
    rank = max((pair["A"].shape[1] for pair in pairs.values()), default=0)
    common = set(scales.values())
    scale = common.pop() if len(common) == 1 else 1.0
    weights: dict[str, mx.array] = {}
    for module, pair in pairs.items():
        a, b = pair["A"], pair["B"]
        missing = rank - a.shape[1]
        if scales[module] != scale:
            b = (b.astype(mx.float32) * scales[module]).astype(b.dtype)
        if missing:
            a, b = mx.pad(a, [(0, 0), (0, missing)]), mx.pad(b, [(0, missing), (0, 0)])
        weights |= {f"{module}.lora_a": mx.contiguous(a), f"{module}.lora_b": mx.contiguous(b)}
    return weights, {"rank": rank, "scale": scale, "dropout": 0.0, "keys": list(pairs)}


def _module(path: str, modules: Collection[str]) -> str:
    """Return mlx-lm's name of a module of transformers. Raises ``UserError``."""
    for theirs, ours in _NAMES:
        name = ours + path.removeprefix(theirs)
        if path.startswith(theirs) and name in modules:
            return name
    raise UserError(
        f"{path}, which PEFT has trained, is no module of this model",
        f"use the model that it was made with; if that has it, {MERGE}",
    )


def _scale(config: Mapping[str, Any], path: str, rank: int) -> float:
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        try:
            fits = re.fullmatch(rf"(.*\.)?({pattern})", path) is not None
        except re.error:
            raise UserError(f"alpha_pattern has {pattern!r}, which is no pattern") from None
        if fits:
            alpha = value
            break
    if not is_number(alpha):
        raise UserError(f"alpha_pattern has {alpha!r} for {path}", "a number, as PEFT writes it")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """Return the checked adapter_config.json, mlx-lm's or PEFT's. ``UserError`` names the file."""
    file = directory / ADAPTER_CONFIG_FILE
    with file_access("read", file):
        config = parse_config(file.read_bytes(), file)
    try:
        if PEFT_TYPE in config:
            _check_peft(config)
        else:
            _check_own(config)
    except UserError as error:
        raise UserError(f"{file}: {error.problem}", error.remedy) from None
    return config


def adapter_file(directory: Path) -> str:
    """Return the name of the file with the tensors, whether or not it is there."""
    return PEFT_FILE if (directory / PEFT_FILE).is_file() else ADAPTER_FILE


def find_adapters(directory: Path) -> tuple[dict[str, Any], Path]:
    """Return the checked adapter_config.json and the file of the tensors. Raises ``UserError``."""
    config = read_adapter_config(directory)
    file = directory / (PEFT_FILE if PEFT_TYPE in config else ADAPTER_FILE)
    if file.is_file():
        return config, file
    if file.name == PEFT_FILE and file.with_name(PICKLED).is_file():
        raise UserError(
            f"{file.with_name(PICKLED)} is pickled", f"save it with PEFT as {PEFT_FILE}"
        )
    raise UserError(f"there is no {file}")


def _check_own(config: Mapping[str, Any]) -> None:
    kind = config.get("fine_tune_type", "lora")
    if kind not in FINE_TUNE_TYPES:
        raise UserError(f"fine_tune_type is {kind!r}", f"one of {', '.join(FINE_TUNE_TYPES)}")
    if kind == "full":
        return
    layers, parameters = config.get("num_layers"), config.get("lora_parameters")
    if not isinstance(layers, int) or isinstance(layers, bool):
        raise UserError(f"num_layers is {layers!r}", "a whole number says which layers have them")
    if not isinstance(parameters, Mapping):
        raise UserError(f"lora_parameters is {parameters!r}", "a mapping says what they are")
    check_lora_values(parameters)


def _check_peft(config: Mapping[str, Any]) -> None:
    """Refuse any adapter but a plain LoRA, by its name."""
    kind = config[PEFT_TYPE]
    if kind != "LORA":
        raise UserError(f"peft_type {kind!r} is not LORA, which alone can be converted", MERGE)
    if config.get("use_dora"):
        raise UserError("DoRA of PEFT (use_dora) cannot be converted", MERGE)
    used = (key for key in config if key.startswith("use_") and key != "use_rslora")
    for key in (*used, *_REFUSED):
        if config.get(key):
            raise UserError(f"{key} of PEFT cannot be converted", MERGE)
    bias, init = config.get("bias") or "none", str(config.get("init_lora_weights", "")).lower()
    if bias != "none":
        raise UserError(f"bias {bias!r} of PEFT cannot be converted", MERGE)
    if init.startswith(_MOVES_WEIGHTS):
        raise UserError(f"init_lora_weights {init!r} of PEFT changes the model itself", MERGE)
    for key, kinds in (("r", int), ("lora_alpha", (int, float))):
        value = config.get(key)
        if not isinstance(value, kinds) or isinstance(value, bool) or value <= 0:
            raise UserError(f"{key} is {value!r}", "a number above 0, as PEFT writes it")
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, Mapping):
        raise UserError(f"alpha_pattern is {patterns!r}", "a mapping, as PEFT writes it")
