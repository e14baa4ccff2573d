"""The commands that rank 0 gives to all ranks, as the code gives them, and ranks that fail at one.

A command is found where the code calls it, so that a new one is among them by itself. A rank fails
as it enters the very method: Python's own hook of calls sees to that, and nothing is replaced.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

from tests.helpers.sources import ROOT, nodes

GIVES = ("all", "begin", "begin_each", "others")
"""Methods of a ``Crew`` that give a command, their first argument."""

_GIVEN = re.compile(rf"\._*(?:{'|'.join(GIVES)})_*\(")
_CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
_SOURCES = sorted((ROOT / "shardmlx").rglob("*.py"))


@cache
def commands() -> dict[str, FunctionType]:
    """Return the method of each command by its name, like ``TrainWorker.load``."""
    texts = {path: path.read_text(encoding="utf-8") for path in _SOURCES}
    places = {name: path for path in texts for name in _CLASS.findall(texts[path])}
    giving = [path for path, text in texts.items() if _GIVEN.search(text)]
    found = {}
    for name in sorted({each for path in giving for each in _given_in(path)}):
        kind, method = name.split(".")
        module = places[kind].relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        found[name] = getattr(getattr(importlib.import_module(module), kind), method)
    return found


def _given_in(path: Path) -> Iterator[str]:
    """Yield the commands that a file gives: to a crew, or to a function that gives them to one."""
    for node in nodes(path):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        command = node.args[0]
        if not isinstance(command, ast.Attribute) or not isinstance(command.value, ast.Name):
            continue
        gives = isinstance(node.func, ast.Attribute) and node.func.attr.strip("_") in GIVES
        if gives and command.value.id[0].isupper():
            yield f"{command.value.id}.{command.attr}"


@contextmanager
def at_calls(seen: Callable[[CodeType], None]) -> Iterator[None]:
    """Tell ``seen`` the code of each function of this thread as it is entered, in the block. An
    error that it raises is the function's."""

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            seen(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(hook)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextmanager
def failing_at(code: CodeType, fail: Callable[[], None]) -> Iterator[None]:
    """Call ``fail`` once, as this thread enters a function with this code in the block."""

    def seen(entered: CodeType) -> None:
        if entered is code:
            sys.setprofile(None)
            fail()

    with at_calls(seen):
        yield
