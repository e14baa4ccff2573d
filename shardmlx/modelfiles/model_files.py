"""A model as its files describe it: config.json, index and the headers of its safetensors files.

From a directory or a Hugging Face repository; no weight is read.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardmlx.errors import UserError
from shardmlx.modelfiles.hub import Repository, find_repository
from shardmlx.modelfiles.safetensors_header import (
    AGAIN,
    INDEX_FILE,
    MODEL_FILES,
    Header,
    PlacedTensor,
    check_weights,
    parse_index,
)
from shardmlx.modelfiles.sources import CONFIG_FILE, PACKING_FILE, SUFFIX, Directory
from shardmlx.models.sizes.config_reader import check_layout, parse_config

Source = Directory | Repository


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Facts about a model that are known without reading its weights.

    ``tensors`` are empty without weights, ``paths`` are of local files only. ``faults`` say why the
    files are not one model.
    """

    name: str
    revision: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, Header] = field(default_factory=dict)
    tensors: Mapping[str, PlacedTensor] = field(default_factory=dict)
    paths: Mapping[str, Path] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    note: str = ""


def open_model(name: str, revision: str | None = None) -> ModelFiles:
    """Read a directory or a repository; ``UserError`` names the first fault."""
    return sound(find_source(name, revision))


def sound(source: Source) -> ModelFiles:
    """Read the description of a model; ``UserError`` names its first fault."""
    files = read_model(source)
    if files.faults:
        raise UserError(files.faults[0])
    return files


def check_model_files(model_dir: str | Path) -> dict[str, Path]:
    """Return the file of each tensor in ``model*.safetensors``, which mlx-lm loads. ``UserError``
    if there are none, if the index names an absent one, or if two files hold the same tensor."""
    directory = Path(model_dir)
    if not directory.is_dir():
        raise UserError(f"model directory {directory} does not exist: check --model")
    source = Directory(directory)
    check_weights(directory, source.files)
    return {name: directory / place.file for name, place in sound(source).tensors.items()}


def find_source(name: str, revision: str | None = None) -> Source:
    """Find the files of a model; raise ``UserError`` when it is neither here nor on the hub."""
    path = directory_of(name, revision)
    return find_repository(name, revision) if path is None else Directory(path)


def directory_of(name: str, revision: str | None = None) -> Path | None:
    """Return the directory of a model that is here; None if its name may be one on the hub, and
    ``UserError`` if it cannot."""
    path = Path(name).expanduser()
    if path.exists():
        if not path.is_dir():
            raise UserError(f"{name} is a file", "name the directory that holds config.json")
        if revision is not None:
            raise UserError(f"--revision {revision} of {name}, which is here", "leave it out")
        return path
    if name.startswith((".", "/", "~")) or name.endswith(SUFFIX):
        raise UserError(f"{name} does not exist: check the path")
    return None


def read_model(source: Source) -> ModelFiles:
    """Read the description of the model; ``faults`` tells about its tensors."""
    present = set(source.files)
    check_layout(source.name, present)
    if CONFIG_FILE not in present:
        raise UserError(
            f"{source.name} is not a model: it has no {CONFIG_FILE}",
            "name the directory or repository that has it",
        )
    config = parse_config(source.read(CONFIG_FILE), source.where(CONFIG_FILE))
    if PACKING_FILE in present and not config.keys() & {"quantization", "quantization_config"}:
        packing = parse_config(source.read(PACKING_FILE), source.where(PACKING_FILE))
        config = {**config, "quantization_config": {"quant_method": "modelopt", **packing}}
    index = None
    if INDEX_FILE in present:
        index = parse_index(source.read(INDEX_FILE), source.where(INDEX_FILE))
    files = sorted(file for file in fnmatch.filter(present, MODEL_FILES) if "/" not in file)
    headers, tensors, faults = _read_tensors(source, files, index)
    return ModelFiles(
        name=source.name,
        revision=source.revision,
        config=config,
        headers=headers,
        tensors=tensors,
        paths=source.paths,
        faults=tuple(faults),
        note=source.note,
    )


def _read_tensors(
    source: Source, files: Sequence[str], index: Mapping[str, str] | None
) -> tuple[dict[str, Header], dict[str, PlacedTensor], list[str]]:
    """Return headers, tensors and faults of ``files``."""
    indexed = index or {}
    named_files = {*indexed.values()}
    others = sorted({*fnmatch.filter(source.files, MODEL_FILES)} - named_files)
    remedy = source.missing
    if others and INDEX_FILE in source.paths:
        remedy = f"remove {INDEX_FILE}: it is of other files than {', '.join(others)}"
    faults = [
        f"{source.where(file)} is missing, but the index names it: {remedy}"
        for file in sorted(named_files - {*source.files})
    ]
    headers: dict[str, Header] = {}
    for file, header in zip(files, source.headers(files), strict=True):
        if isinstance(header, UserError):
            faults.append(str(header))
        else:
            headers[file] = header
    tensors: dict[str, PlacedTensor] = {}
    for file, header in headers.items():
        for name, tensor in header.tensors.items():
            first = tensors.setdefault(name, tensor)
            if first is not tensor:
                faults.append(
                    f"tensor {name!r} is in both {first.file} and {file} of {source.name}: "
                    "take the file away that does not belong to the model"
                )
    # Tensors of an unreadable file are not reported as missing, too.
    faults += [
        f"tensor {name!r} is not in {source.where(file)}, where the index has it: {AGAIN}"
        for name, file in indexed.items()
        if file in headers and name not in tensors
    ]
    return headers, tensors, faults
