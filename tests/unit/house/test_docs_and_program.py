"""Tables of the docs name what the program has, and lines that they print are lines of its own."""

from __future__ import annotations

import ast
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import shardmlx
from shardmlx.common.cli import BAD_INPUT, INTERRUPTED, READER_GONE
from shardmlx.distributed.signals import STOPS
from shardmlx.hosts.supervisor import STOPPING
from shardmlx.planning.facts.hostfile import KEYS
from shardmlx.runreport.metrics_file import KNOWN
from tests.helpers.markdown import blocks
from tests.helpers.messages import TOPS, text_of
from tests.helpers.sources import ROOT, nodes

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
SOURCES = [path for top in TOPS for path in sorted((ROOT / top).rglob("*.py"))]
HEAD = re.compile(r"\|[\s:|-]+\|$")


def tables(page: Path) -> Iterator[list[str]]:
    """Yield the lines of each table, its head first."""
    rows: list[str] = []
    for line in [*page.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            rows.append(line)
        elif rows:
            yield rows
            rows = []


def first_cells(name: str, head: str) -> list[str]:
    """Return the first cells of the table of a page with this head, without backticks."""
    (rows,) = [each[2:] for each in tables(DOCS / name) if each[0].startswith(f"| {head} |")]
    return [row.split(" | ")[0].removeprefix("| ").replace("`", "") for row in rows]


def test_every_table_has_a_head() -> None:
    found = [(page.name, rows) for page in PAGES for rows in tables(page)]
    assert len(found) > 50
    assert [each for each in found if not HEAD.match(each[1][1])] == []


def test_the_version_is_one() -> None:
    version, files = shardmlx.__version__, ("pyproject.toml", "CITATION.cff", "docs/comparison.md")
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in files)
    for line in (f'version = "{version}"', f"version: {version}", f"| shardmlx {version} |"):
        assert line in text
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## (\S+) - \d{4}-\d\d-\d\d$", changes, re.MULTILINE)
    assert released[0] == version
    assert "\n## Unreleased\n" in changes


def test_the_keys_of_a_hostfile() -> None:
    assert first_cells("planning.md", "key") == list(KEYS)


def test_the_events_of_a_metrics_file() -> None:
    assert sorted(first_cells("metrics.md", "event")) == sorted(KNOWN)


def test_the_exit_codes() -> None:
    cells = first_cells("environment.md", "code")
    codes = {int(code) for cell in cells for code in re.findall(r"\d+", cell)}
    signals = {128 + number for number in {*STOPS, *STOPPING, signal.SIGUSR1, signal.SIGKILL}}
    on_a_mac = 128 + 30  # SIGUSR1 there
    assert codes - {128, 138, on_a_mac} == {
        *(0, 1, BAD_INPUT, INTERRUPTED, READER_GONE),
        *signals,
    } - {138}


VARIABLE = re.compile(
    r"(SHARDMLX|OMPI_MCA|OMPI_ALLOW|PRTE|OPENBLAS|MLX|HF|TOKENIZERS|TRANSFORMERS|XDG)_\w+"
)
BETWEEN_PROCESSES = {
    "MLX_RANK",
    "MLX_HOSTFILE",
    "MLX_IBV_DEVICES",
    "OMPI_SHARDMLX_LAUNCHED",
    "SHARDMLX_TERMINAL",
    "OMPI_MCA_btl_tcp_flags",
}
"""Variables that shardmlx sets for its own processes."""


def constants() -> Iterator[str]:
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_environment_variables() -> None:
    page = (DOCS / "environment.md").read_text(encoding="utf-8")
    used = {text for text in constants() if VARIABLE.fullmatch(text)} - BETWEEN_PROCESSES
    assert len(used) > 10
    assert {name for name in used if name not in page} == set()
    ours = set(re.findall(r"SHARDMLX_(?!VENV)\w+", page))
    assert ours - used == set()


SEPARATOR = re.compile(": |; |, | -> ")
HOLE = re.compile(r"\{[^{}]*(\{[^{}]*\}[^{}]*)*\}")


def said() -> re.Pattern[str]:
    """Return a pattern of the clauses that the program can say."""
    clauses = set()
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                clauses |= {*SEPARATOR.split(HOLE.sub("\0", text_of(node)))}
    of_words = [each for each in clauses if len(re.sub(r"[\0\W]", "", each)) > 5]
    return re.compile("|".join(".*".join(map(re.escape, each.split("\0"))) for each in of_words))


SAID = re.compile(r"(?:shardmlx: (?:error|failed)|^warning|^launch): ([^`\n]*)", re.MULTILINE)
"""What a line says that names where it comes from."""


def test_lines_that_are_printed_are_lines_of_the_program() -> None:
    """Clause by clause, where one has five words or more."""
    lines = [line for page in PAGES for line in SAID.findall(page.read_text(encoding="utf-8"))]
    assert len(lines) > 15
    clauses = {each.strip() for line in lines for each in SEPARATOR.split(line)}
    can_say = said()
    whole = [each for each in clauses if len(each.split()) > 4 and "..." not in each]
    assert [each for each in whole if not can_say.fullmatch(each)] == []


OWN = re.compile(r"\$ |step \d|training |rank |\s+\d|.*\s{2}")
"""Lines of the recording that are typed, or of numbers: of a step, a table, a bar."""


def test_lines_of_the_recording_are_lines_of_the_program() -> None:
    """Clause by clause, where one has four words or more and begins with none that is counted."""
    _, *events = map(json.loads, (DOCS / "pictures/first-run.cast").read_text().splitlines())
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", "".join(text for _, _, text in events))
    lines = {line.removeprefix("^C") for line in text.split("\n") if not OWN.match(line)}
    clauses = {
        each.strip().removeprefix("times from ")  # which takes a source
        for line in lines
        for each in SEPARATOR.split(line)
    }
    whole = [each for each in clauses if len(each.split()) > 3 and not each[0].isdigit()]
    assert len(whole) > 8
    can_say = said()
    assert [each for each in whole if not can_say.fullmatch(each)] == []


CODE = {"sh", "python", "yaml", "jsonl", "csv", "toml"}
GUIDES = {"guide.md", "tutorial.md", "mpirun-messages.md", "troubleshooting.md"}
"""What these show after a command, or quote of mpirun, tests/lab/test_guide.py compares."""


def test_what_a_page_shows_is_made_or_compared() -> None:
    """By scripts/docs.py, by the test that names its block, or by the one above."""
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    named = {pair for text in tests for pair in re.findall(r'"([\w-]+\.md)", "([\w-]+)"', text)}
    loose = set()
    for page in [ROOT / "README.md", *PAGES]:
        made = re.findall(r"<!-- made: .*?<!-- end -->", page.read_text(encoding="utf-8"), re.S)
        for block in blocks(page):
            kind, *names = block.info or [""]
            lines = re.sub(r"^(\$ .*|\.\.\.)\n", "", block.text, flags=re.M).splitlines()
            is_compared = any((page.name, name) in named for name in names)
            if not (
                kind in CODE
                or is_compared
                or page.name in GUIDES
                or all(SAID.match(line) for line in lines)
                or any(block.text in part for part in made)
            ):
                loose.add(block.where)
    assert loose == set()
