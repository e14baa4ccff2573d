"""A directory with the files of a model. Repositories are in ``hub``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shardmlx.errors import UserError, file_access
from shardmlx.modelfiles.safetensors_header import Header, read_header

CONFIG_FILE = "config.json"
PACKING_FILE = "hf_quant_config.json"
"""File in which NVIDIA's ModelOpt describes the packing of a model, if config.json does not."""
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE = "adapters.safetensors"
SUFFIX = ".safetensors"

RECORD = "complete-tensors.jsonl"
"""Name of the record, in a copy of a model, of the tensors that are there."""


class Directory:
    """A model in a directory, perhaps a snapshot in the hub's cache. ``missing`` is the remedy for
    an absent file. Methods raise ``UserError``."""

    revision: str | None = None
    note = ""
    missing = "copy it too"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        with file_access("read", path):
            names = sorted(entry.name for entry in path.iterdir() if entry.is_file())
        self.files: Sequence[str] = names
        self.paths: Mapping[str, Path] = {name: path / name for name in names}

    def where(self, file: str) -> str:
        """Return how a message names a file."""
        return str(self.path / file)

    def read(self, file: str) -> bytes:
        """Return the content of a file of the directory. Raises ``UserError``."""
        with file_access("read", self.where(file)):
            return (self.path / file).read_bytes()

    def headers(self, files: Sequence[str]) -> Iterator[Header | UserError]:
        """Yield the header of each file, or its fault."""
        for file in files:
            try:
                yield read_header(self.path / file)
            except UserError as error:
                yield error
