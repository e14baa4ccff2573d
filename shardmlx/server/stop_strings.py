"""Stop strings of a chat: looked for in what is said, not in thoughts or calls. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass

from shardmlx.inference.answer_format import AnswerFormat
from shardmlx.inference.detokenize import Stops, StopStrings
from shardmlx.server.answer_parts import AnswerParts, Part, Said
from shardmlx.server.request_queue import GenerationRequest


@dataclass(slots=True)
class UntilStop:
    """The ``parts`` of an answer up to a stop string in what is said."""

    parts: AnswerParts
    stops: StopStrings

    @classmethod
    def of(cls, request: GenerationRequest) -> UntilStop:
        """Return the parts of an answer to this request, of which nothing has come."""
        if request.parts is None:
            return cls(AnswerParts(AnswerFormat(), goes_on=request.continues), StopStrings())
        return cls(copy(request.parts), StopStrings(request.stop))

    def take(self, text: str, *, is_last: bool) -> Iterator[Part]:
        """Yield the parts that are known with this text."""
        for part in self.parts.take(text, is_last=is_last):
            if self.stops.found is not None:
                return
            said = part.text if isinstance(part, Said) else ""
            if known := self.stops.take(said, is_last=not isinstance(part, Said)):
                yield Said(known)
            if not isinstance(part, Said):
                yield part
        if is_last and self.stops.found is None and (known := self.stops.take("", is_last=True)):
            yield Said(known)


@dataclass(slots=True)
class _Watch:
    """Stops for an answer in ``parts``, whose text is passed on as it is."""

    parts: UntilStop

    @property
    def found(self) -> str | None:
        return self.parts.stops.found

    def take(self, text: str, *, is_last: bool) -> str:
        for _ in self.parts.take(text, is_last=is_last):
            pass
        return text


def stops_of(request: GenerationRequest) -> Stops:
    """Return what finds the end of an answer to this request."""
    if request.parts is None or not request.stop:
        return StopStrings(request.stop)
    return _Watch(UntilStop.of(request))
