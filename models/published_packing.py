"""Read how other programs packed a model, and how mlx-lm loads it. No MLX, no MPI.

Follows ``mlx_lm.utils.load_model``, which reads ``quantization_config`` if config.json has no
``quantization``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shardmlx.errors import UserError
from shardmlx.models.shape import ModelShape

_16_BITS = "take the model in 16 bits, or as mlx-lm packs it"
_EXCEPTIONS = ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers")
_IN_A_LAYER = re.compile(r"\.(?:layers|h|blocks)\.\d+\.")
_Loaded = tuple[int, int, str] | None
_FORMATS: Mapping[str, _Loaded] = {
    "nvfp4-pack-quantized": (4, 16, "nvfp4"),
    "mxfp4-pack-quantized": (4, 32, "mxfp4"),
    "pack-quantized": (4, 32, "affine"),
}
_NEEDED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "compressed-tensors": {"format": tuple(_FORMATS)},
    "modelopt": {"quant_algo": ("NVFP4",), "group_size": (16, None)},
    "awq": {"bits": (4, None), "group_size": (32, 64, 128, None), "desc_act": (False, None)},
    "gptq": {"bits": (4, None), "group_size": (32, 64, 128, None), "desc_act": (False, None)},
}
"""Values that mlx-lm reads of each method's fields; None for a missing field."""


class Packing(NamedTuple):
    """A packing of another program: its ``method``, and the bits, group and mode in which mlx-lm
    keeps it ``loaded``, None if mlx-lm unpacks it to bfloat16. ``kept`` modules stay unpacked."""

    method: str
    loaded: _Loaded
    kept: tuple[str, ...] = ()

    def packs(self, module: str) -> bool:
        """Return whether a module of the model is packed: one of its layers, if not kept."""
        if _IN_A_LAYER.search(f".{module}") is None:
            return False
        return not any(_names(each, module) for each in self.kept)

    def __str__(self) -> str:
        if self.loaded is None:
            return f"packed by {self.method}, which mlx-lm unpacks to bfloat16 as it loads"
        bits, group, mode = self.loaded
        return f"packed by {self.method}, which mlx-lm keeps as {mode}, {bits}-bit, group {group}"


def published_packing(config: Mapping[str, Any]) -> Packing | None:
    """Return how another program packed the model of a config.json; None if none did.

    Raises ``UserError``, which names the method, if mlx-lm does not read it.
    """
    said = config.get("quantization_config")
    if said is None:
        said = (config.get("text_config") or {}).get("quantization_config")
    if not said or config.get("quantization") is not None:
        return None
    method = said.get("quant_method") if isinstance(said, Mapping) else None
    if method not in ("mxfp4", "mxfp8", "fp8", "bitnet", *_NEEDED):
        raise UserError(f"config.json: quantization_config is of quant_method {method!r}", _16_BITS)
    settings = said.get("quantization", said)
    if not isinstance(settings, Mapping):
        raise _refused(method, "quantization", settings, ("objects",))
    for key, known in _NEEDED.get(method, {}).items():
        if settings.get(key) not in known:
            raise _refused(
                method, key, settings.get(key), [each for each in known if each is not None]
            )
    kept: list[str] = []
    for key in _EXCEPTIONS:
        found = settings.get(key) or []
        if not isinstance(found, list):
            raise _refused(method, key, found, ("lists",))
        kept += [each for each in found if isinstance(each, str)]
        for each in kept:
            try:
                _names(each, "")
            except re.error:
                raise _refused(method, key, each, ("regular expressions after re:",)) from None
    return Packing(method, _loaded(method, settings), tuple(kept))


def _loaded(method: str, said: Mapping[str, Any]) -> _Loaded:
    """Return bits, group and mode of a packing with these settings in mlx-lm."""
    is_mx = said.get("scale_fmt") == "ue8m0" and said.get("weight_block_size") == [32, 32]
    if method == "mxfp8" or (method == "fp8" and is_mx):
        return 8, 32, "mxfp8"
    if method in ("awq", "gptq"):
        return 4, said.get("group_size", 128), "affine"
    if method == "compressed-tensors":
        return _FORMATS[said["format"]]
    return {"mxfp4": (4, 32, "mxfp4"), "modelopt": (4, 16, "nvfp4")}.get(method)


def check_packing(
    config: Mapping[str, Any], shape: ModelShape, tensors: Iterable[str] = ()
) -> None:
    """Raise ``UserError`` for a packing that mlx-lm does not read, in this family or at all, or
    with ``tensors`` of such names."""
    packing = published_packing(config)
    if packing is not None and packing.method == "gptq":
        for name in tensors:
            if name.endswith(".g_idx"):
                raise UserError(f"{name}: mlx-lm reads no gptq with g_idx", _16_BITS)
    if packing is None or packing.method != "fp8" or packing.loaded is not None:
        return
    # A family that multiplies the scales in ignores them then.
    if shape.is_declared and not shape.family.drops("weight_scale_inv"):
        raise UserError(
            f"config.json: mlx-lm does not unpack fp8 of type {shape.text_type}", _16_BITS
        )


def _names(exception: str, module: str) -> bool:
    """Return whether an exception, a path with stars or an expression, matches a module."""
    if exception.startswith("re:"):
        return re.match(exception.removeprefix("re:"), module) is not None
    pattern = re.escape(exception).replace(r"\*", ".*")
    return re.search(rf"(?:^|\.){pattern}(?:\.|$)", module) is not None


def _refused(method: Any, key: str, value: Any, known: Sequence[Any]) -> UserError:
    return UserError(
        f"config.json: quantization_config of {method} has {key} {value!r}",
        f"mlx-lm reads {', '.join(map(str, known))} alone: {_16_BITS}",
    )
