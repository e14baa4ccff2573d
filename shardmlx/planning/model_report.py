"""Write an inspection as text for people and as JSON for programs. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardmlx.common.formatting import columns, count, gibibytes, numbers_of, plural
from shardmlx.modelfiles.parts import Inspection, Part, Tensor, rows
from shardmlx.modelfiles.sources import SUFFIX
from shardmlx.models.family import APPROXIMATE
from shardmlx.models.shape import ModelShape
from shardmlx.planning.weight_split import Split

_FILES_SHOWN = 2


def summary(inspection: Inspection) -> str:
    files, whole = inspection.files, inspection.whole
    lines = [files.name + (f" at {files.revision[:12]}" if files.revision else "")]
    if files.note:
        lines.append(files.note)
    if inspection.shape is not None:
        lines.append(_family(inspection.shape))
    elif files.adapter is not None:
        lines.append(_adapter(inspection))
    if inspection.shape is not None and inspection.shape.is_approximate:
        lines.append(APPROXIMATE)
    if files.config:
        lines.append(inspection.abilities)
    cells = _cells(whole, ())
    packing = "" if cells["quantisation"] == "-" else f", {cells['quantisation']}"
    lines.append(
        f"{cells['tensors']} tensors, {cells['parameters']} parameters, {cells['bytes']} of "
        f"{' + '.join(whole.dtypes)}{packing}"
    )
    if inspection.packing:
        lines.append(inspection.packing)
    if inspection.is_computed:
        lines.append("no weights there: all sizes are computed from config.json")
    else:
        total = gibibytes(sum(header.file_size for header in files.headers.values()))
        lines.append(
            f"{plural(len(files.headers), 'file')} of {total}, of which only the headers were read"
        )
    return "\n".join(lines)


def _family(shape: ModelShape) -> str:
    widest = max(shape.kinds, key=lambda layer: layer.parameters)
    heads = max(layer.heads for layer in shape.kinds)  # recurrent layers have none
    experts = ""
    if widest.experts:
        active = f"{shape.active_parameters() / 1e9:.1f}B of {shape.parameters() / 1e9:.1f}B"
        experts = (
            f", {widest.experts_per_token} of {widest.experts} experts, a token uses {active} "
            "parameters"
        )
    return (
        f"{shape.model_type}: {shape.num_layers} layers, hidden {shape.hidden_size}, "
        f"ffn {widest.width}, {heads.queries}/{heads.keys} heads, "
        f"vocabulary {shape.vocab_size}{experts}, {'tied' if shape.tied else 'untied'} head"
    )


def _adapter(inspection: Inspection) -> str:
    config = inspection.files.adapter or {}
    parameters = config.get("lora_parameters")
    settings = parameters if isinstance(parameters, dict) else {}
    said = ", ".join(f"{key} {settings[key]}" for key in ("rank", "scale") if key in settings)
    adapted = [i for i, layer in enumerate(inspection.layers) if layer.tensors]
    layers = f"layers {adapted[0]}-{adapted[-1]}" if adapted else "no layer"
    return (
        f"{config.get('fine_tune_type', 'lora')} adapters of {config.get('model', 'a model')}: "
        f"{layers}{', ' if said else ''}{said}"
    )


def part_table(inspection: Inspection, fold: bool = True) -> str:
    """Return a table of parts; ``30 x 9`` says that each of 30 layers has 9."""
    lines = []
    for row in rows(inspection, fold):
        each = f"{len(row.parts)} x " if len(row.parts) > 1 else ""
        files = sorted({file for part in row.parts for file in part.files})
        lines.append([row.name, *_cells(row.parts[0], files, each).values()])
    return columns(["part", *_cells(Part(()), ())], lines)


def _cells(part: Part, files: Sequence[str], each: str = "") -> dict[str, str]:
    """Return a part by column; types with the most bytes come first, and many files are counted."""
    names = [file.removesuffix(SUFFIX) for file in files]
    return {
        "tensors": f"{each}{len(part.tensors)}",
        "parameters": f"{each}{count(part.parameters)}",
        "dtype": " + ".join(part.dtypes) or "-",
        "quantisation": "; ".join(part.quantisations) or "-",
        "bytes": f"{each}{gibibytes(part.nbytes)}",
        "files": f"{len(files)} files" if len(files) > _FILES_SHOWN else ", ".join(names) or "-",
    }


def stage_table(split: Split) -> str:
    """Return a table of stages: their places and contents."""
    lines = []
    for stage, rank, share in split.places:
        part, memory, nbytes = split.stage(stage), split.memory(rank), split.nbytes(stage, share)
        parameters, held = split.held(stage, share)
        cells = _cells(part, part.files) | {
            "parameters": count(parameters),
            "bytes": gibibytes(held),
        }
        files = cells.pop("files")
        lines.append(
            {
                "stage": str(stage),
                "rank": str(rank),
                "host": split.host(rank) or "-",
                "layers": numbers_of(*split.stage_map.partition.ranges[stage]),
                **cells,
                "to generate": gibibytes(nbytes) if split.generation else "-",
                "of memory": f"{nbytes / memory:.1%} of {gibibytes(memory)}" if memory else "-",
                "files": files,
            }
        )
    # A fact known of no stage gets no column.
    known = [name for name in lines[0] if any(line[name] != "-" for line in lines)]
    return columns(known, [[line[name] for name in known] for line in lines])


def tensor_table(part: Part) -> str:
    """Return a table of tensors: what each is, and the file that has it."""
    lines = [_tensor_json(tensor) for tensor in part.tensors]
    for line in lines:
        line["shape"] = " x ".join(map(str, line["shape"])) or "scalar"
        line["file"] = line["file"] or "-"
    return columns(list(lines[0]), [[str(each) for each in line.values()] for line in lines])


def as_json(inspection: Inspection, split: Split | None, held: Part | None) -> dict[str, Any]:
    """Return all of an inspection: every layer by itself, and each tensor of those ``held``."""
    files = inspection.files
    result: dict[str, Any] = {
        "model": files.name,
        "revision": files.revision,
        "note": files.note or None,
        "model_type": files.config.get("model_type"),
        "abilities": inspection.abilities if files.config else None,
        "num_layers": len(inspection.layers),
        "tied": inspection.tied,
        "computed_from_config": inspection.is_computed,
        "packing": inspection.packing or None,
        "adapter": dict(files.adapter) if files.adapter is not None else None,
        "total": _part_json(inspection.whole),
        "files": [
            {
                "file": file,
                "bytes": header.file_size,
                "tensors": len(header.tensors),
                "checksum": files.checksums.get(file),
            }
            for file, header in files.headers.items()
        ],
        "parts": [
            {"part": row.name, **_part_json(row.parts[0])} for row in rows(inspection, fold=False)
        ],
    }
    if split is not None:
        result["stages"] = [
            {
                "stage": stage,
                "rank": rank,
                "host": split.host(rank),
                "memory_bytes": split.memory(rank),
                "layers": list(split.stage_map.partition.ranges[stage]),
                **_part_json(split.stage(stage)),
                **dict(zip(("parameters", "bytes"), split.held(stage, share), strict=True)),
                "generation_bytes": split.nbytes(stage, share) if split.generation else None,
            }
            for stage, rank, share in split.places
        ]
    if held is not None:
        result["rank"] = [_tensor_json(tensor) for tensor in held.tensors]
    return result


def _tensor_json(tensor: Tensor) -> dict[str, Any]:
    place = tensor.place
    return {
        "tensor": tensor.name,
        "dtype": place.dtype,
        "shape": list(place.shape),
        "bytes": place.nbytes,
        "file": place.file or None,
    }


def _part_json(part: Part) -> dict[str, Any]:
    return {
        "tensors": len(part.tensors),
        "parameters": part.parameters,
        "bytes": part.nbytes,
        "dtypes": part.dtypes,
        "quantisation": part.quantisations,
        "files": list(part.files),
    }
