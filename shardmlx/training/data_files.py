"""Read the rows of JSON lines, CSV or Parquet; errors name file and row. No MLX, no MPI."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from shardmlx.errors import UserError, one_line, refusing

Row = Mapping[str, Any]

_MOST_NAMES = 5
"""Limit of unread files that a message names."""


def find_data_file(directory: Path, name: str) -> Path:
    """Return the file of a set: NAME.jsonl, unless NAME.csv or NAME.parquet is there alone."""
    found = [path for ending in READERS if (path := directory / f"{name}{ending}").exists()]
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise UserError(f"{directory} has {names}", "keep one of them")
    return found[0] if found else directory / f"{name}.jsonl"


def unread_files(directory: Path) -> list[str]:
    """Return the names of some files that are not read: one of them may be meant to be a set."""
    read = {f"{name}{ending}" for name in ("train", "valid", "test") for ending in READERS}
    return sorted({path.name for path in directory.glob("*")} - read)[:_MOST_NAMES]


def row_name(place: Path | str, i: int) -> str:
    """Return the name of row ``i``, from 0, in messages: by its line if each row has one."""
    return f"{place}:{i + 1}" if str(place).endswith(".jsonl") else f"{place}, row {i + 1}"


def parse_rows(path: Path, content: bytes) -> list[Row]:
    """Return the rows of a data file with this content. Raises `UserError`."""
    return READERS[path.suffix](path, content)


def _read_json_lines(path: Path, content: bytes) -> list[Row]:
    # In bytes, since text has line ends, such as U+2028, that JSON does not have.
    return [parse_row(line, row_name(path, i)) for i, line in enumerate(io.BytesIO(content))]


def parse_row(line: bytes, where: str) -> Row:
    """Return the JSON object of a line. Raises ``UserError``, which calls it ``where``."""
    remedy = (
        "mend it: one object on each line; jq -c '.[]?' makes that of an array, jq -c . of objects"
    )
    text = _decoded(line, where).rstrip("\r\n")
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where} is not JSON: {error.msg} (column {error.colno})", remedy
        ) from None
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or deeply nested brackets.
        raise UserError(f"{where} cannot be read: {one_line(error)}", remedy) from None
    if not isinstance(row, Mapping):
        raise UserError(f"{where} is {text[:40]}, no object", remedy)
    return row


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"{where} is not UTF-8 text: {error.reason} at byte {error.start}"
        raise UserError(problem, "save it as UTF-8") from None


def _read_csv(path: Path, content: bytes) -> list[Row]:
    text = _decoded(content, str(path))
    csv.field_size_limit(sys.maxsize)  # a cell may be a whole document
    rows: list[Row] = []
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        _check_columns(path, reader.fieldnames or ())
        for row in reader:
            if None in row or None in row.values():
                raise UserError(
                    f"{row_name(path, len(rows))} has more cells, or fewer, than the first line "
                    "names columns",
                    "put cells with commas or line ends in double quotes",
                )
            cells = {key: value if value.strip() else None for key, value in row.items()}
            if not any(cells.values()):
                raise UserError(
                    f"{row_name(path, len(rows))} has empty cells alone", "take the row out"
                )
            rows.append(cells)
    except csv.Error as error:
        raise UserError(
            f"{row_name(path, len(rows))} is not CSV: {one_line(error)}", "mend it"
        ) from None
    return rows


def _check_columns(path: Path, names: Iterable[str]) -> None:
    for name, count in Counter(filter(None, names)).most_common(1):
        if count > 1:
            raise UserError(f"{path} has the column {name!r} twice", "rename one, or take it out")


def _read_parquet(path: Path, content: bytes) -> list[Row]:
    try:
        from pyarrow import BufferReader, parquet
    except ImportError:
        raise UserError(
            f"{path} needs the pyarrow package", "pip install '.[data]' in the repository"
        ) from None
    with refusing(f"{path} is not Parquet", "write it again"):
        _check_columns(path, parquet.read_schema(BufferReader(content)).names)
        table = parquet.read_table(BufferReader(content))
        return list(table.to_pylist(maps_as_pydicts="lossy"))


READERS: Mapping[str, Callable[[Path, bytes], list[Row]]] = {
    ".jsonl": _read_json_lines,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
