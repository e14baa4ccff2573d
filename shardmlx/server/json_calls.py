"""Calls of tools that are JSON within what is said: those of Llama 3, and of models that know none.

No MLX, no MPI.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardmlx.server.answer_parts import (
    AnswerParts,
    Call,
    JsonObject,
    MoreArguments,
    Part,
    Said,
    new_id,
    overlap,
)

BEFORE = ("<|python_tag|>", "<tool_call>", "```json", "```", "[")
"""Marks that models write before a call, though nobody asks for them."""

LEAD = rf"(?<!\s)\s*(?:(?:{'|'.join(map(re.escape, BEFORE))})\s*){{0,2}}"
"""Space and marks before a call; the search for it takes time that grows with the text alone."""

OPENING = (
    r'\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>{})"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
"""A call up to its arguments; its name is one of those in the place of ``{}``."""

MAY_OPEN = re.compile(LEAD + r'(?:\{\s*(?:"(?:t?y?p?e?|n?a?m?e?)(?:"[\s\w.:,"-]{0,300})?)?)?\Z')
"""Text at the end that may be the beginning of a call."""

END = "</tool_call>"

AFTER = re.compile(rf"\A(?:[\s}}\]`;,]|{END})*")
"""Text after the arguments of a call."""


@dataclass(slots=True)
class JsonParts(AnswerParts):
    """The parts of one answer in which calls of known tools are JSON, with or without words before
    them."""

    _said: str = ""
    _is_over: bool = False
    _reading: Iterator[Part | None] | None = None

    def take(self, text: str, *, is_last: bool) -> Iterator[Part]:
        """Yield the parts that are known with this text."""
        if self._reading is None:
            self._reading = self._read_said()
        for part in AnswerParts.take(self, text, is_last=is_last):
            if isinstance(part, Said):
                self._said += part.text
            else:
                yield part
        self._is_over = is_last
        while (found := next(self._reading, None)) is not None:
            yield found

    def _read_said(self) -> Iterator[Part | None]:
        """Yield the parts of what is said; None where more of it is needed."""
        names = (re.escape(tool["function"]["name"]) for tool in self.tools)
        opening = re.compile(LEAD + OPENING.format("|".join(names)))
        while self._said or not self._is_over:
            found = opening.search(self._said)
            text = self._cut(found.start() if found else len(self._said) - self._unclear())
            if text:
                yield Said(text)
            if found:
                self._cut(len(found[0]))
                yield from self._call_of(found["name"])
            elif not self._is_over:
                yield None

    def _unclear(self) -> int:
        """Return how many characters at the end may be of what comes before a call."""
        if self._is_over:
            return 0
        marks = max(overlap(self._said, mark) for mark in BEFORE)
        opening = MAY_OPEN.search(self._said)
        return max(marks, len(opening[0]) if opening else 0)

    def _call_of(self, name: str) -> Iterator[Part | None]:
        """Yield a call, its arguments as they come, and pass over what closes it."""
        is_wanted = self.parallel or not self.calls
        if is_wanted:
            self.calls += 1
            yield Call(name, "", new_id())
        arguments = JsonObject()
        while not arguments.has_ended and (self._said or not self._is_over):
            text = self._cut(arguments.take(self._said))
            if text and is_wanted:
                yield MoreArguments(text)
            elif not text:
                yield None
        self._said = AFTER.sub("", self._said)
        while END.startswith(self._said) and not self._is_over:
            yield None
            self._said = AFTER.sub("", self._said)

    def _cut(self, length: int) -> str:
        """Take so many characters from the beginning of what is said, and return them."""
        text, self._said = self._said[:length], self._said[length:]
        return text
