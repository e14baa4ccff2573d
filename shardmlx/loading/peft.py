"""Convert PEFT's LoRA into mlx-lm's, so that both compute W + scale B A.

PEFT keeps ``lora_A`` as (rank, in) and ``lora_B`` as (out, rank), and scales each module by alpha /
rank. mlx-lm keeps ``lora_a`` as (in, rank) and ``lora_b`` as (rank, out), of one rank and scale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from shardmlx.errors import UserError
from shardmlx.loading.adapter_files import MERGE

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


@dataclass(frozen=True, slots=True)
class Converted:
    """Adapters in mlx-lm's form. ``parameters`` are its ``lora_parameters``, with whole module
    names as keys."""

    weights: dict[str, mx.array]
    parameters: dict[str, Any]


def is_peft(names: Collection[str]) -> bool:
    """Tell by the names of tensors whether they are of a LoRA of PEFT."""
    return any(_TENSOR.fullmatch(name) for name in names)


def convert(
    config: Mapping[str, Any], tensors: Mapping[str, mx.array], modules: Collection[str]
) -> Converted:
    """Convert the ``tensors`` of PEFT's adapters for a model of such ``modules``, lazily.

    ``config`` is a checked adapter_config.json. Modules of a smaller rank are padded with zeros,
    and differing scales are multiplied into ``lora_b``. Raises ``UserError`` for any tensor but a
    pair of a module of this model.
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
    return Converted(weights, {"rank": rank, "scale": scale, "dropout": 0.0, "keys": list(pairs)})


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
    """Return the factor of a module's B A."""
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        try:
            fits = re.fullmatch(rf"(.*\.)?({pattern})", path) is not None
        except re.error:
            raise UserError(f"alpha_pattern has {pattern!r}, which is no pattern") from None
        if fits:
            alpha = value
            break
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise UserError(f"alpha_pattern has {alpha!r} for {path}", "a number, as PEFT writes it")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
