"""Read the rows of JSON lines, CSV or Parquet; errors name file and row. No MLX, no MPI.

A row becomes Python objects, which take five times its bytes, when it is asked for.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardmlx.errors import UserError, one_line, refusing

Row = Mapping[str, Any]

_AT_ONCE = 1000
"""Rows of a table that become Python objects together."""

_MOST_NAMES = 5
"""Limit of unread files that a message names."""


class RowSource(Protocol):
    """The rows of a set: those of a file, or a data set of Hugging Face's package."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Row]: ...
    def __getitem__(self, i: int, /) -> Row: ...


@dataclass(frozen=True, slots=True, eq=False)
class JSONRows:
    """Rows of the file ``place``, which stay JSON: ``content`` has one after the other, each up to
    one of its ``ends``. Raises ``UserError`` where a row is asked for that is none."""

    place: Path
    content: bytes
    ends: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Bytes of each row."""
        return np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[Row]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, i: int) -> Row:
        begin = int(self.ends[i - 1]) if i else 0
        return parse_row(self.content[begin : int(self.ends[i])], row_name(self.place, i))


@dataclass(frozen=True, slots=True, eq=False)
class TableRows:
    """Rows of a table of Arrow's, which came from the file ``place``."""

    place: Path
    table: Any

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __iter__(self) -> Iterator[Row]:
        for batch in self.table.to_batches(_AT_ONCE):
            yield from self._rows_of(batch)

    def __getitem__(self, i: int) -> Row:
        return self._rows_of(self.table.slice(i, 1))[0]

    def _rows_of(self, table: Any) -> list[Row]:
        with _refusing_parquet(self.place):
            return list(table.to_pylist(maps_as_pydicts="lossy"))


def _refusing_parquet(path: Path) -> AbstractContextManager[None]:
    return refusing(f"{path} is not Parquet", "write it again")


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


def parse_rows(path: Path, content: bytes) -> RowSource:
    """Return the rows of a data file with this content. Raises `UserError`, for JSON lines where a
    row is asked for."""
    return READERS[path.suffix](path, content)


def _read_json_lines(path: Path, content: bytes) -> RowSource:
    # In bytes, since text has line ends, such as U+2028, that JSON does not have.
    return _json_rows(path, content, map(len, io.BytesIO(content)))


def _json_rows(path: Path, content: bytes, sizes: Iterable[int]) -> JSONRows:
    return JSONRows(path, content, np.cumsum(np.fromiter(sizes, np.int64)))


def parse_row(line: bytes, where: str) -> Row:
    """Return the JSON object of a line. Raises ``UserError``, which calls it ``where``."""
    remedy = (
        "fix it: one object on each line; jq -c '.[]?' makes that of an array, jq -c . of objects"
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
    if not isinstance(row, dict):
        raise UserError(f"{where} is {text[:40]}, no object", remedy)
    return row


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode().removeprefix("\ufeff")  # the mark of Windows
    except UnicodeDecodeError as error:
        problem = f"{where} is not UTF-8 text: {error.reason} at byte {error.start}"
        raise UserError(problem, "save it as UTF-8") from None


def _read_csv(path: Path, content: bytes) -> RowSource:
    text = _decoded(content, str(path))
    csv.field_size_limit(sys.maxsize)  # a cell may be a whole document
    written = io.BytesIO()
    sizes: list[int] = []
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        _check_columns(path, reader.fieldnames or ())
        for row in reader:
            cells = _cells(row, row_name(path, len(sizes)))
            sizes.append(written.write(json.dumps(cells, ensure_ascii=False).encode()))
    except csv.Error as error:
        raise UserError(
            f"{row_name(path, len(sizes))} is not CSV: {one_line(error)}", "fix it"
        ) from None
    return _json_rows(path, written.getvalue(), sizes)


def _cells(row: Mapping[str, Any], where: str) -> dict[str, str | None]:
    """Return the cells of a row of CSV, null for an empty one. Raises ``UserError``."""
    if None in row or None in row.values():
        raise UserError(
            f"{where} has more cells, or fewer, than the first line names columns",
            "put cells with commas or line ends in double quotes",
        )
    cells = {key: value if value.strip() else None for key, value in row.items()}
    if not any(cells.values()):
        raise UserError(f"{where} has empty cells alone", "take the row out")
    return cells


def _check_columns(path: Path, names: Iterable[str]) -> None:
    for name, count in Counter(filter(None, names)).most_common(1):
        if count > 1:
            raise UserError(f"{path} has the column {name!r} twice", "rename one, or take it out")


def _read_parquet(path: Path, content: bytes) -> RowSource:
    try:
        from pyarrow import BufferReader, parquet
    except ImportError:
        raise UserError(
            f"{path} needs the pyarrow package", "pip install '.[data]' in the repository"
        ) from None
    with _refusing_parquet(path):
        _check_columns(path, parquet.read_schema(BufferReader(content)).names)
        return TableRows(path, parquet.read_table(BufferReader(content)))


READERS: Mapping[str, Callable[[Path, bytes], RowSource]] = {
    ".jsonl": _read_json_lines,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
