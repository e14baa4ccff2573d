"""A saved state as an archive that other programs load: the adapter as mlx_lm's and as PEFT's."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from shardmlx.api.adapters import adapter_config
from shardmlx.api.states import StateFile
from shardmlx.api.worker import OPTIMIZER
from shardmlx.checkpoint.export import safetensors_pieces, specs_of
from shardmlx.errors import UserError
from shardmlx.loading.adapters import read_tensors
from shardmlx.loading.peft import PEFT_FILE, to_peft
from shardmlx.modelfiles.sources import ADAPTER_CONFIG_FILE, ADAPTER_FILE

NO_PEFT_FILE = "NO_PEFT.txt"
"""Name of the file that says why an archive lacks PEFT's form."""


def archive(state: StateFile, model: str, *, tied: bool) -> bytes:
    """Return a tar archive of a state's adapter, of a ``model``, whose lm_head may be ``tied``. One
    adapter_config.json describes both forms: each program reads its own names there. May be called
    on any thread."""
    with mx.stream(mx.cpu):
        found = read_tensors([state.file])
        weights = {name: found[name] for name in found if not name.startswith(OPTIMIZER)}
        config = dict(adapter_config(state.saved.lora, state.modules))
        files = {ADAPTER_FILE: _safetensors(weights)}
        try:
            tensors, of_peft = to_peft(config, weights, model, tied=tied)
            files[PEFT_FILE] = _safetensors(tensors)
            config |= of_peft
        except UserError as error:
            files[NO_PEFT_FILE] = f"{error.problem}\n".encode()
    files[ADAPTER_CONFIG_FILE] = (json.dumps(config, indent=4) + "\n").encode()
    return _tar(files)


def _safetensors(tensors: Mapping[str, mx.array]) -> bytes:
    mx.eval([*tensors.values()])
    return b"".join(safetensors_pieces(specs_of(tensors), tensors.items()))


def _tar(files: Mapping[str, Any]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name, data in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return content.getvalue()
