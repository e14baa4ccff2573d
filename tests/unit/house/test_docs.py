"""The pages lead to what exists, are short, and show commands that can be typed."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from shardmlx.config.commands import BY_NAME
from shardmlx.errors import UserError
from tests.helpers.markdown import anchors, blocks, links
from tests.helpers.sources import ROOT, parsed

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
DOCS = ROOT / "docs"
INDEX = DOCS / "README.md"
FILE = re.compile(
    r"(?<![\w./$~-])(?:\./)?((?:shardmlx|models|partitioners|scripts|examples|hostfiles|tests|docs)/[\w./*<>-]+)"
)
"""A path from the root of the repository, in backticks, in a command or in plain words."""
PLACEHOLDER = re.compile(r"<\w+>|\bNAME\b")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def files(page: Path) -> set[str]:
    """Return the patterns of the repository's files that a page names."""
    found = FILE.findall(page.read_text(encoding="utf-8"))
    return {PLACEHOLDER.sub("*", name.rstrip("./")) for name in found}


def leads_nowhere(page: Path, link: str) -> bool:
    file, _, anchor = link.partition("#")
    target = (page.parent / file).resolve() if file else page
    has_anchors = target.suffix == ".md"
    return not target.exists() or bool(anchor and has_anchors and anchor not in anchors(target))


def test_links_lead_somewhere() -> None:
    found = [(name_of(page), link) for page in PAGES for link in links(page)]
    assert len(found) > 100
    assert [each for each in found if leads_nowhere(ROOT / each[0], each[1])] == []


def test_files_that_a_page_names_exist() -> None:
    named = {name: name_of(page) for page in PAGES for name in files(page)}
    assert len(named) > 100
    assert {name: page for name, page in named.items() if not any(ROOT.glob(name))} == {}


STATIONS = re.findall(
    r"`(shardmlx/[\w/]+\.py)`: `([\w.]+)`",
    (ROOT / "docs/developers/architecture.md").read_text(encoding="utf-8"),
)
"""What the tours name: a file, and a class, a method or a constant in it."""


def is_station(file: str, name: str) -> bool:
    body = parsed(ROOT / file).body
    for part in name.split("."):
        found = [node for node in body if part in names_of(node)]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


def test_the_stations_of_the_tours_exist() -> None:
    assert len(STATIONS) > 50
    assert [each for each in STATIONS if not is_station(*each)] == []


def names_of(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


# Prose that is read.


def sentences(page: Path) -> Iterator[str]:
    """Yield what stands between full stops, colons and semicolons, but in blocks and tables."""
    text = re.sub(r"^```.*?^```$|<[^>]*>", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:- |\d+\. |\||#))", text):
        if not re.match(r"\s*[|#]", part):
            words = " ".join(re.sub(r"^\s*(?:- |\d+\. )", "", part).split())
            yield from re.split(r"(?<=[.!?:;])[*_)\"]*\s+", words)


def test_sentences_are_short_name_their_subject_and_have_one_condition() -> None:
    every = [sentence for page in DOCS.rglob("*.md") for sentence in sentences(page)]
    assert len(every) > 1500
    assert [each for each in every if len(each.split()) > 30] == []
    assert [each for each in every if len(re.findall(r"\bif\b", each, re.IGNORECASE)) > 1] == []
    subjectless = re.compile(r"(As|By|Else|Nor|Of|Those|What|Whoever) .*[^?]$")
    assert [each for each in every if subjectless.match(each)] == []


def linked(page: Path) -> set[Path]:
    """Return the pages of docs to which a page links."""
    found = {(page.parent / link.partition("#")[0]).resolve() for link in links(page)}
    return {path for path in found if path.suffix == ".md" and DOCS in path.parents}


def test_the_index_reaches_every_page_in_two_clicks() -> None:
    first = linked(INDEX)
    second = {page for each in first for page in linked(each)}
    assert set(DOCS.rglob("*.md")) - {INDEX} <= first | second


# Commands.

NO_COMMAND = re.compile(r"^shardmlx (COMMAND|OPTIONS|\w+ ...$)|[.][.][.]")
"""A line with a placeholder for words that are left out."""


def shown_commands(page: Path) -> Iterator[str]:
    """Yield the commands of ours that a page shows in its blocks, each as one line."""
    for block in blocks(page):
        for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
            line = line.removeprefix("$ ").split("   #")[0].strip()
            if re.match(r"shardmlx [a-z-]", line) and not NO_COMMAND.search(line):
                yield re.sub(r"\s*(\|\|? .*|> .*)$", "", line)


def parse(argv: list[str]) -> None:
    """Raise `UserError` unless the words are a command of ours and options that it has."""
    name, *rest = argv
    if name == "launch":
        inner = next(i for i, word in enumerate(rest) if word in BY_NAME)
        parse(rest[inner:])
        rest = rest[:inner]
    BY_NAME[name].line.parser().parse_args(rest)


def test_the_commands_that_are_shown_can_be_typed() -> None:
    shown = sorted({line for page in PAGES for line in shown_commands(page)})
    assert len(shown) > 40
    refused = {}
    for line in shown:
        argv = shlex.split(line)[1:]
        try:
            if argv != ["--help"]:
                parse(argv)
        except UserError as error:
            refused[line] = str(error)
    assert refused == {}
