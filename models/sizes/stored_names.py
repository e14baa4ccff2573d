"""The names that a model's files give its arrays, where mlx-lm's code gives them others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from shardmlx.errors import FAULTS
from shardmlx.models.sizes.shape import Names, Sides


@dataclass(frozen=True, slots=True)
class StoredNames:
    """The names that mlx-lm gives what it loads of a model's files.

    ``loaded`` are its names of the arrays, each with the stored name, empty where it changes the
    numbers. ``stored`` are the stored names of these, empty if the files have mlx-lm's own. ``own``
    are the names of the arrays in mlx-lm's model.
    """

    loaded: Mapping[str, str]
    stored: Mapping[str, str]
    own: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, stored: Mapping[str, Sides], embedding: str) -> StoredNames:
        """Return the names of a model whose files have arrays of these sides, if any are known.
        ``embedding`` is the path of the embedding in mlx-lm's model."""
        loaded = _loaded(model, stored)
        are_own = not stored or f"{embedding}.weight" in stored
        return cls(
            loaded,
            {} if are_own else _stored_names(loaded, embedding),
            frozenset(name for name, _ in tree_flatten(model.parameters())),
        )

    @property
    def unchanged(self) -> frozenset[str]:
        """The names of arrays that mlx-lm loads as they are."""
        return frozenset(name for name, origin in self.loaded.items() if name == origin)

    @property
    def refused(self) -> frozenset[str]:
        """The stored names of arrays that mlx-lm's model has no place for."""
        return frozenset(
            origin or name for name, origin in self.loaded.items() if name not in self.own
        )

    def path(self, path: str) -> str:
        """Return the stored form of a module's path; empty if its weight is not there."""
        name = f"{path}.weight"
        return self.stored.get(name, "" if self.stored else name).removesuffix(".weight")

    def sides(self, modules: Mapping[str, Sides]) -> tuple[tuple[str, Sides], ...]:
        """Return the sides of modules by the stored forms of their paths."""
        return tuple((self.path(path), sides) for path, sides in modules.items())

    def names(self, names: Names) -> Names:
        """Return the stored form of names."""
        if not self.stored:
            return names
        in_layer = next(name for name in self.stored if name.startswith(f"{names.layers}0."))
        layers = f"{self.stored[in_layer].partition('.0.')[0]}."
        return Names(layers, *(self.path(name) for name in names[1:]))


def _loaded(model: nn.Module, stored: Mapping[str, Sides]) -> dict[str, str]:
    """Return the names that mlx-lm's code gives arrays of such sides as it loads them, each with
    its stored name, empty where numbers are changed; none if it does not load them."""
    arrays = {name: mx.zeros(sides) for name, sides in stored.items()}
    before = {id(array): name for name, array in arrays.items()}
    try:
        loaded = model.sanitize(dict(arrays)) if hasattr(model, "sanitize") else arrays
    except FAULTS:
        return {}
    return {name: before.get(id(array), "") for name, array in loaded.items()}


def _stored_names(loaded: Mapping[str, str], embedding: str) -> dict[str, str]:
    """Return the stored names of what is ``loaded``, also of arrays whose numbers are changed;
    empty if the embedding is not among them."""
    names = {name: origin for name, origin in loaded.items() if origin}
    if (whole := f"{embedding}.weight") not in names:
        return {}
    body, stored_body = (each.rsplit(".", 2)[0] for each in (whole, names[whole]))
    # Where numbers are changed, as those of norms, the name is that of the embedding's module.
    changed = [name for name in loaded if name not in names and name.startswith(body)]
    return names | {name: f"{stored_body}{name.removeprefix(body)}" for name in changed}
