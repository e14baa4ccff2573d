"""Nothing of a family stands outside its file."""

from __future__ import annotations

import ast
import importlib
import re

import pytest

from shardmlx.models.families import FAMILIES
from tests.helpers.sources import ROOT, nodes

MAKERS = {"families.py", "self_test.py"}
"""Files that make models of families: the table, and a test of devices."""

FILES = sorted(
    path
    for folder in ("models", "partitioners", "shardmlx")
    for path in (ROOT / folder).rglob("*.py")
    if path.name not in MAKERS and not path.parent.is_symlink()
)


def test_no_code_asks_for_a_family_by_name() -> None:
    found = [
        f"{path}:{node.lineno}: {node.value}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in FAMILIES
    ]
    assert len(FILES) > 100
    assert found == []


def test_the_docs_name_every_type_with_what_it_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each can do is compared for some: ``scripts/docs.py --check`` compares all."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    table = importlib.import_module("docs")
    page = (ROOT / "docs" / "what-fits.md").read_text()
    rows = re.findall(r"^\| (.+) \| (`.+`) \|$", page, re.MULTILINE)
    said = {name: what for what, names in rows for name in re.findall(r"`([^`]+)`", names)}
    assert table.KINDS.keys() <= said.keys()
    for name in [*table.KINDS][::9]:
        assert said[name] == table.abilities(name), "run python scripts/docs.py"
