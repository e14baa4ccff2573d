"""Read how other programs packed a model, and how mlx-lm loads it. No MLX, no MPI.

Follows ``mlx_lm.utils.load_model``, which reads ``quantization_config`` if config.json has no
``quantization``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from shardmlx.errors import UserError
from shardmlx.models.sizes.shape import ModelShape

_16_BITS = "take the model in 16 bits, or as mlx-lm packs it"
_EXCEPTIONS = ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers")
_IN_A_LAYER = re.compile(r"\.(?:layers|h|blocks)\.\d+\.")
_Loaded = tuple[int, int, str] | None
_FORMATS: Mapping[str, _Loaded] = {
    "nvfp4-pack-quantized": (4, 16, "nvfp4"),
    "mxfp4-pack-quantized": (4, 32, "mxfp4"),
    "pack-quantized": (4, 32, "affine"),
}
_AWQ = {"bits": (4, None), "group_size": (32, 64, 128, None), "desc_act": (False, None)}
_METHODS: Mapping[str, tuple[_Loaded, Mapping[str, tuple[Any, ...]]]] = {
    "mxfp4": ((4, 32, "mxfp4"), {}),
    "mxfp8": ((8, 32, "mxfp8"), {}),
    "fp8": (None, {}),
    "bitnet": (None, {}),
    "compressed-tensors": (None, {"format": tuple(_FORMATS)}),
    "modelopt": ((4, 16, "nvfp4"), {"quant_algo": ("NVFP4",), "group_size": (16, None)}),
    "awq": ((4, 128, "affine"), _AWQ),
    "gptq": ((4, 128, "affine"), _AWQ),
}
"""Loaded form of each method, and the values that mlx-lm reads; None is a missing field."""


class Packing(NamedTuple):
    """A packing of another program: its ``method``, and the bits, group and mode in which mlx-lm
    keeps it ``loaded``, None if mlx-lm unpacks it to bfloat16. ``kept`` modules stay unpacked."""

    method: str
    loaded: _Loaded
    kept: tuple[re.Pattern[str], ...] = ()

    def packs(self, module: str) -> bool:
        """Return whether a module of the model is packed: one of its layers, if not kept."""
        is_in_layer = _IN_A_LAYER.search(f".{module}") is not None
        return is_in_layer and not any(each.search(module) for each in self.kept)

    def __str__(self) -> str:
        if self.loaded is None:
            return f"packed by {self.method}, which mlx-lm unpacks to bfloat16 as it loads"
        bits, group, mode = self.loaded
        return f"packed by {self.method}, which mlx-lm keeps as {mode}, {bits}-bit, group {group}"


def published_packing(config: Mapping[str, Any]) -> Packing | None:
    """Return how another program packed a model, if one did; ``UserError`` if unreadable."""
    said = config.get("quantization_config")
    if said is None:
        said = (config.get("text_config") or {}).get("quantization_config")
    if not said or config.get("quantization") is not None:
        return None
    method: Any = said.get("quant_method") if isinstance(said, Mapping) else None
    if method not in _METHODS:
        raise UserError(f"config.json: quantization_config is of quant_method {method!r}", _16_BITS)
    settings = said.get("quantization", said)
    if not isinstance(settings, Mapping):
        raise _refused(method, "quantization", settings, "objects")
    loaded, needed = _METHODS[method]
    for key, known in needed.items():
        if settings.get(key) not in known:
            words = ", ".join(str(each) for each in known if each is not None)
            raise _refused(method, key, settings.get(key), words)
    if method == "fp8" and settings.get("scale_fmt") == "ue8m0":
        loaded = (8, 32, "mxfp8") if settings.get("weight_block_size") == [32, 32] else None
    elif method == "compressed-tensors":
        loaded = _FORMATS[settings["format"]]
    elif method in ("awq", "gptq"):
        loaded = (4, settings.get("group_size", 128), "affine")
    return Packing(method, loaded, _kept(method, settings))


def _kept(method: Any, settings: Mapping[str, Any]) -> tuple[re.Pattern[str], ...]:
    """Return expressions for the modules that stay unpacked. Raises ``UserError``."""
    kept: list[re.Pattern[str]] = []
    for key in _EXCEPTIONS:
        found = settings.get(key) or []
        if not isinstance(found, list):
            raise _refused(method, key, found, "lists")
        try:
            kept += [_pattern(str(each)) for each in found]
        except re.error:
            raise _refused(method, key, found, "regular expressions after re:") from None
    return tuple(kept)


def check_packing(
    config: Mapping[str, Any], shape: ModelShape, tensors: Iterable[str] = ()
) -> None:
    """Raise ``UserError`` for a packing that mlx-lm does not read here, or at all."""
    packing = published_packing(config)
    if packing is None:
        return
    method = packing.method
    kind = shape.model_type
    endings = {name.rpartition(".")[2]: name for name in tensors}
    if method == "gptq" and "g_idx" in endings:
        raise UserError(f"{endings['g_idx']}: mlx-lm reads no gptq with g_idx", _16_BITS)
    if method in ("awq", "gptq") and endings and "qweight" not in endings:
        problem = f"config.json: quantization_config is of {method}, and no tensor is packed"
        raise UserError(problem, "take quantization_config out")
    is_refused = any(name.endswith("weight_scale_inv") for name in shape.refused)
    if method == "fp8" and packing.loaded is None and (is_refused or shape.is_declared):
        raise UserError(f"config.json: mlx-lm does not unpack fp8 of type {kind}", _16_BITS)


def _pattern(exception: str) -> re.Pattern[str]:
    """Return the expression for an exception: an expression itself, or a path with stars."""
    if exception.startswith("re:"):
        return re.compile(rf"\A(?:{exception.removeprefix('re:')})")
    path = re.escape(exception).replace(r"\*", ".*")
    return re.compile(rf"(?:^|\.){path}(?:\.|$)")


def _refused(method: Any, key: str, value: Any, known: str) -> UserError:
    return UserError(
        f"config.json: quantization_config of {method} has {key} {value!r}",
        f"mlx-lm reads {known} alone: {_16_BITS}",
    )
