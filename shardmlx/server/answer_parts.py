"""The parts of an answer, and the steps of reading that all formats of answers share.

No MLX, no MPI. A format is a generator: it takes the text of an answer away as it reads it, and
yields parts; None where it needs more text.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardmlx.inference.answer_format import AnswerFormat, Marks, Tool
from shardmlx.inference.detokenize import before_any

ID_LENGTH = 9
"""Characters of a call's id: Mistral's templates take no others."""


Kind = Literal["thought", "said", "call"]


@dataclass(slots=True)
class Part:
    """A piece of what an answer thinks or says, or of the arguments of a call, which are JSON. A
    call begins with a part that has its ``name`` and ``id``."""

    kind: Kind
    text: str
    name: str = ""
    id: str = ""


Reading = Generator[Part | None, None, None]
"""Parts as they are read, and None where more text is needed."""


@dataclass(slots=True)
class Incoming:
    """The text of an answer that has come and is not read yet; ``is_last`` once no more comes."""

    text: str = ""
    is_last: bool = False

    def cut(self, length: int) -> str:
        """Take so many characters from the beginning, and return them."""
        cut, self.text = self.text[:length], self.text[length:]
        return cut


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSyntax:
    """The way to read one answer of a model with this ``format``.

    If ``is_thinking``, the template has written the first mark of a thought. An answer that
    ``continues`` a text may begin with space, and does not think again. Calls are looked for if
    there are ``tools``; unless they may be ``parallel``, only the first counts.
    """

    format: AnswerFormat = field(default_factory=AnswerFormat)
    tools: Sequence[Tool] = ()
    is_thinking: bool = False
    parallel: bool = True
    continues: bool = False


def passed_on(
    incoming: Incoming, marks: Sequence[str], kind: Kind, *, trims: bool = False
) -> Generator[Part | None, None, str]:
    """Yield the text before the first of ``marks``, in pieces of this ``kind``, without the space
    before it if it ``trims``; pass over the mark and return it, or "" at the end of the answer."""
    while True:
        end, mark = before_any(marks, incoming.text, is_last=incoming.is_last)
        is_over = bool(mark) or incoming.is_last
        piece = incoming.text[:end].rstrip() if trims else incoming.text[:end]
        incoming.cut(end + len(mark) if is_over else len(piece))
        if piece:
            yield Part(kind, piece)
        if is_over:
            return mark
        yield None


def begins(incoming: Incoming, mark: str | None) -> Generator[None, None, bool]:
    """Pass over space, and over this mark if it comes next; return whether it did."""
    while True:
        text = incoming.text = incoming.text.lstrip()
        is_unclear = not text or (mark is not None and text != mark and mark.startswith(text))
        if incoming.is_last or not is_unclear:
            break
        yield None
    if mark is None or not text.startswith(mark):
        return False
    incoming.cut(len(mark))
    return True


def beginning(incoming: Incoming, syntax: AnswerSyntax) -> Reading:
    """Yield the thoughts with which an answer begins."""
    marks = syntax.format.thought
    if syntax.is_thinking and marks is not None:
        yield from _thought(incoming, marks)
    if not syntax.continues:
        yield from thoughts(incoming, marks)


def thoughts(incoming: Incoming, marks: Marks | None) -> Reading:
    """Yield the thoughts that come next, and pass over the space around them."""
    while (yield from begins(incoming, marks.start if marks is not None else None)):
        assert marks is not None, "a thought has marks"
        yield from _thought(incoming, marks)


def _thought(incoming: Incoming, marks: Marks) -> Reading:
    yield from begins(incoming, None)
    yield from passed_on(incoming, [marks.end], "thought", trims=True)


def json_call(incoming: Incoming, name: str) -> Reading:
    """Yield the call of this name whose JSON object begins here, in pieces as it comes."""
    yield begun_call(name)
    depth, in_text, is_escaped, is_whole = 0, False, False, False
    while not is_whole and (incoming.text or not incoming.is_last):
        end = len(incoming.text)
        for place, character in enumerate(incoming.text, 1):
            if in_text:
                in_text = is_escaped or character != '"'
                is_escaped = character == "\\" and not is_escaped
            elif character == '"':
                in_text = True
            elif character in "{}":
                depth += 1 if character == "{" else -1
                if depth == 0:
                    end, is_whole = place, True
                    break
        if end:
            yield Part("call", incoming.cut(end))
        else:
            yield None


def begun_call(name: str) -> Part:
    """Return the part with which a call begins, with an id of its own."""
    letters = string.ascii_letters + string.digits
    return Part("call", "", name, "".join(secrets.choice(letters) for _ in range(ID_LENGTH)))
