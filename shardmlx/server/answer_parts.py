"""The parts of an answer, and calls of tools among them: whole, or in pieces. No MLX, no MPI."""

from __future__ import annotations

import json
import secrets
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

from shardmlx.server.json_texts import with_whole_characters

ID_LENGTH = 9
"""Characters of a call's id: Mistral's templates take no others."""


Kind = Literal["thought", "said", "call"]


@dataclass(slots=True)
class AnswerPart:
    """A piece of what an answer thinks or says, or of the arguments of a call: the JSON of an
    object. A call begins with a part that has its ``name`` and ``id``."""

    kind: Kind
    text: str
    name: str = ""
    id: str = ""


Reading = Generator[AnswerPart | None, None, None]
"""Parts as they are read, and None where more text is needed."""


@dataclass(slots=True)
class UnreadText:
    """The text of an answer that has come and is not read yet; ``is_last`` once no more comes."""

    text: str = ""
    is_last: bool = False

    def cut(self, length: int) -> str:
        """Take so many characters from the beginning, and return them."""
        cut, self.text = self.text[:length], self.text[length:]
        return cut


def whole_call(name: Any, arguments: Any) -> AnswerPart:
    """Return a call with an id of its own. Raises ``ValueError`` or ``TypeError`` unless arguments
    are an object, or the JSON of one."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    text = with_whole_characters(text)
    if not isinstance(json.loads(text), dict) or not isinstance(name, str):
        raise TypeError("a name is a text, and arguments are an object")
    return AnswerPart("call", text, name, _new_id())


def _new_id() -> str:
    return secrets.token_hex(ID_LENGTH)[:ID_LENGTH]


def begun_call(name: str) -> AnswerPart:
    """Return the part with which a call begins whose arguments come in pieces."""
    return AnswerPart("call", "", name, _new_id())


@dataclass(slots=True)
class _ObjectEnd:
    """The search for the end of a JSON object in text that comes in pieces."""

    depth: int = 0
    is_in_text: bool = False
    is_escaped: bool = False

    def within(self, piece: str) -> int | None:
        """Return the place after the object's end; None if it is not in this piece."""
        for place, character in enumerate(piece, 1):
            if self.is_in_text:
                self.is_in_text = self.is_escaped or character != '"'
                self.is_escaped = character == "\\" and not self.is_escaped
            elif character == '"':
                self.is_in_text = True
            elif character in "{}":
                self.depth += 1 if character == "{" else -1
                if self.depth == 0:
                    return place
        return None


def call_in_pieces(incoming: UnreadText, name: str) -> Reading:
    """Yield the call of this name whose arguments begin here, in pieces as they come, up to the end
    of their object or of the answer."""
    yield begun_call(name)
    search = _ObjectEnd()
    while True:
        end = search.within(incoming.text)
        if piece := incoming.cut(len(incoming.text) if end is None else end):
            yield AnswerPart("call", piece)
        if end is not None or incoming.is_last:
            return
        yield None
