"""Editing a line: what keys make of it, and what a screen then shows."""

from __future__ import annotations

import re

import pytest

from shardmlx.inference.line_editor import Keys, LineEditor, Signal

PROMPT = ">> "


class Screen:
    """As much of a terminal as the editor needs: rows of characters, and a cursor."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.rows = [""]
        self.row = self.column = 0

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[\d*[A-Z]|.", text, re.DOTALL):
            if part == "\r":
                self.column = 0
            elif part == "\n":
                self._down()
                self.column = 0
            elif part.startswith("\x1b"):
                self._obey(part[-1], int(part[2:-1] or 0))
            else:
                self._put(part)

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append("")

    def _put(self, character: str) -> None:
        width = 2 if ord(character) > 0x3000 else 1
        if self.column + width > self.columns:
            self._down()
            self.column = 0
        row = self.rows[self.row].ljust(self.column)
        cells = character if width == 1 else character + "\0"
        self.rows[self.row] = row[: self.column] + cells + row[self.column + width :]
        self.column += width

    def _obey(self, command: str, number: int) -> None:
        if command == "A":
            self.row -= number
        elif command == "C":
            self.column += number
        else:
            assert command == "J"
            self.rows[self.row] = self.rows[self.row][: self.column]
            del self.rows[self.row + 1 :]
        assert self.row >= 0
        assert 0 <= self.column < self.columns

    @property
    def shown(self) -> list[str]:
        return [row.replace("\0", "").rstrip() for row in self.rows]


class Typist:
    def __init__(self, columns: int = 80) -> None:
        self.screen = Screen(columns)
        self.editor = LineEditor(PROMPT, PROMPT, lambda: columns)
        self.keys = Keys()
        self.screen.write(self.editor.draw())

    def type(self, text: str) -> str | Signal | None:
        """What the last key ended."""
        happened = None
        for key in self.keys.take(text.encode()):
            drawn = self.editor.leave() + "\n" if key == "\r" else ""
            happened = self.editor.press(key)
            self.screen.write(drawn if isinstance(happened, str) else self.editor.draw())
        return happened


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("Ahoy!", "Ahoy!"),
        ("Ahoi\x7fy\x1b[D\x1b[D\x1b[DX", "AXhoy"),
        ("bcd\x01a\x05e", "abcde"),
        ("abc\x1b[H\x1b[3~\x1b[F!", "bc!"),
        ("one two three\x17\x17four", "one four"),
        ("one two\x1bb\x0bsix", "one six"),
        ("one two\x1bb\x15", "two"),
        ("one two\x01\x1bf!", "one! two"),
        ("ab\x02\x04c", "ac"),  # Ctrl-D within a line deletes
        ("\x7f\x1b[D\x1b[Ca", "a"),
        ("a\tb\x1b[5~\x1b[24~c", "a bc"),  # keys without a meaning
        ("Grüße, 世界\x7f!", "Grüße, 世!"),
        ("\x1b[200~two\nlines\x1b[201~!", "two\nlines!"),
    ],
)
def test_keys(typed: str, line: str) -> None:
    assert Typist().type(typed + "\r") == line


def test_earlier_lines_come_back_and_the_begun_one_is_kept() -> None:
    typist = Typist()
    for line in ("first", "second", "second", "  "):
        typist.type(line + "\r")
    assert typist.type("dr\x1b[A\x1b[A\x1b[A\r") == "first"
    assert typist.type("dr\x1b[A\x1b[A\x1b[B\x1b[B\x1b[Baft\r") == "draft"


def test_signals() -> None:
    typist = Typist()
    assert typist.type("ab\x03") is Signal.STOP
    typist.editor.clear()
    assert typist.type("\x04") is Signal.LEAVE


def test_keys_that_come_in_parts_and_bytes_that_are_none() -> None:
    keys = Keys()
    assert keys.take(b"a\xc3") == ["a"]
    assert keys.take(b"\xbc\x1b") == ["ü"]
    assert keys.take(b"[") == []
    assert keys.take(b"1;") == []
    assert keys.take(b"5Cb") == ["\x1b[1;5C", "b"]
    assert keys.take(b"\xff") == ["\N{REPLACEMENT CHARACTER}"]
    assert keys.take(b"\x1b[\x01x") == []
    assert keys.take(b"y") == ["y"]


def test_a_long_line_wraps_and_is_edited_where_it_stands() -> None:
    typist = Typist(columns=10)
    typist.type("0123456789ABCDEF")
    assert typist.screen.shown == [">> 0123456", "789ABCDEF"]
    typist.type("G")
    assert typist.screen.shown == [">> 0123456", "789ABCDEFG", ""]
    typist.type("\x01x")
    assert typist.screen.shown == [">> x012345", "6789ABCDEF", "G"]
    assert (typist.screen.row, typist.screen.column) == (0, 4)
    typist.type(9 * "\x1b[3~" + "\x05")
    assert typist.screen.shown == [">> x9ABCDE", "FG"]
    assert (typist.screen.row, typist.screen.column) == (1, 2)
    typist.type("\x01\r")
    assert typist.screen.shown == [">> x9ABCDE", "FG", ""]
    assert (typist.screen.row, typist.screen.column) == (2, 0)


def test_wide_characters_and_several_lines_take_their_room() -> None:
    typist = Typist(columns=8)
    typist.type("世界世界")
    assert typist.screen.shown == [">> 世界", "世界"]
    assert (typist.screen.row, typist.screen.column) == (1, 4)
    typist = Typist(columns=8)
    typist.type("\x1b[200~a\nb\x1b[201~\x1b[D\x1b[D!")
    assert typist.screen.shown == [">> a!", "b"]
    assert (typist.screen.row, typist.screen.column) == (0, 5)
