"""What the pages say of other projects has a version and a day, and is found once it is old.

pypi/NAME.json is what PyPI answered on 2026-11-28, without the fields that nobody reads.
"""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.sources import ROOT

RECORDED = Path(__file__).parent / "pypi"
PAGE = (ROOT / "docs/comparison.md").read_text(encoding="utf-8")


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("claims")


class Recorded(BaseHTTPRequestHandler):
    """Answers NAME/json as PyPI did, and 404 where nothing is recorded."""

    def do_GET(self) -> None:
        path = RECORDED / f"{self.path.split('/')[-2]}.json"
        self.send_response(200 if path.exists() else 404)
        self.end_headers()
        if path.exists():
            self.wfile.write(path.read_bytes())

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def index() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Recorded) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/pypi"
        server.shutdown()
        thread.join()


def page_with(tmp_path: Path, *rows: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text(
        "\n".join(["| project | version | looked at | where |", "|---|---|---|---|", *rows])
    )
    return page


def test_a_newer_release_is_named_with_its_day(claims: ModuleType, index: str) -> None:
    release = claims.newest("mccl", index)
    assert (release.version, release.day) == ("6.8.0", "2026-10-13")


def test_what_is_old_is_listed_with_the_pages_that_name_it(
    claims: ModuleType, index: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = page_with(
        tmp_path, "| mccl | 6.7.0 | 2026-09-01 | x |", "| flwr | 1.42.0 | 2026-11-28 | x |"
    )
    assert claims.main(["--index", index, "--page", str(page)]) == 1
    old, total = capsys.readouterr().out.splitlines()
    assert old.startswith("mccl: 6.8.0 of 2026-10-13; looked at was 6.7.0 on 2026-09-01: ")
    assert "docs/comparison.md" in old
    assert total.startswith("2 projects, 1 with a newer release, 0 ")


def test_a_project_without_an_answer_is_named_and_the_others_are_asked(
    claims: ModuleType, index: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert claims.main(["--index", index]) == 2
    lines = capsys.readouterr().out.splitlines()
    unanswered = {line.split(":")[0] for line in lines[:-1] if "404" in line}
    assert unanswered == {each.project for each in claims.looked_at(claims.PAGE)} - {"mccl", "flwr"}


def test_versions_in_the_text_are_those_of_the_table(claims: ModuleType) -> None:
    of = {each.project: each.version for each in claims.looked_at(claims.PAGE)}
    assert len(of) > 10
    text = PAGE.partition("## What was looked at")[0]
    named = re.findall(r"\[([\w-]+)\]\([^)]*\)\s+(\d[\d.]*\d)|\b(DeepSpeed) (\d[\d.]*\d)", text)
    versions = {(name or other).lower(): first or second for name, first, other, second in named}
    assert set(versions) >= {"mccl", "unsloth", "macfleet", "grove-ml", "deepspeed", "mlx-tune"}
    in_table = {name: version for name, version in versions.items() if name in of}
    assert in_table == {name: of[name] for name in in_table}
    assert set(versions) - set(of) == {"exo", "spindle"}  # not on PyPI


def test_every_project_on_the_page_has_a_row_or_a_day(claims: ModuleType) -> None:
    linked = re.findall(r"(?:github\.com/[\w-]+|pypi\.org/project)/([\w-]+)", PAGE)
    table = PAGE.partition("## What was looked at")[2].lower()
    same = {"unsloth-zoo": "unsloth", "pytorch": "tccl"}
    unseen = {name for name in linked if same.get(name, name).lower() not in table}
    assert unseen == set()


def test_the_number_of_types_that_train_is_that_of_the_table_of_types() -> None:
    rows = re.findall(
        r"^\| (trains .*?) \| (.*) \|$", (ROOT / "docs/what-fits.md").read_text(), re.MULTILINE
    )
    types = [name for _, names in rows for name in names.split(", ")]
    assert len(types) == len(set(types))
    assert re.findall(r"^\| model types \| (\d+) train \|", PAGE, re.MULTILINE) == [str(len(types))]
