"""What pages print of the program is what the program prints now."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from shardmlx.config.commands import COMMANDS

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
ADVICE = "run python scripts/docs.py"


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))
    return importlib.import_module("docs")


def test_the_pages_of_options_are_up_to_date(docs: ModuleType) -> None:
    for name in docs.PAGES:
        written = (ROOT / "docs" / name).read_text()
        assert written == docs.page(name), ADVICE
    on_pages = [command for commands in docs.PAGES.values() for command in commands]
    assert sorted(on_pages) == sorted(command.name for command in COMMANDS)


def test_printed_outputs_are_those_of_the_commands(docs: ModuleType) -> None:
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    assert sum(len(docs.PART.findall(text)) for text in texts.values()) > 8
    differing = [name for name, text in texts.items() if docs.made(text, tables=False) != text]
    assert differing == [], ADVICE


@pytest.mark.parametrize(
    ("page", "table", "model"),
    [
        ("what-fits.md", "fits", "Llama-3.1-8B"),
        ("what-fits.md", "large", "gpt-oss-120b"),
        ("long-texts.md", "lengths", "Mistral-7B"),
        ("which-parallelism.md", "blog", "16 bits"),
        ("which-parallelism.md", "shares", None),
        ("training.md", "examples", None),
    ],
)
def test_rows_of_tables_are_those_of_the_planner(
    docs: ModuleType, page: str, table: str, model: str | None
) -> None:
    """One model of each long table, since all of them take minutes."""
    rows = docs.TABLES[table](model)
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert [row for row in rows.splitlines() if row not in text.splitlines()] == [], ADVICE


def test_every_example_is_planned(docs: ModuleType) -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.yaml")} == {*docs._fits.EXAMPLES}


def test_the_readme_promises_what_the_planner_found() -> None:
    text = (ROOT / "docs" / "what-fits.md").read_text(encoding="utf-8")
    peaks = re.findall(r"^ +\d  M.*?GiB +([\d.]+) GiB", text, re.MULTILINE)
    assert len(peaks) == 2
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [f"{float(peak):.1f} GiB" in readme for peak in peaks] == [True, True]
