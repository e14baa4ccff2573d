"""The commands that rank 0 gives to all ranks, as the code gives them, and ranks that fail at one.

A command is found where the code calls it, so that a new one is among them by itself. A rank fails
as it enters the very method: Python's own hook of calls sees to that, and nothing is replaced.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType, FunctionType
from typing import Any

from tests.helpers.sources import ROOT

GIVES = ("all", "begin", "begin_each", "others")
"""Methods of a ``Crew`` that give a command, their first argument."""

_GIVEN = re.compile(rf"\._*(?:{'|'.join(GIVES)})_*\(\s*([A-Z]\w*\.\w+)\b")
"""Given to a crew, or to a function that gives it to one."""

_CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
_SOURCES = sorted((ROOT / "shardmlx").rglob("*.py"))


@cache
def commands() -> dict[str, FunctionType]:
    """Return the method of each command by its name, like ``TrainWorker.load``."""
    texts = {path: path.read_text(encoding="utf-8") for path in _SOURCES}
    places = {name: path for path in texts for name in _CLASS.findall(texts[path])}
    found = {}
    for name in sorted({name for text in texts.values() for name in _GIVEN.findall(text)}):
        kind, method = name.split(".")
        if kind not in places:  # an example in a docstring
            continue
        module = places[kind].relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        found[name] = getattr(getattr(importlib.import_module(module), kind), method)
    return found


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
