"""Read the rows of a data file: JSON lines, CSV or Parquet, with errors that name file and row.

No MLX, no MPI.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardmlx.errors import UserError, one_line

Row = Mapping[str, Any]


def find_data_file(directory: Path, name: str) -> Path:
    """Return the file of the set ``name``: NAME.jsonl, unless NAME.csv or NAME.parquet is there.

    Raises `UserError` if several are there.
    """
    found = [path for ending in READERS if (path := directory / f"{name}{ending}").exists()]
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise UserError(f"{directory} has {names}", "keep one of them")
    return found[0] if found else directory / f"{name}.jsonl"


_OTHER_NAMES = {"valid": ("valid", "val", "dev", "eval"), "train": ("train",), "test": ("test",)}
"""Prefixes of unread files that may be meant to be a set."""


def similar_files(directory: Path, name: str) -> list[str]:
    """Return the names of unread files that may be meant to be the set ``name``."""
    try:
        names = sorted(path.name for path in directory.iterdir())
    except OSError:
        return []
    return [
        each
        for each in names
        if each.lower().startswith(_OTHER_NAMES[name])
        and each not in {f"{name}{ending}" for ending in READERS}
    ]


def row_name(path: Path, i: int) -> str:
    """Return the name of row ``i``, from 0, in messages: by its line if each row has one."""
    return f"{path}:{i + 1}" if path.suffix == ".jsonl" else f"{path}, row {i + 1}"


def parse_rows(path: Path, content: bytes) -> list[Row]:
    """Return the rows of a data file with this content. Raises `UserError`."""
    for begin, what, remedy in _NO_DATA:
        if content.startswith(begin):
            raise UserError(f"{path} is {what}, not the data", remedy)
    return READERS[path.suffix](path, content)


def _read_json_lines(path: Path, content: bytes) -> list[Row]:
    # In bytes, since text has line ends, such as U+2028, that JSON does not have.
    lines = io.BytesIO(content.removeprefix(codecs.BOM_UTF8))
    rows = []
    for i, line in enumerate(lines):
        where = row_name(path, i)
        try:
            rows.append(_parse(line, where))
        except UserError:
            if _takes_lines(line + lines.read()):
                raise UserError(f"{where} begins JSON over several lines", _ONE_LINE) from None
            raise
    return rows


def _takes_lines(content: bytes) -> bool:
    """Return whether a value of JSON begins here and ends on another line."""
    try:
        text = content.decode().lstrip()
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return "\n" in text[:end]


def _parse(line: bytes, where: str) -> Row:
    text = _decoded(line, where)
    try:
        row = json.loads(text.rstrip("\r\n"))
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise UserError(
            f"{where} is not JSON: {what} at column {error.colno}", "mend the line, or take it out"
        ) from None
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or deeply nested brackets.
        raise UserError(
            f"{where} cannot be read: {one_line(error)}", "mend the line, or take it out"
        ) from None
    if not isinstance(row, Mapping):
        raise UserError(f"{where} is {_KINDS[type(row)]}, no object", _ONE_LINE)
    return row


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where} is not UTF-8 text: {error.reason} at byte {error.start}", "save it as UTF-8"
        ) from None


def _read_csv(path: Path, content: bytes) -> list[Row]:
    text = _decoded(content.removeprefix(codecs.BOM_UTF8), str(path))
    csv.field_size_limit(sys.maxsize)  # a cell may be a whole document
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[Row] = []
    try:
        columns = next(reader, [])
        for cells in filter(None, reader):  # an empty line is no row
            if len(cells) != len(columns):
                raise UserError(
                    f"{row_name(path, len(rows))} has {len(cells)} cells, and the first line names "
                    f"{len(columns)} columns",
                    "put cells with commas or line ends in double quotes",
                )
            rows.append(dict(zip(columns, cells, strict=True)))
    except csv.Error as error:
        raise UserError(
            f"{row_name(path, len(rows))} is not CSV: {one_line(error)}", "mend it"
        ) from None
    return rows


def _read_parquet(path: Path, content: bytes) -> list[Row]:
    try:
        from pyarrow import ArrowInvalid, BufferReader, parquet
    except ImportError:
        raise UserError(
            f"{path} needs the pyarrow package", "pip install '.[data]' in the repository"
        ) from None
    try:
        table = parquet.read_table(BufferReader(content))
        rows: list[Row] = table.to_pylist(maps_as_pydicts="lossy")
    except ArrowInvalid as error:
        raise UserError(f"{path} is not Parquet: {one_line(error)}", "write it again") from None
    return rows


_ONE_LINE = "write one object on each line; jq -c '.[]?' makes that of an array, jq -c . of objects"

_KINDS = {
    list: "a JSON array",
    str: "a JSON text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}

_NO_DATA = (
    (b"version https://git-lfs.github.com/", "a pointer of git-lfs", "git lfs pull"),
    (b"\x1f\x8b", "compressed by gzip", "gunzip it"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "unpack it by zstd -d"),
    (b"PK\x03\x04", "a zip archive", "unzip it"),
)
"""Prefixes of files that stand for data, or hold them in another form."""

READERS: Mapping[str, Callable[[Path, bytes], list[Row]]] = {
    ".jsonl": _read_json_lines,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
"""Readers of data files, by the ending of the name."""
