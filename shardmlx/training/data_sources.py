"""Find the sets of a run's data: in a directory, or in data sets of Hugging Face's package. No MLX,
no MPI."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardmlx.config.data import FeatureKeys, WantedData
from shardmlx.errors import UserError, file_access, one_line
from shardmlx.training.data_files import RowSource, find_data_file, parse_rows, unread_files

_SPLITS = {"train": "train[:80%]", "valid": "train[-10%:]", "test": None}
"""The splits of ``hf_dataset`` that are read by default, as in mlx-lm."""


@dataclass(frozen=True, slots=True)
class RawSet:
    """A set of the data, or a part of it: rows with the text to learn under ``keys``. ``name`` is
    its file, or its place on the hub; each row comes ``weight`` times in training. ``others`` names
    other files if there are no rows."""

    name: str
    keys: FeatureKeys
    rows: RowSource = ()
    adds_nulls: bool = False
    weight: float = 1
    others: str = ""


def find_sets(wanted: WantedData) -> tuple[dict[str, list[RawSet]], list[str]]:
    """Find the sets that the run needs, mixtures in parts; return messages of missing ones too."""
    options = wanted.options
    directory = Path(options.data)
    given = options.hf_dataset
    sources: list[Callable[[str], RawSet]]
    if given is not None:
        entries = [given] if isinstance(given, Mapping) else given
        sources = [
            partial(_read_entry, each, f"hf_dataset {each['path']}", None) for each in entries
        ]
    elif not directory.exists():
        splits = {f"{name}_split": name for name in _SPLITS}
        entry = {"path": options.data, **splits, **asdict(options.features)}
        where = f"there is no directory {options.data}; as a Hugging Face data set it"
        sources = [partial(_read_entry, entry, where, "valid")]
    elif directory.is_dir():
        sources = [partial(_read_file, directory, options.features)]
    else:
        raise UserError(f"--data {directory} is a file", "name the directory with train.jsonl")
    sets = {}
    warnings = []
    for name in ["train", "valid"] * wanted.train + ["test"] * options.test:
        parts = [read(name) for read in sources]
        found = [part for part in parts if len(part.rows)]
        for part in parts:
            if not len(part.rows) and name != "valid":
                raise UserError(
                    f"{part.name} is missing or empty{part.others}",
                    f"--data {options.data} must hold it",
                )
        if found:
            # mlx-lm orders the rows of all parts together.
            sets[name] = sorted(found, key=lambda part: len(part.rows[0]))
        else:
            others = parts[0].others if parts else ""
            warnings.append(
                f"{options.data} has no validation set{others}: training without validation"
            )
    return sets, warnings


def _read_file(directory: Path, keys: FeatureKeys, name: str) -> RawSet:
    path = find_data_file(directory, name)
    if not path.exists():
        others = ", ".join(unread_files(directory))
        return RawSet(str(path), keys, others=f", and {others} is not read" if others else "")
    with file_access("read", path, "give a file that you may read"):
        content = path.read_bytes()
    return RawSet(str(path), keys, parse_rows(path, content), path.suffix == ".parquet")


def _read_entry(entry: Mapping[str, Any], where: str, optional: str | None, name: str) -> RawSet:
    """Read a set of one data set of Hugging Face's package; the ``optional`` one may be missing."""
    keys = FeatureKeys(**{each: key for each, key in entry.items() if each.endswith("_feature")})
    path = entry["path"]
    split = entry.get(f"{name}_split", _SPLITS[name])
    remedy = f"name another, or look at path, config and {name}_split of hf_dataset"
    try:
        from datasets import load_dataset

        if split is None:
            raise ValueError(f"{name}_split has no default")
        rows = load_dataset(path, split=split, **(entry.get("config") or {}))
    except ImportError:
        raise UserError(
            f"{where} needs the datasets package", "pip install datasets, or name a directory"
        ) from None
    except Exception as error:
        problem = f"{where} gives no {name} set by split {split}: {one_line(error)}"
        if name != optional:
            raise UserError(problem, remedy) from None
        return RawSet(where, keys, others=f" ({problem})")
    weight = float(entry.get("weight", 1))
    return RawSet(f"{path}, {name} set", keys, rows, adds_nulls=True, weight=weight)
