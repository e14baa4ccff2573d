"""A line that is edited while it is typed: keys come in, and what to draw goes out.

It knows no terminal: bytes and the width of the screen are all that it is given. The keys are those
of Emacs and of GNU readline.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Callable
from enum import Enum

_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[@-~]|\x1bO.|\x1b[^\[O]|[^\x1b]", re.DOTALL)
_BEGINNING = re.compile(r"\x1b(\[[0-9;?]*|O)?")

PASTE_ON, PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"
"""Sequences after which a terminal marks what is pasted, and no longer does."""

_PASTE_BEGINS, _PASTE_ENDS = "\x1b[200~", "\x1b[201~"

_KEYS = {
    "left": ("\x1b[D", "\x1bOD", "\x02"),
    "right": ("\x1b[C", "\x1bOC", "\x06"),
    "home": ("\x1b[H", "\x1bOH", "\x1b[1~", "\x1b[7~", "\x01"),
    "end": ("\x1b[F", "\x1bOF", "\x1b[4~", "\x1b[8~", "\x05"),
    "earlier": ("\x1b[A", "\x1bOA", "\x10"),
    "later": ("\x1b[B", "\x1bOB", "\x0e"),
    "word_left": ("\x1b[1;5D", "\x1b[1;3D", "\x1bb"),
    "word_right": ("\x1b[1;5C", "\x1b[1;3C", "\x1bf"),
    "erase": ("\x7f", "\x08"),
    "delete": ("\x1b[3~",),
    "erase_word": ("\x17", "\x1b\x7f"),
    "erase_before": ("\x15",),
    "erase_after": ("\x0b",),
}
_ACTIONS = {sequence: name for name, sequences in _KEYS.items() for sequence in sequences}


class Signal(Enum):
    """Keys that are for whoever reads the lines."""

    STOP = "\x03"  # Ctrl-C
    LEAVE = "\x04"  # Ctrl-D, on an empty line


class Keys:
    """The keys in a stream of bytes: characters, and the sequences of further keys."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def take(self, data: bytes) -> list[str]:
        """Return the keys that are complete with these bytes."""
        text, keys, at = self._rest + self._decoder.decode(data), [], 0
        while found := _SEQUENCE.match(text, at):
            keys.append(found[0])
            at = found.end()
        self._rest = text[at:]
        if not _BEGINNING.fullmatch(self._rest):
            self._rest = ""  # a sequence of no key
        return keys


class LineEditor:
    """Editor of one line after the other, which keeps those that were typed before.

    ``columns`` returns the width of the screen. ``draw`` returns what brings the screen up to date;
    the line begins with ``prompt``, drawn as ``styled``.
    """

    def __init__(self, prompt: str, styled: str, columns: Callable[[], int]) -> None:
        self._prompt = prompt
        self._styled = styled
        self._columns = columns
        self._history: list[str] = []
        self._begin()

    def _begin(self) -> None:
        self._text = ""
        self._at = 0
        self._row = 0
        self._pasting = False
        self._recalled = len(self._history)
        self._draft = ""

    def press(self, key: str) -> str | Signal | None:
        """Take a key; return the line if it ends one, or the signal that it is."""
        if key in (_PASTE_BEGINS, _PASTE_ENDS):
            self._pasting = key == _PASTE_BEGINS
        elif key in "\r\n" and not self._pasting:
            return self._entered()
        elif key == Signal.STOP.value:
            return Signal.STOP
        elif key == Signal.LEAVE.value:
            if not self._text:
                return Signal.LEAVE
            self._delete()
        elif (name := _ACTIONS.get(key)) is not None:
            getattr(self, f"_{name}")()
        else:
            self._insert(key)
        return None

    def clear(self) -> None:
        """Forget what has been typed of this line."""
        self._text, self._at = "", 0

    def draw(self) -> str:
        """Return what draws the line anew over what was drawn before."""
        columns = self._columns()
        whole = self._prompt + self._text
        here = _place(whole[: len(self._prompt) + self._at], columns)
        end = _place(whole, columns)
        up = f"\x1b[{self._row}A" if self._row else ""
        # A full last row leaves the cursor in it, until something follows.
        wraps = "\r\n" if end[1] == 0 and not whole.endswith("\n") else ""
        back = f"\x1b[{end[0] - here[0]}A" if end[0] > here[0] else ""
        right = f"\x1b[{here[1]}C" if here[1] else ""
        self._row = here[0]
        return f"{up}\r\x1b[J{self._styled}{self._text}{wraps}{back}\r{right}"

    def leave(self) -> str:
        """Return what draws the line for the last time, with the cursor after it."""
        self._at = len(self._text)
        drawn = self.draw()
        self._row = 0
        return drawn

    def _entered(self) -> str:
        text = self._text
        if text.strip() and self._history[-1:] != [text]:
            self._history.append(text)
        self._begin()
        return text

    def _insert(self, key: str) -> None:
        text = "\n" if key in "\r\n" else " " if key == "\t" else key
        if text == "\n" or text.isprintable():
            self._text = self._text[: self._at] + text + self._text[self._at :]
            self._at += len(text)

    def _left(self) -> None:
        self._at = max(0, self._at - 1)

    def _right(self) -> None:
        self._at = min(len(self._text), self._at + 1)

    def _home(self) -> None:
        self._at = 0

    def _end(self) -> None:
        self._at = len(self._text)

    def _word_left(self) -> None:
        before = self._text[: self._at].rstrip()
        self._at = max(map(before.rfind, " \n")) + 1

    def _word_right(self) -> None:
        word = re.compile(r"\s*\S*").match(self._text, self._at)
        self._at = word.end() if word else len(self._text)

    def _erase(self) -> None:
        self._cut(self._at - 1, self._at)

    def _delete(self) -> None:
        self._cut(self._at, self._at + 1)

    def _erase_word(self) -> None:
        end = self._at
        self._word_left()
        self._cut(self._at, end)

    def _erase_before(self) -> None:
        self._cut(0, self._at)

    def _erase_after(self) -> None:
        self._cut(self._at, len(self._text))

    def _cut(self, start: int, end: int) -> None:
        start = max(0, start)
        self._text = self._text[:start] + self._text[end:]
        self._at = start

    def _earlier(self) -> None:
        self._recall(self._recalled - 1)

    def _later(self) -> None:
        self._recall(self._recalled + 1)

    def _recall(self, number: int) -> None:
        if not 0 <= number <= len(self._history):
            return
        if self._recalled == len(self._history):
            self._draft = self._text
        self._recalled = number
        self._text = [*self._history, self._draft][number]
        self._at = len(self._text)


def _place(text: str, columns: int) -> tuple[int, int]:
    """Return row and column of the cursor after a text."""
    row = column = 0
    for character in text:
        if character == "\n":
            row, column = row + 1, 0
            continue
        width = _width(character)
        if column + width > columns:
            row, column = row + 1, 0
        column += width
    return (row + 1, 0) if column >= columns else (row, column)


def _width(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
