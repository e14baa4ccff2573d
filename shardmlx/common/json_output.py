"""The results of commands as JSON for programs, in one form for all. No MLX, no MPI."""

from __future__ import annotations

import json
import math
import numbers
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from operator import methodcaller
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import shardmlx
from shardmlx.common.reporter import check_writable
from shardmlx.errors import UserError, file_access

STDOUT = "-"
"""The name of a file that means stdout."""

VERSION = 1
"""The version of the form. It grows when a name goes, or changes its meaning; new names may come
without."""


def plain(value: Any) -> Any:
    """Return a value as JSON has it: of a record each field by its name, of a number all its
    digits, None for one that is not finite. Raises ``TypeError`` for what JSON has no form for."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else None
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if hasattr(value, "_asdict"):  # a named tuple
        return plain(methodcaller("_asdict")(value))
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"JSON has no form for {type(value).__name__}")


class JsonOutput:
    """The place that ``--json`` names: a file, ``-`` for stdout, or None. A context manager.

    While it is open, stdout is for the JSON alone if that goes there, and words go to stderr.
    """

    def __init__(
        self, target: str | None, command: str, beside: Mapping[str, str | None] | None = None
    ) -> None:
        """Raises ``UserError`` if the file cannot be written, whose content stays unchanged, or is
        one that the command writes ``beside`` it, by their options."""
        self._target = target
        self._command = command
        self._stdout: TextIO | None = None
        if target in (None, STDOUT):
            return
        path = Path(str(target))
        for flag, other in (beside or {}).items():
            if other is not None and path.resolve() == Path(other).resolve():
                problem = f"--json {target} is the file of {flag}, too"
                raise UserError(problem, "give each a file of its own")
        check_writable(path, "--json")

    def __enter__(self) -> Self:
        if self._target == STDOUT:
            self._stdout = sys.stdout
            sys.stdout = sys.stderr
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._stdout is not None:
            sys.stdout = self._stdout

    def write(self, content: Mapping[str, Any]) -> None:
        """Write what the command has found, if JSON is asked for. Raises ``UserError``."""
        if self._target is None:
            return
        said_by = {
            "version": VERSION,
            "command": self._command,
            "shardmlx": shardmlx.__version__,
        }
        text = json.dumps({**said_by, **plain(content)}, indent=1, allow_nan=False) + "\n"
        if self._target == STDOUT:
            print(text, end="", file=self._stdout, flush=True)
            return
        with file_access("write", f"--json {self._target}"):
            Path(self._target).write_text(text, encoding="utf-8")
        print(f"Wrote {self._target}", flush=True)
