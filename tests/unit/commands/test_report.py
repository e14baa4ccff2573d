"""``shardmlx report``: what it writes, and what it refuses in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmlx.main import main
from tests.helpers.stories import STORY


def report(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str]:
    status = main(["report", *map(str, argv)])
    out, err = capsys.readouterr()
    return status, out + err


def test_a_page_beside_the_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = tmp_path / "run.jsonl"
    metrics.write_text(STORY.read_text() + '{"event": "tr')
    status, said = report(capsys, metrics)
    assert status == 0
    assert said == f"{tmp_path / 'run.html'}: 30 reports of training\n"
    assert (tmp_path / "run.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["nowhere.jsonl"], "cannot read metrics file nowhere.jsonl: No such file"),
        (["notes.txt"], "notes.txt has no metrics of a run in its 1 lines: name the file"),
        (["run.jsonl", "-o", "run.pdf"], "--output is run.pdf: give it the suffix .html"),
        (["run.html"], "output is the metrics file run.html: name another file"),
        (["run.jsonl", "-o", "no/where.html"], "cannot write --output no/where.html: No such"),
        (["run.jsonl", "-o", "run.png"], "--output is run.png: give it the suffix .html"),
        ([], "the following arguments are required: METRICS"),
    ],
)
def test_bad_input_is_one_line(
    argv: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.jsonl").write_bytes(STORY.read_bytes())
    Path("run.html").write_bytes(STORY.read_bytes())
    Path("notes.txt").write_text("hello\n")
    status, said = report(capsys, *argv)
    assert status == 2
    assert said.startswith(f"shardmlx: error: {line}")
    assert said.count("\n") == 1
