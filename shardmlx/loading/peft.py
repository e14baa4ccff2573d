"""PEFT's LoRA and DoRA as mlx-lm's, and back: names, transposition, scale.

Both compute W + scale B A. PEFT keeps ``lora_A`` as (rank, in) and ``lora_B`` as (out, rank), and
each module has a rank and a scale: alpha / rank, or alpha / sqrt(rank) with rslora. mlx-lm keeps
``lora_a`` as (in, rank) and ``lora_b`` as (rank, out), of one rank and scale. DoRA's magnitude,
(out,), is ``lora_magnitude_vector`` there and ``m`` here. Written after PEFT 0.21.2
(``peft/tuners/lora``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from shardmlx.common.yaml_reader import is_number
from shardmlx.errors import UserError

PEFT_FILE = "adapter_model.safetensors"

PICKLED = "adapter_model.bin"

MERGE = "merge it into its model with PEFT (merge_and_unload), and name the result as the model"

_TYPE = "peft_type"

_HARMLESS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "task_type"),
        *("inference_mode", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("rank_pattern", "alpha_pattern", "fan_in_fan_out", "megatron_core"),
        *("qalora_group_size", "eva_config", "runtime_config", _TYPE, "bias", "init_lora_weights"),
    }
)
"""Settings of PEFT's LoRA that tensors show too, that are read here, or that matter to training
alone. Any other that is set changes what is computed."""

_MOVES_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of ``init_lora_weights`` that change the weights of the model too."""

_PARTS = {"A": "lora_a", "B": "lora_b", "magnitude_vector": "m"}
"""mlx-lm's names for PEFT's parts of a module."""

_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?:embedding_)?(?P<part>A|B|magnitude_vector)"
    r"(?:\.(?P<adapter>\w+?))??(?:\.weight)?"
)

_PREFIX = "base_model.model."

_INNER = ("model.language_model.", "language_model.model.")

_NAMES = (
    ("", ""),
    _INNER,
    ("model.language_model.", "model."),
    ("language_model.", ""),
    ("transformer.", "model."),
    ("", "language_model."),
)
"""Prefixes of transformers' module names, and mlx-lm's for them."""

_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embeddings", "tok_embeddings")
"""Last names of the modules that are embeddings, of which PEFT keeps other tensors."""


def start_file(path: Path) -> Path:
    """Return the file of the tensors that a path names, which may be that of PEFT's directory."""
    return path / PEFT_FILE if (path / PEFT_FILE).is_file() else path


def is_peft(config: Mapping[str, Any]) -> bool:
    """Return whether an adapter_config.json is of PEFT."""
    return _TYPE in config


def has_peft_names(tensors: Collection[str]) -> bool:
    """Return whether tensors are adapters with PEFT's names."""
    return any(map(_TENSOR.fullmatch, tensors))


def kind_of(config: Mapping[str, Any]) -> str:
    """Return mlx-lm's ``fine_tune_type`` of PEFT's adapters."""
    return "dora" if config.get("use_dora") else "lora"


def check_peft(config: Mapping[str, Any]) -> None:
    """Raise ``UserError`` for a PEFT configuration that mlx-lm's adapters cannot express; it names
    the setting."""
    kind = config[_TYPE]
    if kind != "LORA":
        raise UserError(f"peft_type {kind!r} is not LORA, which alone can be converted", MERGE)
    for key, value in config.items():
        if value and key not in _HARMLESS:
            raise UserError(f"{key} of PEFT cannot be converted", MERGE)
    bias = config.get("bias") or "none"
    if bias != "none":
        raise UserError(f"bias {bias!r} of PEFT cannot be converted", MERGE)
    init = str(config.get("init_lora_weights", "")).lower()
    if init.startswith(_MOVES_WEIGHTS):
        raise UserError(f"init_lora_weights {init!r} of PEFT changes the model itself", MERGE)
    if not is_number(config.get("lora_alpha")):
        problem = f"lora_alpha is {config.get('lora_alpha')!r}"
        raise UserError(problem, "give a number, as PEFT writes it")
    for key in ("alpha_pattern", "rank_pattern"):
        if not isinstance(config.get(key) or {}, Mapping):
            raise UserError(f"{key} is {config[key]!r}", "give a mapping, as PEFT writes it")


@dataclass(slots=True)
class _Pair:
    """The adapters of a module, transposed, which PEFT calls ``path``; its own scale."""

    path: str
    scale: float = 1.0
    parts: dict[str, mx.array] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return int(self.parts["lora_a"].shape[1])


def from_peft(
    config: Mapping[str, Any], tensors: Mapping[str, mx.array], modules: Collection[str]
) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Return PEFT's ``tensors`` as mlx-lm's, lazily, and what its adapter_config.json says of them.

    Modules of a smaller rank are padded with zeros, and differing scales are multiplied into
    ``lora_b``. Raises ``UserError`` for any tensor but an adapter of one of the ``modules``.
    """
    is_dora = kind_of(config) == "dora"
    pairs = _pairs_in(tensors, modules)
    for module, pair in pairs.items():
        _check_pair(module, pair, modules, is_dora=is_dora)
        pair.scale = _scale(config, pair)
    rank = max((pair.rank for pair in pairs.values()), default=0)
    scales = {pair.scale for pair in pairs.values()}
    scale = scales.pop() if len(scales) == 1 else 1.0
    weights: dict[str, mx.array] = {}
    for module, pair in pairs.items():
        parts = pair.parts
        missing = rank - pair.rank
        if pair.scale != scale:
            own = parts["lora_b"]
            parts["lora_b"] = (own.astype(mx.float32) * pair.scale).astype(own.dtype)
        if missing:
            parts["lora_a"] = mx.pad(parts["lora_a"], [(0, 0), (0, missing)])
            parts["lora_b"] = mx.pad(parts["lora_b"], [(0, missing), (0, 0)])
        weights |= {f"{module}.{part}": mx.contiguous(each) for part, each in parts.items()}
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": list(pairs)}
    kind = kind_of(config)
    return weights, {"fine_tune_type": kind, "num_layers": -1, "lora_parameters": parameters}


def _pairs_in(tensors: Mapping[str, mx.array], modules: Collection[str]) -> dict[str, _Pair]:
    pairs: dict[str, _Pair] = {}
    for name, array in sorted(tensors.items()):
        match = _TENSOR.fullmatch(name)
        if match is None or array.ndim != (1 if match["part"] == "magnitude_vector" else 2):
            raise UserError(f"tensor {name} of PEFT is not an adapter of a linear layer", MERGE)
        module = _module(match["module"], modules)
        pair = pairs.setdefault(module, _Pair(match["module"]))
        part = _PARTS[match["part"]]
        if part in pair.parts or pair.path != match["module"]:
            raise UserError(f"there are several {name} of PEFT, or two for one {module}")
        pair.parts[part] = array.T
    if not pairs:
        raise UserError("PEFT's file has no adapters", "name that of a finished run")
    return pairs


def _check_pair(module: str, pair: _Pair, modules: Collection[str], *, is_dora: bool) -> None:
    parts = pair.parts
    wanted = {"lora_a", "lora_b", *(("m",) if is_dora else ())}
    if parts.keys() != wanted or parts["lora_a"].shape[1] != parts["lora_b"].shape[0]:
        raise UserError(f"the adapters of {pair.path} are not a pair lora_A, lora_B", MERGE)
    is_embedding = _is_embedding(module)
    if is_embedding and is_dora:
        raise UserError(
            f"DoRA of the embedding {pair.path} cannot be converted: mlx-lm scales each token, and "
            "PEFT each column",
            MERGE,
        )
    if is_embedding and not any(each.rpartition(".")[2] == "lm_head" for each in modules):
        raise UserError(
            f"PEFT has trained {pair.path} without the lm_head that is tied to it, which cannot be "
            "converted",
            MERGE,
        )


def _module(path: str, modules: Collection[str]) -> str:
    """Return mlx-lm's name of a module of transformers. Raises ``UserError``."""
    for theirs, ours in _NAMES:
        name = ours + path.removeprefix(theirs)
        if path.startswith(theirs) and name in modules:
            return name
    raise UserError(
        f"{path}, which PEFT has trained, is not a module of this model",
        f"use the model that it was made with; if that has it, {MERGE}",
    )


def _scale(config: Mapping[str, Any], pair: _Pair) -> float:
    """Return alpha / rank of a module, by the first pattern that fits it, as PEFT looks for it."""
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        try:
            fits = re.match(rf"(.*\.)?({pattern})$", pair.path) is not None
        except re.error:
            raise UserError(f"alpha_pattern has {pattern!r}, which is not a pattern") from None
        if fits:
            alpha = value
            break
    if not is_number(alpha):
        problem = f"alpha_pattern has {alpha!r} for {pair.path}"
        raise UserError(problem, "give a number, as PEFT writes it")
    return float(alpha) / (math.sqrt(pair.rank) if config.get("use_rslora") else pair.rank)


def to_peft(
    config: Mapping[str, Any], weights: Mapping[str, mx.array], model: str, *, tied: bool
) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Return mlx-lm's adapters of ``model`` as PEFT's tensors, lazily, and its adapter_config.json.

    ``config`` is mlx-lm's; the embedding of a ``tied`` model serves as its lm_head. Raises
    ``UserError`` for what PEFT's LoRA cannot express: it names the module.
    """
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise UserError(f"fine_tune_type {kind} has no adapters", "export it without --peft")
    parameters = config["lora_parameters"]
    names: dict[str, None] = {}
    tensors: dict[str, mx.array] = {}
    for name, array in sorted(weights.items()):
        module, _, part = name.rpartition(".")
        _check_writable(module, array, is_dora=kind == "dora", tied=tied)
        tensors[_PREFIX + _name_of(module, part)] = mx.contiguous(array.T)
        names[_path_of(module)] = None
    alpha = parameters["scale"] * parameters["rank"]
    return tensors, {
        _TYPE: "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "inference_mode": True,
        "r": parameters["rank"],
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": parameters.get("dropout", 0.0),
        "use_rslora": False,
        "use_dora": kind == "dora",
        "target_modules": list(names),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def _path_of(module: str) -> str:
    """Return transformers' name of a module of mlx-lm."""
    theirs, ours = _INNER
    if module.startswith(ours):
        return theirs + module.removeprefix(ours)
    return module.removeprefix("language_model.")


def _is_embedding(module: str) -> bool:
    return module.rpartition(".")[2] in _EMBEDDINGS


def _check_writable(module: str, array: mx.array, *, is_dora: bool, tied: bool) -> None:
    """Raise ``UserError`` for a tensor of a module that PEFT's LoRA cannot express."""
    remedy = "export the whole model, without --peft"
    if array.ndim > 2:
        raise UserError(f"adapters of the experts {module} have no form in PEFT", remedy)
    if _is_embedding(module) and (is_dora or tied):
        why = "DoRA scales each token there" if is_dora else "the head that is tied to it has them"
        raise UserError(f"adapters of {module} have no form in PEFT: {why}", remedy)


def _name_of(module: str, part: str) -> str:
    """Return PEFT's name of a tensor, without its prefix."""
    path = _path_of(module)
    if part == "m":
        return f"{path}.lora_magnitude_vector"
    letter = part.removeprefix("lora_").upper()
    return (
        f"{path}.lora_embedding_{letter}"
        if _is_embedding(module)
        else f"{path}.lora_{letter}.weight"
    )
