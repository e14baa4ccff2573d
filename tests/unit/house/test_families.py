"""Nothing of a family stands outside its file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from shardmlx.models.registry import FAMILIES

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted(
    path
    for folder in ("models", "partitioners", "shardmlx")
    for path in (ROOT / folder).rglob("*.py")
    if not {"families", "symlink"} & {*path.parts} and not path.parent.is_symlink()
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_code_asks_for_a_family_by_name(path: Path) -> None:
    constants = {
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert not constants & set(FAMILIES)


def test_the_docs_name_every_family() -> None:
    page = (ROOT / "docs" / "what-fits.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted({"model_type", *FAMILIES})
