"""Build mlx-lm's model of files, and compare their tensors with its own: no weight is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from shardmlx.compat import model_classes
from shardmlx.errors import FAULTS, one_line


def derived(base: type, kind: Any, **attributes: Any) -> Any:
    """Return mlx-lm's class ``kind`` of a model with the methods of ``base`` over its own."""
    return type(kind.__name__, (base, kind), {"__module__": kind.__module__, **attributes})


class _WithoutSpareHead:
    """A model that passes over an lm_head for which it has no module."""

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights as the family's code changes them, without such a head."""
        model: Any = self
        family: Any = super()
        if hasattr(family, "sanitize"):
            weights = family.sanitize(weights)
        if any("lm_head" in name for name, _ in model.named_modules()):
            return weights
        return {name: each for name, each in weights.items() if "lm_head." not in name}


def without_spare_head(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return mlx-lm's classes, but no lm_head of tied embeddings, which some families refuse."""
    kind, args = model_classes(config)
    text = config.get("text_config") or {}
    if config.get("tie_word_embeddings", text.get("tie_word_embeddings")) is False:
        return kind, args
    return derived(_WithoutSpareHead, kind), args


class _Compared:
    """A model that takes no weights, and notes how they differ from its own in ``faults``."""

    faults: list[tuple[str, str]]

    def load_weights(self, weights: list[tuple[str, mx.array]], strict: bool) -> None:
        """Compare names, shapes and types. All are noted, whether it is ``strict`` or not."""
        model: Any = self
        self.faults.extend(_differences(dict(tree_flatten(model.parameters())), dict(weights)))


def _compared(faults: list[tuple[str, str]], config: dict[str, Any]) -> tuple[Any, Any]:
    kind, args = without_spare_head(config)
    return derived(_Compared, kind, faults=faults), args


def faults_of_tensors(config: Mapping[str, Any], head: bytes, nbytes: int) -> list[tuple[str, str]]:
    """Return what mlx-lm would refuse of a file with this ``head``, and so many bytes after it:
    each tensor by the name under which it is loaded, with its fault."""
    faults: list[tuple[str, str]] = []
    with TemporaryDirectory() as directory:
        path = Path(directory)
        (path / "config.json").write_text(json.dumps(config))
        with (path / "model.safetensors").open("wb") as file:
            file.write(head)
            file.truncate(len(head) + nbytes)
        try:
            load_model(path, lazy=True, get_model_classes=partial(_compared, faults))
        except KeyError as error:  # mlx-lm cuts or joins this tensor as it loads
            faults.append((one_line(error), "is missing"))
        except FAULTS as error:
            faults.append(("", f"mlx-lm cannot load the model: {one_line(error)}"))
    return faults


def _differences(
    own: Mapping[str, mx.array], given: Mapping[str, mx.array]
) -> list[tuple[str, str]]:
    found = [(name, "is missing") for name in own if name not in given]
    for name, array in given.items():
        if name not in own:
            found.append((name, "is unexpected: the model has none"))
        elif array.shape != own[name].shape:
            sides = [list(each.shape) for each in (array, own[name])]
            found.append((name, f"has shape {sides[0]}, and by config.json {sides[1]}"))
        elif mx.issubdtype(array.dtype, mx.floating) != mx.issubdtype(own[name].dtype, mx.floating):
            types = [str(each.dtype).rpartition(".")[2] for each in (array, own[name])]
            found.append((name, f"is {types[0]}, and in mlx-lm's model {types[1]}"))
    return found
