"""Families of models, by ``model_type``: the rows of the ``FAMILIES`` in the files here."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

from shardmlx.models.family import Family


def _load() -> dict[str, Family]:
    table: dict[str, Family] = {}
    for module in pkgutil.iter_modules(__path__):
        table |= importlib.import_module(f"{__name__}.{module.name}").FAMILIES
    return dict(sorted(table.items()))


FAMILIES: Mapping[str, Family] = MappingProxyType(_load())
"""The family of each ``model_type`` that a row declares."""
