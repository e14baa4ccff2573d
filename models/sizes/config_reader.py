"""Read the fields of a config.json, and refuse impossible values. No MLX, no MPI."""

from __future__ import annotations

import codecs
import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from shardmlx.errors import UserError, file_access, refusing
from shardmlx.models.sizes.rope_parameters import with_rope

MOST_LAYERS = 10_000
"""Limit of ``num_hidden_layers``: a typing error beyond it would fill the memory with layers."""

AGAIN = "download the model's config.json again"
"""The remedy for a config.json that contradicts itself."""

_MOST_OF_ANYTHING = 2**31 - 1
_OWN_LAYOUT = "params.json"
"""File that Mistral publishes with consolidated*.safetensors, beside the others or alone."""

Fact = bool | str
"""True or false, or the field that says so; a missing field means false."""


class Config(NamedTuple):
    """The fields of a config.json. Methods raise ``UserError`` for an impossible value."""

    fields: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field as it is; ``default`` if it is missing or null."""
        value = self.fields.get(key)
        return default if value is None else value

    def refuse(self, key: str, remedy: str) -> NoReturn:
        """Raise ``UserError`` for the value of a field."""
        found = f"is {self.fields[key]!r}" if key in self.fields else "is missing"
        raise UserError(f"config.json: {key} {found}", remedy)

    def count(self, key: str, default: int | None = None, most: int = _MOST_OF_ANYTHING) -> int:
        """Return a whole number above 0; without a ``default`` the field must be there."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(key, "it must be a whole number above 0")
        most = MOST_LAYERS if key == "num_hidden_layers" else most
        if value > most:
            self.refuse(key, f"give at most {most}")
        return value

    def switch(self, key: str, default: bool | None = None) -> bool:
        """Return true or false; without a ``default`` the field must be there."""
        value = self.fields.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "it must be true or false")
        return value

    def holds(self, fact: Fact) -> bool:
        """Return whether a fact is true here."""
        return fact if isinstance(fact, bool) else self.switch(fact, False)

    def each_layer(self, key: str) -> list[Any] | None:
        """Return a list with an entry for each layer; None if it is missing or null."""
        value = self.get(key)
        count = self.count("num_hidden_layers")
        if value is not None and (not isinstance(value, list) or len(value) != count):
            found = f"{len(value)} entries" if isinstance(value, list) else repr(value)
            raise UserError(f"config.json: {key} has {found}", f"list one for each of {count}")
        return value

    def share(self, total: str, parts: str) -> int:
        """Return one field divided by another one."""
        whole = self.count(total)
        number = self.count(parts)
        if whole % number:
            raise UserError(
                f"config.json: {total} {whole} is not divisible by {parts} {number}", AGAIN
            )
        return whole // number


def read_config(model_dir: str | Path) -> dict[str, Any]:
    """Return the config.json of a model directory; ``UserError`` when it is missing or broken."""
    directory = Path(model_dir)
    path = directory / "config.json"
    if not directory.is_dir():
        raise UserError(f"model directory {directory} does not exist", "check --model")
    with file_access("read", path, "copy it again, or chmod it"):
        if path.exists():
            return parse_config(path.read_bytes(), path)
        check_layout(directory, {each.name for each in directory.iterdir()})
    raise UserError(
        f"model directory {directory} has no config.json",
        "name a directory in the Hugging Face layout",
    )


def check_layout(where: str | Path, files: Container[str]) -> None:
    """Refuse a model whose files have only its maker's own layout."""
    if _OWN_LAYOUT in files and "config.json" not in files:
        raise UserError(
            f"{where} has no config.json: its {_OWN_LAYOUT} is of Mistral's (or Meta's) own layout",
            "use the same model in the Hugging Face layout, which has config.json and "
            "model*.safetensors",
        )


def check_pointer(text: bytes, where: str | Path) -> None:
    """Refuse the pointer that git leaves in place of a large file that was not fetched."""
    if text.startswith(b"version https://git-lfs"):
        raise UserError(f"{where} is a git-lfs pointer, not the file", "run git lfs pull")


def parse_config(text: bytes, where: str | Path) -> dict[str, Any]:
    """Return a config.json with mlx-lm's fields of ropes; ``UserError`` when it is broken."""
    check_pointer(text, where)
    if text.startswith(codecs.BOM_UTF8):
        raise UserError(f"{where} begins with a byte order mark", "save it as UTF-8 without one")
    with refusing(f"{where} is not valid JSON", "copy it again"):
        config = json.loads(text)
    if not isinstance(config, dict):
        raise UserError(f"{where} holds no JSON object", "copy it again")
    return with_rope(config)
