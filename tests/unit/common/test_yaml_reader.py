"""YAML that users write: whatever is wrong with it is said in one line, with its line number."""

import codecs
from pathlib import Path

import pytest

from shardmlx.common.yaml_reader import read_yaml
from shardmlx.errors import UserError

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
"""Ten lines that stand for a billion values."""


def refusal(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_yaml(path)
    return str(caught.value).removeprefix(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: !!bool maybe\n", ", line 2: 'maybe' is no bool: mend the YAML"),
        ("a: !!int ''\n", ", line 1: '' is no int: mend the YAML"),
        ("a: !!timestamp soon\n", ", line 1: 'soon' is no timestamp: mend the YAML"),
        ("a: 2024-02-30\n", ", line 1: '2024-02-30' is no timestamp: mend the YAML"),
        ("a: !!map x\n", ", line 1: expected a mapping node, but found scalar: mend the YAML"),
        ("a: &a [1, *a]\n", ", line 1: an alias in it stands for all of it: mend the YAML"),
        ("a: " + "[" * 5000, " is nested too deep: mend the YAML"),
        (
            BOMB,
            ", line 5: its aliases stand for more than 100000 values: mend the YAML",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path / "file", text) == message


@pytest.mark.parametrize("number", ["9" * 400, "0x" + "f" * 5000, "-" + "9" * 400])
def test_a_number_beyond_all_floats_is_named(tmp_path: Path, number: str) -> None:
    message = refusal(tmp_path / "file", f"a: {number}\n")
    assert message.startswith(", line 1: ")
    assert message.endswith(" is too large a number: mend the YAML")
    assert len(message) < 100


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
