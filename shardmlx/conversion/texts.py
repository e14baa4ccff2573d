"""The files of a finished model beside its tensors: configuration, index, tokenizer, card."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory

from mlx_lm.utils import save_config

from shardmlx.checkpoint.export import COPIED_SUFFIXES
from shardmlx.conversion.lazy_model import LazyModel
from shardmlx.conversion.shards import Shards
from shardmlx.errors import UserError
from shardmlx.modelfiles.safetensors_header import INDEX_FILE
from shardmlx.modelfiles.sources import ADAPTER_CONFIG_FILE, CONFIG_FILE
from shardmlx.models.config_reader import read_config
from shardmlx.models.tokenizer import ends_of

_COPIED = (*(f"*{suffix}" for suffix in COPIED_SUFFIXES), "*.py", "*.tiktoken")
_NOT_COPIED = (
    CONFIG_FILE,
    ADAPTER_CONFIG_FILE,
    "*.index.json",
    "*quant*config.json",  # other programs' packing, which no longer holds
    "trainer_state.json",
)


def texts_of(
    model: LazyModel, shards: Shards, source: Path, repository: str | None
) -> dict[str, bytes]:
    """Return the content of each file: config.json and index as mlx-lm writes them, the tokenizer
    as it is in ``source``. Raises ``UserError``."""
    index = {
        "metadata": {"total_size": shards.nbytes, "total_parameters": model.parameters},
        "weight_map": shards.weight_map,
    }
    return {
        **dict(_copies(source)),
        "README.md": model_card(repository),
        INDEX_FILE: json.dumps(index, indent=4).encode(),
        CONFIG_FILE: _config(model, source),
    }


def _copies(source: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(source.iterdir()):
        is_text = any(fnmatchcase(path.name, pattern) for pattern in _COPIED)
        if is_text and not any(fnmatchcase(path.name, pattern) for pattern in _NOT_COPIED):
            try:
                yield path.name, path.read_bytes()
            except OSError as error:
                raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def _config(model: LazyModel, source: Path) -> bytes:
    config = dict(model.config)
    # mlx-lm puts the ends of generation_config.json in place of config.json's.
    if len(ends := ends_of(source, read_config(source))) > 1:
        config["eos_token_id"] = ends
    with TemporaryDirectory() as directory:
        path = Path(directory) / CONFIG_FILE
        save_config(config, path, keep_vision_config=model.keeps_vision)
        return path.read_bytes()


def model_card(repository: str | None) -> bytes:
    """Return the README.md, which tells the hub the library, and the base of the model."""
    lines = ["---", "library_name: mlx", "pipeline_tag: text-generation", "tags:", "- mlx"]
    if repository is not None:
        lines.append(f"base_model: {repository}")
    return ("\n".join([*lines, "---"]) + "\n").encode()
