"""Read data sets with the ``datasets`` package: sets of the Hugging Face hub, and mixtures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardmlx.errors import UserError, one_line

SETS = ("train", "valid", "test")

_SPLITS = {"train": "train[:80%]", "valid": "train[-10%:]", "test": None}
"""The splits of ``hf_dataset`` that are read by default, as in mlx-lm."""


def read_from_hub(data: str) -> dict[str, Any]:
    """Return the sets of the hub's data set in ``--data``, and the names of its splits as
    ``splits``. Raises ``UserError``."""
    try:
        from datasets import load_dataset

        found = load_dataset(data)
    except ImportError:
        raise UserError(
            f"--data {data}: there is no such directory",
            "name another, or, to read it from Hugging Face, pip install datasets",
        ) from None
    except Exception as error:
        raise UserError(
            f"--data {data}: there is no such directory, and Hugging Face does not give it: "
            f"{one_line(error)}",
            "name another",
        ) from None
    return {name: found[name] for name in SETS if name in found} | {"splits": sorted(found)}


def read_entry(entry: Mapping[str, Any], name: str) -> Any:
    """Return the set ``name`` of a data set of ``hf_dataset``. Raises ``UserError``."""
    path, how = entry["path"], entry.get("config") or {}
    key = f"{name}_split"
    split = entry.get(key, _SPLITS[name])
    try:
        from datasets import load_dataset

        found = load_dataset(path, split=split, **how)
    except ImportError:
        raise UserError(
            f"hf_dataset {path} needs the datasets package", "pip install datasets"
        ) from None
    except Exception as error:
        given = "" if split is None else f", {key} {split}"
        raise UserError(
            f"hf_dataset {path}{given}: {one_line(error)}",
            f"look at path, config and {key}",
        ) from None
    if split is None:
        raise UserError(
            f"hf_dataset {path} names no {key}, and has the splits {', '.join(sorted(found))}",
            f"name one as {key}",
        )
    return found
