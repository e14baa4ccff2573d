"""Families of models, by ``model_type``: the rows of the ``FAMILIES`` in the files here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shardmlx.models.families import dense, mixtures
from shardmlx.models.family import Family

FAMILIES: Mapping[str, Family] = MappingProxyType(
    dict(sorted((dense.FAMILIES | mixtures.FAMILIES).items()))
)
"""The family of each ``model_type`` that a row declares."""

ANOTHER = "use a model of a type in docs/what-fits.md"
"""The remedy for a model that cannot run."""
