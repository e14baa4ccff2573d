"""Places of messages in the text that a chat template writes. No MPI.

Islands of marked words show where the words of each message are. Between two islands stands what
the template itself writes: the end of one message, and the header of the next. The conversation up
to there tells them apart: it ends as the one message does, and, if it asks for an answer, begins as
the next one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, takewhile
from typing import Any

from shardmlx.training.message_marks import (
    MarkedWords,
    Message,
    Way,
    Words,
    mark_words,
    texts_of,
    unmarked_in,
    unused_nonce,
)

Tools = Sequence[Mapping[str, Any]] | None

Write = Callable[[Sequence[Message], Tools, bool], str | None]
"""Returns what the template writes for a conversation, and, if the last argument says so, to ask
for an answer; None if it refuses the conversation."""

Span = tuple[int, int]
"""The first character, and the one after the last."""

_WAYS = (
    Way(marks_empty=True),
    Way(marks_empty=False),
    Way(marks_empty=False, roles=("assistant", "tool")),
)
"""Ways to mark words, from the one that shows most. A template may write a message otherwise if its
content is not empty, or look for a command at the end of a question."""

_PIECES = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|\w+|\W")
"""Pattern of the marks, words and other characters in a template's text."""

_WORDS_OR_NOT = re.compile(r"\w+|\W")
"""Pattern of the words and other characters in a text."""

_MARK = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")
"""Pattern of a mark in a template's text."""

_THOUGHT = re.compile(
    r"<[^<>]*(think|thought|reason)[^<>]*>|<[^<>]*channel[^<>]*>thought|\[THINK\]|◁think▷",
    re.IGNORECASE,
)
"""Pattern of the mark that begins a thought."""

_LEAST = 4
"""Fewest characters of a header's beginning that identify it if the rest is missing."""

_QUESTION = {"role": "user", "content": "a"}
_ANSWER = {"role": "assistant", "content": "b"}


@dataclass(frozen=True, slots=True)
class Reading:
    """Text of a conversation as a template writes it, and the islands of its ``words``, which were
    marked in a ``way`` of ``_WAYS``."""

    text: str
    islands: Sequence[MarkedWords]
    words: Sequence[Words]
    way: Way

    def index_of(self, number: int) -> int | None:
        """Return the index of an island by the number of its words; None if none are written."""
        return next((i for i, each in enumerate(self.islands) if each.number == number), None)

    def before(self, index: int) -> str:
        """Return the text before an island, from the end of the one before it."""
        begin = self.islands[index - 1].end if index else 0
        return self.text[begin : self.islands[index].begin]

    def after(self, index: int) -> str:
        """Return the text after an island, to the begin of the next one."""
        begin = self.islands[index].end
        is_last = index + 1 == len(self.islands)
        return self.text[begin:] if is_last else self.text[begin : self.islands[index + 1].begin]

    @property
    def tail(self) -> str:
        """The text after the last island."""
        return self.after(len(self.islands) - 1) if self.islands else self.text


@dataclass(frozen=True, slots=True)
class Gap:
    """Text between two islands as pieces, and their ``kind``, in which values that have no marks,
    such as numbers and ids, are all the same. Gaps of one kind have their boundaries behind the
    same piece."""

    pieces: Sequence[str]
    kind: Sequence[str | None]

    @classmethod
    def of(cls, text: str, messages: Sequence[Message]) -> Gap:
        """Return the gap of a text that stands between words of ``messages``."""
        values = {
            word
            for each in messages
            for value in unmarked_in(each)
            for word in _WORDS_OR_NOT.findall(value)
            if word.isalnum() or "_" in word
        }
        pieces = _WORDS_OR_NOT.findall(text)
        return cls(pieces, [None if piece in values else piece for piece in pieces])

    def count(self, length: int) -> int | None:
        """Return how many pieces have this length; None if it ends within one."""
        lengths = [0, *accumulate(map(len, self.pieces))]
        return lengths.index(length) if length in lengths else None

    def length(self, count: int) -> int:
        """Return the length of the first pieces."""
        return sum(map(len, self.pieces[:count]))


@dataclass(frozen=True, slots=True)
class MessageSpans:
    """Finds messages in what a template writes.

    It keeps what it learns of the template's own text between two islands, so that a whole data set
    costs a few conversations more.
    """

    write: Write
    _openings: dict[Any, int] = field(default_factory=dict)
    _closings: dict[Any, int] = field(default_factory=dict)

    def read(self, messages: Sequence[Message], tools: Tools, text: str) -> Reading | None:
        """Return where the words of messages are in the ``text`` that the template writes for them;
        None if it writes another one once they have marks."""
        readings = (self._marked(messages, tools, text, way) for way in _WAYS)
        return next((each for each in readings if each is not None), None)

    def spans(
        self, messages: Sequence[Message], tools: Tools, reading: Reading, number: int
    ) -> list[Span] | None:
        """Return where the message of this number lies, which may be in several places, and in none
        if none of its words is written; None if that cannot be told."""
        if not reading.way.marks(messages[number]):
            return None
        islands = reading.islands
        own = [i for i, each in enumerate(islands) if each.message == number]
        spans: list[Span] = []
        for i in own:
            if i - 1 in own:
                begin = spans.pop()[0]
            else:
                length = self._opening(messages, tools, reading, i, is_first=i == own[0])
                if length is None:
                    return None
                begin = islands[i].begin - length
            spans.append((begin, islands[i].end))
        found = []
        for (begin, end), i in zip(spans, [i for i in own if i + 1 not in own], strict=True):
            length = self._closing(messages, tools, reading, i)
            if length is None:
                return None
            found.append((begin, end + length))
        return found

    def head(self, messages: Sequence[Message], reading: Reading) -> int | None:
        """Return the place at which the first message begins that is not the system's; None if that
        cannot be told."""
        first = next((each for each in reading.islands if not _is_system(messages, each)), None)
        if (
            first is None
            or messages[first.message]["role"] != "user"
            or reading.way.roles is not None
        ):
            return None
        header = self._header_of_question
        begin = first.begin
        if header is not None and reading.text[:begin].endswith(header):
            return begin - len(header)
        # The system's message may be part of the question.
        return begin if any(each["role"] == "system" for each in messages) else None

    @property
    def _header_of_question(self) -> str | None:
        """The text before a question that follows an answer; None if that cannot be told."""
        messages = [_QUESTION, _ANSWER, _QUESTION]
        reading = self._read_part(messages, None, _WAYS[0])
        spans = None if reading is None else self.spans(messages, None, reading, 2)
        if reading is None or not spans or len(reading.islands) != len(messages):
            return None
        return reading.text[spans[0][0] : reading.islands[2].begin]

    def _marked(
        self,
        messages: Sequence[Message],
        tools: Tools,
        text: str | None,
        way: Way,
        asks: bool = False,
    ) -> Reading | None:
        """Return the reading of a text if the words that are marked in this ``way`` leave it as it
        is."""
        if text is None:
            return None
        marked = mark_words(messages, unused_nonce(text), way)
        written = self.write(marked.messages, tools, asks)
        if written is None:
            return None
        found, islands = marked.read(written)
        overlap = any(one.end > other.begin for one, other in pairwise(islands))
        return None if found != text or overlap else Reading(text, islands, marked.words, way)

    def _read_part(
        self, messages: Sequence[Message], tools: Tools, way: Way, asks: bool = False
    ) -> Reading | None:
        """Return the reading of the beginning of a conversation."""
        return self._marked(messages, tools, self.write(messages, tools, asks), way, asks)

    def _opening(
        self,
        messages: Sequence[Message],
        tools: Tools,
        reading: Reading,
        index: int,
        *,
        is_first: bool,
    ) -> int | None:
        """Return how many characters before an island belong to its message; None if that cannot be
        told. ``is_first`` says that it is the first island of the message."""
        gap = reading.before(index)
        number = reading.islands[index].message
        between = _between(messages, reading, index - 1, index)
        pieces = Gap.of(gap, between)
        forms = _forms(reading, between, index - 1, index)
        key = (*pieces.kind, is_first, *forms, number == 0)
        if key in self._openings:
            return len(gap) - pieces.length(self._openings[key])
        if not is_first:
            length = self._after_others(messages[: number + 1], tools, reading, index)
        elif number == 0 and messages[0]["role"] != "assistant":
            length = len(gap)
        else:
            is_answer = messages[number]["role"] == "assistant"
            length = self._after_prompt(messages[:number], tools, reading.way, gap, is_answer)
            if length is None and is_answer:
                place = _end_of_header(gap, self._header)
                return None if place is None else len(gap) - place
        count = None if length is None else pieces.count(len(gap) - length)
        if count is not None:
            self._openings[key] = count
        return length

    def _after_prompt(
        self, before: Sequence[Message], tools: Tools, way: Way, gap: str, asks: bool
    ) -> int | None:
        """Return how much of a gap stands after the prompt, which may ask for an answer; None if
        the gap does not show the prompt."""
        asked = self._read_part(before, tools, way, asks) if before else None
        plain = self._read_part(before, tools, way) if before and asks else asked
        if asked is None or plain is None:
            return None
        goes_on = _is_result(before[-1])
        place = _end_of_prompt(gap, asked.tail, plain.tail, goes_on=goes_on)
        return None if place is None else len(gap) - place

    def _after_others(
        self, upto: Sequence[Message], tools: Tools, reading: Reading, index: int
    ) -> int | None:
        """Return how much of a gap belongs to the message after it, part of which stands before
        what another one says: as much as it has without the other one."""
        alone = self._read_part(upto, tools, reading.way)
        own = None if alone is None else alone.index_of(reading.islands[index].number)
        if alone is None or own is None:
            return None
        pieces = [piece[::-1] for piece in reversed(_PIECES.findall(alone.before(own)))]
        return _matched(pieces, reading.before(index)[::-1])

    def _closing(
        self, messages: Sequence[Message], tools: Tools, reading: Reading, index: int
    ) -> int | None:
        """Return how many characters after an island belong to its message: those with which it
        ends if nothing follows it. None if that cannot be told."""
        number = reading.islands[index].message
        gap = reading.after(index)
        if number == len(messages) - 1 and index + 1 == len(reading.islands):
            return len(gap)
        between = _between(messages, reading, index, index + 1)
        pieces = Gap.of(gap, between)
        key = (*pieces.kind, *_forms(reading, between, index, index + 1))
        if key in self._closings:
            return pieces.length(self._closings[key])
        # A template may write what goes with a call behind the call's results.
        latest = max(each.message for each in reading.islands[: index + 1])
        results = takewhile(_is_result, messages[number + 1 : latest + 1])
        upto = messages[: number + 1 + sum(1 for _ in results)]
        alone = self._read_part(upto, tools, reading.way)
        own = None if alone is None else alone.index_of(reading.islands[index].number)
        if alone is None or own is None:
            return None
        length = _length_of_ending(gap, alone.after(own))
        count = pieces.count(length)
        if count is not None:
            self._closings[key] = count
        return length

    @property
    def _header(self) -> str:
        """The text with which the template asks for an answer to a question."""
        asked = self.write([_QUESTION], None, True) or ""
        plain = self.write([_QUESTION], None, False) or ""
        return asked[_matched(_PIECES.findall(asked), plain) :]


def _is_system(messages: Sequence[Message], island: MarkedWords) -> bool:
    return bool(messages[island.message]["role"] == "system")


def _is_result(message: Message) -> bool:
    return bool(message["role"] == "tool")


def _between(
    messages: Sequence[Message], reading: Reading, one: int, other: int
) -> Sequence[Message]:
    """Return the messages from one island to another, of which one may be none."""
    islands = reading.islands
    first = islands[one].message if one >= 0 else 0
    last = islands[other].message if other < len(islands) else len(messages) - 1
    return messages[min(first, last) : max(first, last) + 1]


def _forms(reading: Reading, between: Sequence[Message], one: int, other: int) -> tuple[Any, ...]:
    """Return the forms of the messages ``between`` two islands, of which one may be none."""
    found = [reading.islands[i] for i in (one, other) if 0 <= i < len(reading.islands)]
    keys = tuple(reading.words[each.number].key for each in found)
    return (found[0].message <= found[-1].message, keys, *map(_form, between))


def _form(message: Message) -> tuple[Any, ...]:
    """Return the role of a message, its keys, and those of them that hold words."""
    said = tuple(key for key in message if any(map(str.strip, texts_of(message, key))))
    return (message["role"], tuple(message), said)


def _matched(pieces: Sequence[str], text: str) -> int:
    """Return the length of the first pieces with which a text begins."""
    length = 0
    for piece in pieces:
        if not text.startswith(piece, length):
            break
        length += len(piece)
    return length


def _length_of_ending(gap: str, ending: str) -> int:
    """Return how many characters at the beginning of a gap end a message that has this ``ending``
    if nothing follows it.

    A template may write the end otherwise where another message follows, with white space or the
    number of a call: then the message ends behind the last mark of its ending.
    """
    length = _matched(_PIECES.findall(ending), gap)
    marks = [*_MARK.finditer(ending)]
    if length == len(ending) or not marks or length >= marks[-1].end():
        return length
    place = gap.find(marks[-1][0], length)
    if place < 0:
        return length
    end = place + len(marks[-1][0])
    return end + _matched(_PIECES.findall(ending[marks[-1].end() :]), gap[end:])


def _end_of_prompt(gap: str, asked: str, plain: str, *, goes_on: bool) -> int | None:
    """Return the place in a gap at which the prompt ends, which ends in ``asked``, or in ``plain``
    if it does not ask for an answer; None if the gap shows neither.

    A template may ask with a header that it does not write where the answer ``goes_on`` after the
    result of its call, as a part of the same turn.
    """
    if gap.startswith(asked):
        return len(asked)
    pieces = _PIECES.findall(asked)
    # A template may ask for more than it writes before an answer that is there, such as a thought.
    common = _matched(pieces, gap)
    header = asked[_matched(pieces, plain) :]
    if not header:
        return common if common or not gap else None
    begin = len(asked) - len(header)
    if common <= begin:
        place = _end_of_header(gap, header)
        is_plain = gap.startswith(plain) if goes_on else gap == plain
        return len(plain) if place is None and is_plain else place
    return min(common, begin + len(_without_thought(header)))


def _end_of_header(gap: str, header: str) -> int | None:
    """Return the place in a gap at which a header ends, or its beginning, if it stands there; None
    for a header without text, which stands everywhere."""
    if not header:
        return None
    pieces = _PIECES.finditer(_without_thought(header))
    for end in (len(header), *reversed([piece.end() for piece in pieces])):
        found = gap.rfind(header[:end])
        if found >= 0 and (end == len(header) or end >= _LEAST):
            return found + end
    return None


def _without_thought(header: str) -> str:
    """Return a header without the thought that it begins, which a template asks for whole, or not
    at all."""
    thought = _THOUGHT.search(header)
    return header if thought is None else header[: thought.start()]
