"""An answer taken apart while it comes: what the model thought, said, and which tools it calls.

No MLX, no MPI.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from shardmlx.inference.answer_format import AnswerFormat, Marks, Tool
from shardmlx.inference.argument_types import plainly_typed

ID_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

ID_LENGTH = 9
"""Characters of a call's id: Mistral's templates take no others."""


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of what was thought."""

    text: str


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of what was said."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool; ``arguments`` are JSON, empty if they follow."""

    name: str
    arguments: str
    id: str


@dataclass(frozen=True, slots=True)
class MoreArguments:
    """A piece of the arguments of the call before."""

    text: str


Part = Thought | Said | Call | MoreArguments


class _State(Enum):
    SAYING = auto()
    THINKING = auto()
    CALLING = auto()
    ARGUING = auto()


@dataclass(slots=True)
class AnswerParts:
    """The parts of one answer of a model with this ``format``.

    It begins with a thought if ``is_thinking``: then its template has written the first mark. If it
    ``goes_on`` from what was said before, it may begin with space; so may all after the thought of
    one that ``is_exact``, which does not think again. Calls are looked for if there are ``tools``;
    one at most unless they may be ``parallel``. Arguments come in pieces, as the model writes them,
    where the format is known; what else is no call that can be read counts as said.
    """

    format: AnswerFormat
    tools: Sequence[Tool] = ()
    is_thinking: bool = False
    parallel: bool = True
    goes_on: bool = False
    is_exact: bool = False
    calls: int = 0
    _text: str = ""
    _state: _State = _State.SAYING
    _bare: bool = True  # nothing has come of this part but space
    _silent: bool = True  # nothing has been said
    _passed: bool = False  # between these marks a call has been passed on in pieces
    _is_wanted: bool = True  # the call that comes in pieces is passed on
    _object: JsonObject = field(default_factory=lambda: JsonObject())

    def __post_init__(self) -> None:
        if self.is_thinking:
            self._state = _State.THINKING
        if self.goes_on:
            self._bare = self._silent = False

    def take(self, text: str, *, is_last: bool) -> Iterator[Part]:
        """Yield the parts that are known with this text. A mark is told from what only begins like
        one by what follows: until then it is held back."""
        self._text += text
        while True:
            if self._state is _State.CALLING:
                yield from self._begin_call()
            if self._state is _State.ARGUING:
                yield from self._argue()
                if self._object.has_ended:
                    continue
            place, marks = self._next_mark()
            if place is None or marks is None:
                break
            mark = marks.start if self._state is _State.SAYING else marks.end
            yield from self._parts(self._text[:place], ends=True)
            self._text = self._text[place + len(mark) :]
            self._change(marks)
        if self._state in (_State.SAYING, _State.THINKING):
            given = len(self._text) - (0 if is_last else self._held())
            text, self._text = self._text[:given], self._text[given:]
            yield from self._parts(text, ends=is_last)
        elif is_last and self._state is _State.CALLING:
            yield from self._called(self._text, is_whole=not self._call.end)
            self._text = ""

    @property
    def _call(self) -> Marks:
        assert self.format.call is not None, "it is looked for only if there is one"
        return self.format.call

    def _marks(self) -> list[tuple[str, Marks]]:
        """Return the marks that may come next."""
        thought, call = self.format.thought, self.format.call if self.tools else None
        if self._state is _State.THINKING and thought is not None:
            return [(thought.end, thought)]
        if self._state is _State.CALLING:
            return [(self._call.end, self._call)] if self._call.end else []
        if self._state is _State.ARGUING:
            return []
        return [(each.start, each) for each in (thought, call) if each is not None]

    def _next_mark(self) -> tuple[int | None, Marks | None]:
        found = [
            (place, marks)
            for mark, marks in self._marks()
            if (place := self._text.find(mark)) >= 0 and self._counts(marks, self._text[:place])
        ]
        return min(found, key=lambda each: each[0]) if found else (None, None)

    def _counts(self, marks: Marks, before: str) -> bool:
        """Tell whether a mark after this text is one: who has begun to speak only speaks of
        thoughts."""
        begins_thought = self._state is _State.SAYING and marks is self.format.thought
        return not begins_thought or (self._silent and not before.strip())

    def _held(self) -> int:
        """Return how many characters at the end may be of a mark, or of the space before one."""
        longest = max((overlap(self._text, mark) for mark, _ in self._marks()), default=0)
        if self._state is _State.THINKING or self.calls:
            before = self._text[: len(self._text) - longest]
            longest += len(before) - len(before.rstrip())
        return longest

    def _begin_call(self) -> Iterator[Part]:
        """Begin to pass on a call whose arguments begin."""
        known = self.format.calls
        if known is None or known.opening is None:
            return
        opening = known.opening.match(self._text)
        if opening is None:
            return
        self._text = self._text[opening.end() :]
        self._state = _State.ARGUING
        self._object = JsonObject()
        self._passed = True
        self._is_wanted = self.parallel or not self.calls
        if self._is_wanted:
            self.calls += 1
            yield Call(opening["name"], "", new_id())

    def _argue(self) -> Iterator[Part]:
        """Pass on what has come of a call's arguments."""
        end = self._object.take(self._text)
        text, self._text = self._text[:end], self._text[end:]
        if text and self._is_wanted:
            yield MoreArguments(text)
        if self._object.has_ended:
            self._state = _State.CALLING

    def _change(self, marks: Marks) -> None:
        self._passed = False
        if self._state is not _State.SAYING:
            # What is said after a thought or a call begins with lines of space.
            self._bare = not self.is_exact
            self._silent = self._silent and not self.is_exact
            self._state = _State.SAYING
        elif marks is self.format.thought:
            self._bare = True
            self._state = _State.THINKING
        else:
            self._state = _State.CALLING

    def _parts(self, text: str, *, ends: bool) -> Iterator[Part]:
        if self._state is _State.CALLING:
            yield from self._called(text, is_whole=True)
            return
        if self._bare:
            text = text.lstrip()
        if ends and (self._state is _State.THINKING or self.calls):
            text = text.rstrip()
        if text:
            self._bare = False
            if self._state is _State.THINKING:
                yield Thought(text)
            else:
                self._silent = False
                yield Said(text)

    def _called(self, text: str, *, is_whole: bool) -> Iterator[Part]:
        if self._passed and self.format.calls is not None:
            after = self.format.calls.closing
            closing = None if after is None else after.match(text)
            if rest := text[closing.end() if closing else 0 :]:
                yield Said(rest)
            return
        calls = self._read(text) if is_whole else None
        if calls is None:
            end = self._call.end if is_whole else ""
            yield Said(f"{self._call.start}{text}{end}")
            return
        for call in calls:
            if self.parallel or not self.calls:
                self.calls += 1
                yield call

    def _read(self, text: str) -> list[Call] | None:
        """Return the calls in a text; None if it cannot be read."""
        assert self.format.parse is not None, "who has marks can read what is between them"
        try:
            parsed = self.format.parse(text, plainly_typed(self.tools))
            return [_call(each) for each in (parsed if isinstance(parsed, list) else [parsed])]
        except Exception:  # a parser may raise whatever it likes
            return None


def _call(parsed: Mapping[str, Any]) -> Call:
    arguments = parsed.get("arguments", parsed.get("parameters", {}))
    if not isinstance(parsed["name"], str):
        raise TypeError("a name is a text")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not isinstance(json.loads(text), dict):
        raise TypeError("arguments are an object")
    return Call(parsed["name"], text, new_id())


def new_id() -> str:
    """Return an id for a call."""
    return "".join(map(secrets.choice, ID_LENGTH * [ID_CHARACTERS]))


@dataclass(slots=True)
class JsonObject:
    """A JSON object that comes in pieces."""

    depth: int = 0
    is_text: bool = False
    is_escaped: bool = False
    has_ended: bool = False

    def take(self, text: str) -> int:
        """Return how many characters of a further text are of the object."""
        for place, character in enumerate(text):
            if self.is_text:
                self.is_text = self.is_escaped or character != '"'
                self.is_escaped = character == "\\" and not self.is_escaped
            elif character == '"':
                self.is_text = True
            elif character in "{}":
                self.depth += 1 if character == "{" else -1
                if self.depth == 0:
                    self.has_ended = True
                    return place + 1
        return len(text)


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of ``mark``."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
