"""An answer read while it comes: its thoughts, its text, and its calls of tools. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardmlx.inference.answer_format import AnswerFormat
from shardmlx.inference.detokenize import Stops, StopStrings
from shardmlx.server.answer_parts import AnswerSyntax, Call, Incoming, MoreArguments, Part, Said
from shardmlx.server.harmony_answers import harmony_answer
from shardmlx.server.json_answers import json_answer
from shardmlx.server.marked_answers import marked_answer
from shardmlx.server.request_queue import GenerationRequest


class AnswerParser:
    """The parts of one answer up to a stop string, which is looked for in what is said alone."""

    def __init__(self, syntax: AnswerSyntax, stop: tuple[str, ...] = ()) -> None:
        is_json = syntax.tools and syntax.format.call is None
        read = json_answer if is_json else marked_answer
        self._incoming = Incoming()
        self._reading = (harmony_answer if syntax.format.has_channels else read)(
            self._incoming, syntax
        )
        self._stops = StopStrings(stop)
        self._calls = 0
        self._parallel = syntax.parallel

    @classmethod
    def of(cls, request: GenerationRequest) -> AnswerParser:
        """Return one for the answer to this request. Without a syntax all of it is said."""
        if request.syntax is None:
            return cls(AnswerSyntax(format=AnswerFormat(), continues=True))
        return cls(request.syntax, request.stop)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.found

    def take(self, text: str, *, is_last: bool) -> Iterator[Part]:
        """Yield the parts that are known with this text. A mark is told from what only begins like
        one by the text that follows: until then it is held back."""
        self._incoming.text += text
        self._incoming.is_last = is_last
        for part in self._reading:
            if part is None or self.stop is not None:
                break
            if isinstance(part, Said):
                yield from self._said(part.text, is_last=False)
                continue
            yield from self._said("", is_last=True)
            self._calls += isinstance(part, Call)
            if self._parallel or self._calls <= 1 or not isinstance(part, Call | MoreArguments):
                yield part
        if is_last and self.stop is None:
            yield from self._said("", is_last=True)

    def _said(self, text: str, *, is_last: bool) -> Iterator[Said]:
        if known := self._stops.take(text, is_last=is_last):
            yield Said(known)


@dataclass(slots=True)
class _StopsInParts:
    """Stops for an answer that has parts, whose text is passed on as it is."""

    parser: AnswerParser

    @property
    def found(self) -> str | None:
        return self.parser.stop

    def take(self, text: str, *, is_last: bool) -> str:
        for _ in self.parser.take(text, is_last=is_last):
            pass
        return text


def stops_of(request: GenerationRequest) -> Stops:
    """Return what finds the end of an answer to this request."""
    if request.syntax is None or not request.stop:
        return StopStrings(request.stop)
    return _StopsInParts(AnswerParser.of(request))
