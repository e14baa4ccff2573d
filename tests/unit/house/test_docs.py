"""The pages point to files and headings that exist."""

import ast
import re
from pathlib import Path

import pytest

from tests.helpers.markdown import anchors, links

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILE = re.compile(
    r"(?<![\w./$~-])(?:\./)?((?:shardmlx|models|partitioners|scripts|hostfiles|tests|docs)/[\w./*<>-]+)"
)
"""A path from the root of the repository, in backticks, in a command or in plain words."""
PLACEHOLDER = re.compile(r"<\w+>|\bNAME\b")


def files(page: Path) -> set[str]:
    """Return the patterns of the repository's files that a page names."""
    found = FILE.findall(page.read_text(encoding="utf-8"))
    return {PLACEHOLDER.sub("*", name.rstrip("./")) for name in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    missing = {name for name in files(page) if not any(ROOT.glob(name))}
    assert missing == set()


STATIONS = re.findall(
    r"`(shardmlx/[\w/]+\.py)`: `([\w.]+)`",
    (ROOT / "docs/developers/architecture.md").read_text(encoding="utf-8"),
)
"""What the tours name: a file, and a class, a method or a constant in it."""


@pytest.mark.parametrize(("file", "name"), sorted(set(STATIONS)))
def test_a_station_of_the_tours_exists(file: str, name: str) -> None:
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = [node for node in body if part in names_of(node)]
        assert found, f"{file} has no {name}"
        body = getattr(found[0], "body", [])


def names_of(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def test_some_pages_name_files() -> None:
    assert "scripts/demo.sh" in files(ROOT / "README.md")
    assert "tests/unit/*/test_*.py" in files(ROOT / "docs/developers/contributing.md")
