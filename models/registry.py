"""The table of all model families. No MLX, no MPI.

Each file of ``models.families`` has a table ``FAMILIES``, with a row for each ``model_type``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import shardmlx.models.families
from shardmlx.errors import UserError
from shardmlx.models.family import Family


def _load() -> dict[str, Family]:
    table: dict[str, Family] = {}
    for module in pkgutil.iter_modules(shardmlx.models.families.__path__):
        found = importlib.import_module(f"{shardmlx.models.families.__name__}.{module.name}")
        table |= found.FAMILIES
    return dict(sorted(table.items()))


FAMILIES: Mapping[str, Family] = MappingProxyType(_load())
"""The family of each ``model_type`` that can be cut into stages."""


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json; ``UserError`` for an undeclared one, whose sizes only
    tensors tell."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(
            f"model_type {model_type!r} is not declared: its sizes are known with its tensors only",
            f"name a model with its weights, or of type {', '.join(FAMILIES)}",
        )
    return FAMILIES[model_type]
