"""Check that the files of a model are sound, and that its tensors are those of its family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardmlx.common.formatting import plural
from shardmlx.modelfiles.model_files import ModelFiles
from shardmlx.modelfiles.parts import shape_of
from shardmlx.modelfiles.safetensors_header import PlacedTensor
from shardmlx.modelfiles.tensors import (
    Module,
    Quantisation,
    expected_tensors,
    infer_quantisation,
    is_dropped,
    is_stored_otherwise,
    loaded_name,
    modules,
    read_quantisation,
)
from shardmlx.models.shape import ModelShape

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Verification:
    """A list of faults, and of completed checks, each in one line."""

    faults: tuple[str, ...]
    checked: tuple[str, ...]


def verify(files: ModelFiles) -> Verification:
    """Check headers, sizes, names and shapes."""
    faults = list(files.faults)
    checked = [
        f"{plural(len(files.headers), 'header')}: offsets, sizes, overlaps, duplicate tensors",
    ]
    if files.index is not None:
        faults += _index(files, files.index)
        checked.append("index: files, tensors")
    checked.append(_family(files, faults))
    return Verification(tuple(faults), tuple(checked))


def _index(files: ModelFiles, index: Mapping[str, str]) -> Iterator[str]:
    for name, place in files.tensors.items():
        listed = index.get(name)
        if listed is None:
            yield f"tensor {name!r} of {place.file} is not in the index"
        elif listed != place.file and listed in files.headers:
            yield f"tensor {name!r} is in {place.file}, but the index has it in {listed}"


def _family(files: ModelFiles, faults: list[str]) -> str:
    """Add faults of names and shapes to ``faults``; return the completed check."""
    if not files.tensors:
        return "tensors not compared: there are none"
    packing = files.config.get("quantization_config")
    method = packing.get("quant_method") if isinstance(packing, dict) else None
    shape = shape_of(files)
    if isinstance(shape, str):
        return f"tensors not compared: {shape}"
    if method is not None and "quantization" not in files.config:
        return f"tensors not compared: quantised by {method}, not by mlx-lm"
    tensors = {loaded_name(name, shape): place for name, place in files.tensors.items()}
    family = modules(shape)
    if is_stored_otherwise(tensors, family, shape):
        if shape.missing:
            faults.append(f"tensor {shape.missing!r} is missing: {_remedy(files)}")
        return (
            f"tensors not compared: Hugging Face stores {shape.model_type} otherwise than mlx-lm, "
            "which cuts or joins some as it loads"
        )
    found = list(_differences(files, shape, tensors, family))
    faults += found[:_SHOWN]
    if len(found) > _SHOWN:
        faults.append(f"... and {len(found) - _SHOWN} more tensors that differ from the family")
    return f"tensors against the family {shape.model_type}: names, shapes, packing"


def _differences(
    files: ModelFiles,
    shape: ModelShape,
    tensors: Mapping[str, PlacedTensor],
    family: Mapping[str, Module],
) -> Iterator[str]:
    config = read_quantisation(files.config)

    def quantised(path: str, module: Module) -> Quantisation | None:
        """Find the quantisation as mlx-lm does: from the config of this module, else its scales."""
        if config is None:
            return None
        if path in config.modules:
            return config.modules[path]
        scales, weight = tensors.get(f"{path}.scales"), tensors.get(f"{path}.weight")
        if scales is None or not scales.shape:
            return None
        packed = weight.shape[-1] if weight is not None and weight.shape else 0
        inferred = infer_quantisation(
            packed, scales.shape[-1], scales.dtype, module.weight[-1], config.default
        )
        return inferred or config.default

    expected = expected_tensors(family, quantised)
    for name, sides in expected.items():
        place = tensors.get(name)
        if place is None:
            yield f"tensor {name!r} is missing: {_remedy(files)}"
        elif place.shape != sides and (shape.is_declared or sorted(place.shape) != sorted(sides)):
            # Only rows tell what mlx-lm turns, as it turns convolutions.
            yield (
                f"tensor {name!r} of {place.file} has shape {list(place.shape)}, but "
                f"{shape.model_type} of this config.json has {list(sides)}"
            )
        elif wrong := _wrong_dtype(name, place, expected):
            yield f"tensor {name!r} of {place.file} is {place.dtype}: {wrong}"
    for name, place in tensors.items():
        is_known = name in expected or (not shape.is_declared and name not in shape.refused)
        if not is_known and not is_dropped(name, shape):
            if name.endswith(".global_scale") and f"{name.rpartition('.')[0]}.scales" in expected:
                continue
            yield f"tensor {name!r} of {place.file} is unexpected: {shape.model_type} has none"


def _remedy(files: ModelFiles) -> str:
    return "copy or download the model again" if files.paths else "the repository is incomplete"


def _wrong_dtype(name: str, place: PlacedTensor, expected: Mapping[str, object]) -> str | None:
    path, _, leaf = name.rpartition(".")
    is_packed = leaf == "weight" and f"{path}.scales" in expected
    if is_packed:
        return None if place.dtype == "U32" else "packed weights are U32"
    if leaf == "scales" and f"{path}.biases" not in expected:
        return None if place.dtype == "U8" else "scales of this mode are U8"
    is_float = place.dtype.startswith(("F", "BF"))
    return None if is_float else "a floating-point dtype was expected"
