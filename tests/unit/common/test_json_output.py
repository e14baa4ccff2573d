"""What ``--json`` writes: each value whole, to a file or alone to stdout."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import shardmlx
from shardmlx.common.json_output import STDOUT, JsonOutput, plain
from shardmlx.errors import UserError

SAID = {"version": 1, "command": "look", "shardmlx": shardmlx.__version__}


@dataclass(frozen=True)
class Rank:
    host: str
    limit: float


class Link(NamedTuple):
    first: str
    speed: float | None


def test_records_have_their_fields_and_numbers_all_their_digits() -> None:
    found = {
        "ranks": (Rank("a", 1 / 3), Rank("b", float("inf"))),
        "link": Link("a", None),
        "bytes": np.int64(2**53 + 1),
        "share": np.float32(0.5),
        "file": Path("a/b"),
        3: True,
    }
    assert json.loads(json.dumps(plain(found), allow_nan=False)) == {
        "ranks": [{"host": "a", "limit": 1 / 3}, {"host": "b", "limit": None}],
        "link": {"first": "a", "speed": None},
        "bytes": 9007199254740993,
        "share": 0.5,
        "file": "a/b",
        "3": True,
    }


def test_what_json_has_no_form_for_is_an_error_and_not_its_text() -> None:
    with pytest.raises(TypeError, match="set"):
        plain({"hosts": {"a", "b"}})


def test_stdout_has_the_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with JsonOutput(STDOUT, "look") as output:
        print("a table")
        output.write({"found": 1})
        print("a warning")
    assert sys.stdout is before
    captured = capsys.readouterr()
    assert json.loads(captured.out) == SAID | {"found": 1}
    assert captured.err == "a table\na warning\n"


def test_a_file_has_it_beside_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "found.json"
    with JsonOutput(str(target), "look") as output:
        print("a table")
        output.write({"found": 1})
    assert json.loads(target.read_text()) == SAID | {"found": 1}
    assert capsys.readouterr().out == f"a table\nWrote {target}\n"


def test_nothing_is_written_where_nobody_asks(capsys: pytest.CaptureFixture[str]) -> None:
    with JsonOutput(None, "look") as output:
        output.write({"found": 1})
    assert capsys.readouterr() == ("", "")


def test_a_file_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        JsonOutput(str(tmp_path), "look")
    assert caught.value.problem == f"cannot write --json {tmp_path}: Is a directory"


def test_a_file_that_the_command_writes_beside_it_is_refused(tmp_path: Path) -> None:
    """By whatever path: one of them would be lost."""
    same = tmp_path / "x" / ".." / "map.yaml"
    (tmp_path / "x").mkdir()
    with pytest.raises(UserError) as caught:
        JsonOutput(str(same), "look", {"-o": str(tmp_path / "map.yaml")})
    assert str(caught.value) == f"--json {same} is the file of -o, too: give each a file of its own"
    JsonOutput(str(same), "look", {"-o": str(tmp_path / "other"), "--output": None})


def test_an_error_leaves_the_file_as_it_was_and_gives_stdout_back(tmp_path: Path) -> None:
    target = tmp_path / "found.json"
    target.write_text("before")
    before = sys.stdout
    for name in (str(target), STDOUT):
        with pytest.raises(UserError), JsonOutput(name, "look"):
            raise UserError("no plan fits")
    assert target.read_text() == "before"
    assert sys.stdout is before
