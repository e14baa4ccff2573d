"""Marks around the words of messages: they show what a chat template writes, and where. No MPI.

A template is a program. Its text alone does not tell from which message words came, since the same
words may stand in two of them. So the words are marked, and the template writes them once more: if
only the marks are new, they show each word's place in the text without them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardmlx.common.yaml_reader import is_number

Message = Mapping[str, Any]

_REFERENCES = ("role", "type", "id", "tool_call_id")
"""Keys whose values control how a message is written, or refer to another one."""

_TOOL_ROLES = ("tool", "function")
"""Roles of messages whose name refers to a call."""

_TAG = re.compile(r"<[^<>]*>|\[/?[A-Z_]+\]|◁[^◁▷]*▷")
"""Pattern of marks that a template may look for in a text, such as that of a thought, which stay
whole."""

_JSON_WORDS = re.compile(r'(?<=")\w(?:.*\w(?="))?', re.DOTALL)
"""Pattern of the words in JSON, from the first letter of the first text to the last one's last."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to mark words: those of all messages, or of some ``roles``. If it ``marks_empty``, the
    content of a message without words has marks too."""

    marks_empty: bool
    roles: Sequence[str] | None = None

    def marks(self, message: Message) -> bool:
        """Return whether the words of a message have marks."""
        return self.roles is None or message["role"] in self.roles


@dataclass(frozen=True, slots=True)
class Words:
    """Words of a message that stand together, and the key of the message that holds them. Where a
    message has no words, they are empty."""

    message: int
    key: str
    is_empty: bool = False


@dataclass(frozen=True, slots=True)
class MarkedWords:
    """Words in a text, from character ``begin`` to ``end``; ``number`` is that of their marks.

    If a template cuts words, their island is the one place at which they begin, or end.
    """

    begin: int
    end: int
    number: int
    message: int


@dataclass(frozen=True, slots=True)
class Marked:
    """A conversation with marks around all ``words``, which have the numbers of these marks."""

    messages: Sequence[Message]
    words: Sequence[Words]
    nonce: str

    def read(self, text: str) -> tuple[str, list[MarkedWords]]:
        """Return what a template wrote, without the marks, and the islands by their place.

        Some templates name a call in its result once more. Such an echo belongs to nobody, so of a
        mark that comes twice only the first place counts.
        """
        pieces: list[str] = []
        places: dict[tuple[int, str], int] = {}
        length = 0
        end = 0
        for found in re.finditer(rf"{self.nonce}(\d+)([be])", text):
            pieces.append(text[end : found.start()])
            length += found.start() - end
            end = found.end()
            places.setdefault((int(found[1]), found[2]), length)
        pieces.append(text[end:])
        islands = []
        for number in {number for number, _ in places}:
            begin = places.get((number, "b"))
            end_of_words = places.get((number, "e"))
            ends = [each for each in (begin, end_of_words) if each is not None]
            islands.append(MarkedWords(ends[0], ends[-1], number, self.words[number].message))
        return "".join(pieces), sorted(islands, key=lambda each: (each.begin, each.end))


def mark_words(messages: Sequence[Message], nonce: str, way: Way) -> Marked:
    """Return a conversation with marks around words. The ``nonce`` is a word that its text does not
    contain."""
    marker = _Marker(nonce)
    marked = [
        marker.mark(number, message, way.marks_empty) if way.marks(message) else message
        for number, message in enumerate(messages)
    ]
    return Marked(marked, marker.words, nonce)


def unused_nonce(text: str) -> str:
    """Return a word that a text does not contain, of letters, which JSON and tags leave alone."""
    lower = text.lower()
    nonces = (f"Qz{''.join(chr(97 + int(digit)) for digit in str(n))}Wx" for n in itertools.count())
    return next(nonce for nonce in nonces if nonce.lower() not in lower)


def texts_of(message: Message, key: str | None = None) -> list[str]:
    """Return the texts of a message, or of one of its keys, that marks can stand around."""
    texts: list[str] = []
    for each, value in message.items():
        if _holds_words(message, each) and key in (None, each):
            _add_texts(value, texts)
    return texts


def has_words(message: Message) -> bool:
    """Return whether a message has any text but white space."""
    return any(map(str.strip, texts_of(message)))


def unmarked_in(message: Message) -> Iterator[str]:
    """Yield what may stand in a template's text of the values of a message that no marks can stand
    around: numbers, and texts such as those of ids."""
    for key, value in message.items():
        yield from _unmarked_in(value, is_text=not _holds_words(message, key))


def _unmarked_in(value: Any, *, is_text: bool) -> Iterator[str]:
    if is_number(value) or (is_text and isinstance(value, str) and value):
        yield str(value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _unmarked_in(each, is_text=key in _REFERENCES)
    elif isinstance(value, list):
        for each in value:
            yield from _unmarked_in(each, is_text=is_text)


def _holds_words(message: Message, key: str) -> bool:
    return key not in _REFERENCES and not (key == "name" and message["role"] in _TOOL_ROLES)


def _add_texts(value: Any, texts: list[str]) -> None:
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if key not in _REFERENCES:
                _add_texts(each, texts)
    elif isinstance(value, list):
        for each in value:
            _add_texts(each, texts)


@dataclass(slots=True)
class _Marker:
    """Marks messages one after the other, and numbers their words."""

    nonce: str
    words: list[Words] = field(default_factory=list)

    def mark(self, number: int, message: Message, marks_empty: bool) -> Message:
        """Return a message with marks."""
        first = len(self.words)
        marked = {
            key: self._value(value, Words(number, key)) if _holds_words(message, key) else value
            for key, value in message.items()
        }
        content = message.get("content")
        if marks_empty and len(self.words) == first and isinstance(content, str):
            marked["content"] = content + self._pair("", Words(number, "content", is_empty=True))
        return marked

    def _value(self, value: Any, words: Words, *, is_json: bool = False) -> Any:
        if isinstance(value, str):
            return self._json(value, words) if is_json else self._text(value, words)
        if isinstance(value, Mapping):
            return {
                key: each
                if key in _REFERENCES
                else self._value(each, words, is_json=key == "arguments")
                for key, each in value.items()
            }
        if isinstance(value, list):
            return [self._value(each, words) for each in value]
        return value

    def _text(self, text: str, words: Words) -> str:
        """Mark each run of a text between two tags, without the white space around it; the tags if
        there is nothing else."""
        if not _TAG.sub("", text).strip():
            return self._run(text, words)
        pieces = []
        end = 0
        for tag in [*_TAG.finditer(text), None]:
            run = text[end:] if tag is None else text[end : tag.start()]
            pieces.append(self._run(run, words))
            if tag is not None:
                pieces.append(tag[0])
                end = tag.end()
        return "".join(pieces)

    def _run(self, run: str, words: Words) -> str:
        said = run.strip()
        if not said:
            return run
        before, after = run.split(said, 1)
        return f"{before}{self._pair(said, words)}{after}"

    def _json(self, text: str, words: Words) -> str:
        """Mark the words in JSON, which stays JSON."""
        found = _JSON_WORDS.search(text)
        if found is None:
            return text
        return text[: found.start()] + self._pair(found[0], words) + text[found.end() :]

    def _pair(self, text: str, words: Words) -> str:
        number = len(self.words)
        self.words.append(words)
        return f"{self.nonce}{number}b{text}{self.nonce}{number}e"
