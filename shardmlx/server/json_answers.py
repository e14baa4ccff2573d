"""Answers whose calls are JSON within the text: those of Llama 3, and of models that know no tools.

No MLX, no MPI.
"""

from __future__ import annotations

import re

from shardmlx.inference.detokenize import overlap
from shardmlx.server.answer_parts import (
    AnswerSyntax,
    Call,
    Incoming,
    Reading,
    Said,
    beginning,
    json_arguments,
    new_id,
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


def json_answer(incoming: Incoming, syntax: AnswerSyntax) -> Reading:
    """Yield the parts of an answer in which calls of known tools are JSON, with or without words
    before them."""
    yield from beginning(incoming, syntax)
    names = (re.escape(tool["function"]["name"]) for tool in syntax.tools)
    opening = re.compile(LEAD + OPENING.format("|".join(names)))
    while incoming.text or not incoming.is_last:
        found = opening.search(incoming.text)
        length = found.start() if found else len(incoming.text) - _unclear(incoming)
        if text := incoming.cut(length):
            yield Said(text)
        if found:
            incoming.cut(len(found[0]))
            yield Call(found["name"], "", new_id())
            yield from json_arguments(incoming)
            yield from _closing(incoming)
        elif not incoming.is_last:
            yield None


def _unclear(incoming: Incoming) -> int:
    """Return how many characters at the end may be of what comes before a call."""
    if incoming.is_last:
        return 0
    marks = max(overlap(incoming.text, mark) for mark in BEFORE)
    opening = MAY_OPEN.search(incoming.text)
    return max(marks, len(opening[0]) if opening else 0)


def _closing(incoming: Incoming) -> Reading:
    """Pass over the text that closes a call."""
    while True:
        incoming.text = AFTER.sub("", incoming.text)
        if incoming.is_last or not END.startswith(incoming.text):
            return
        yield None
