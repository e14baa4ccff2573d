"""The pages point to files and headings that exist."""

import re
from pathlib import Path

import pytest

from tests.helpers.markdown import anchors, links

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
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


def test_some_pages_name_files() -> None:
    assert "scripts/demo.sh" in files(ROOT / "README.md")
    assert "tests/unit/*/test_*.py" in files(ROOT / "docs" / "contributing.md")
