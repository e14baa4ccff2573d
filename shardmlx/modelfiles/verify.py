"""Check that the files of a model are sound, and that its tensors are those that mlx-lm loads."""

from __future__ import annotations

from shardmlx.common.formatting import plural
from shardmlx.modelfiles.model_files import ModelFiles
from shardmlx.modelfiles.parts import needs_mlx_lm, shape_of
from shardmlx.modelfiles.safetensors_header import header_of

_SHOWN = 20


def verify(files: ModelFiles) -> tuple[list[str], list[str]]:
    """Check headers, sizes, names and shapes; return the completed checks, and the faults, each in
    one line."""
    faults = list(files.faults)
    headers = f"{plural(len(files.headers), 'header')}: offsets, sizes, overlaps, duplicate tensors"
    return [headers, _family(files, faults)], faults


def _family(files: ModelFiles, faults: list[str]) -> str:
    """Add what mlx-lm would refuse to ``faults``; return the completed check."""
    if not files.tensors:
        return "tensors not compared: there are none"
    if isinstance(shape := shape_of(files), str):
        return f"tensors not compared: {shape}"
    with needs_mlx_lm(shape.model_type):
        from shardmlx.models.runtime.loaded import faults_of_tensors
    head = header_of((name, each.shape, each.dtype) for name, each in files.tensors.items())
    nbytes = sum(each.nbytes for each in files.tensors.values())
    found = faults_of_tensors(files.config, head, nbytes)
    for name, fault in found[:_SHOWN]:
        where = f" of {files.tensors[name].file}" if name in files.tensors else ""
        faults.append(f"tensor {name!r}{where} {fault}: {_remedy(files)}" if name else fault)
    if len(found) > _SHOWN:
        faults.append(f"... and {len(found) - _SHOWN} more tensors that differ from the family")
    return f"tensors against the family {shape.model_type}: names, shapes, packing"


def _remedy(files: ModelFiles) -> str:
    return "copy or download the model again" if files.paths else "the repository is incomplete"
