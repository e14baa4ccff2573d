"""The sources of the project, each read and parsed once by all tests of a session."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def parsed(path: Path) -> ast.Module:
    """Return what a Python file consists of; nobody may change it."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(path)))
