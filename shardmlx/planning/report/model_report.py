"""Write an inspection as text, and as JSON. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardmlx.common.formatting import columns, count, gibibytes, numbers_of, plural
from shardmlx.modelfiles.parts import Inspection, Part, Tensor, rows
from shardmlx.modelfiles.sources import SUFFIX
from shardmlx.models.family import APPROXIMATE
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.planning.weight_split import Split

_FILES_SHOWN = 2


def summary(inspection: Inspection) -> str:
    """Return what a model is: its family, sizes, packing, and the files that were read."""
    files = inspection.files
    whole = inspection.whole
    lines = [files.name + (f" at {files.revision[:12]}" if files.revision else "")]
    if files.note:
        lines.append(files.note)
    if inspection.shape is not None:
        lines.append(_family(inspection.shape))
    if inspection.shape is not None and inspection.shape.is_approximate:
        lines.append(APPROXIMATE)
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


def part_table(inspection: Inspection, fold: bool = True) -> str:
    """Return a table of parts; ``30 x 9`` says that each of 30 layers has 9."""
    lines = []
    for name, parts in rows(inspection, fold).items():
        each = f"{len(parts)} x " if len(parts) > 1 else ""
        files = sorted({file for part in parts for file in part.files})
        lines.append([name, *_cells(parts[0], files, each).values()])
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
        part = split.stage(stage)
        memory = split.memory(rank)
        nbytes = split.nbytes(stage, share)
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
    lines = []
    for tensor in part.tensors:
        place = tensor.place
        shape = " x ".join(map(str, place.shape)) or "scalar"
        lines.append((tensor.name, place.dtype, shape, str(place.nbytes), place.file or "-"))
    return columns(("tensor", "dtype", "shape", "bytes", "file"), lines)


def as_json(inspection: Inspection, split: Split | None, held: Part | None) -> dict[str, Any]:
    """Return an inspection in exact bytes: each layer by itself, the stages of a split, and each
    tensor of those ``held``."""
    files = inspection.files
    result: dict[str, Any] = {
        "model": files.name,
        "revision": files.revision,
        "note": files.note or None,
        "model_type": files.config.get("model_type"),
        "abilities": inspection.abilities,
        "num_layers": len(inspection.layers),
        "tied": inspection.tied,
        "is_approximate": inspection.shape is not None and inspection.shape.is_approximate,
        "is_computed": inspection.is_computed,
        "packing": inspection.packing or None,
        "whole": _part_json(inspection.whole),
        "files": [
            {"file": file, "bytes": header.file_size, "tensors": len(header.tensors)}
            for file, header in files.headers.items()
        ],
        "parts": [
            {"part": name, **_part_json(parts[0])}
            for name, parts in rows(inspection, fold=False).items()
        ],
    }
    if split is not None:
        result["stages"] = [_stage_json(split, *place) for place in split.places]
    if held is not None:
        result["tensors"] = [_tensor_json(tensor) for tensor in held.tensors]
    return result


def _part_json(part: Part) -> dict[str, Any]:
    return {
        "tensors": len(part.tensors),
        "parameters": part.parameters,
        "bytes": part.nbytes,
        "dtypes": part.dtypes,
        "quantisations": part.quantisations,
        "files": part.files,
    }


def _stage_json(split: Split, stage: int, rank: int, share: int) -> dict[str, Any]:
    parameters, nbytes = split.held(stage, share)
    return {
        "stage": stage,
        "rank": rank,
        "host": split.host(rank),
        "layers": split.stage_map.partition.ranges[stage],
        **_part_json(split.stage(stage)),
        "parameters": parameters,
        "bytes": nbytes,
        "generation_bytes": split.nbytes(stage, share) if split.generation else None,
        "memory_bytes": split.memory(rank),
    }


def _tensor_json(tensor: Tensor) -> dict[str, Any]:
    place = tensor.place
    return {
        "tensor": tensor.name,
        "dtype": place.dtype,
        "shape": place.shape,
        "bytes": place.nbytes,
        "file": place.file or None,
    }
