"""YAML that users write: whatever is wrong with it is said in one line, with its line number."""

import codecs
from pathlib import Path

import pytest

from shardmlx.common.yaml_reader import read_yaml
from shardmlx.errors import UserError


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: !!bool maybe\n", ": maybe"),
        ("a: !!timestamp soon\n", ": "),
        ("a: 2024-02-30\n", ": day is out of range"),
        ("a: !!map x\n", "line 1: "),
        ("a: " + "[" * 5000, "recursion"),
        *((f"a: {sign}{'9' * 400}\n", "line 1: ") for sign in ("", "-")),
        (f"a: 0x{'f' * 5000}\n", "line 1: "),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_yaml(path)
    assert caught.value.problem.startswith(str(path))
    assert problem in caught.value.problem
    assert len(str(caught.value)) < len(str(path)) + 100


def test_aliases_that_stand_for_a_little_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a: &a [1, 2]\nb: [*a, *a]\nc:\n  <<: {d: 1e3}\n")
    assert read_yaml(tmp_path / "file") == {
        "a": [1, 2],
        "b": [[1, 2], [1, 2]],
        "c": {"d": 1000.0},
    }


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path: Path) -> None:
    """As Windows puts it at the beginning."""
    path = tmp_path / "config.yaml"
    for text in ("iters: 5\n", "# a comment\niters: 5\n", "---\niters: 5\n"):
        path.write_bytes(codecs.BOM_UTF8 + text.encode())
        assert read_yaml(path) == {"iters": 5}
