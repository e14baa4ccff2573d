"""Nothing of a family stands outside its file."""

from __future__ import annotations

import ast
import re

from shardmlx.models.families import FAMILIES
from tests.helpers.family_configs import CONFIGS
from tests.helpers.sources import ROOT, nodes
from tests.helpers.undeclared_configs import RECURRENT

FILES = sorted(
    path
    for folder in ("models", "partitioners", "shardmlx")
    for path in (ROOT / folder).rglob("*.py")
    if not {"families", "symlink"} & {*path.parts} and not path.parent.is_symlink()
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


def test_the_docs_name_every_family() -> None:
    page = (ROOT / "docs" / "what-fits.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert set(named) == {"model_type", *CONFIGS, *RECURRENT}
