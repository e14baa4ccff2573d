"""Answers whose calls stand between marks, as Qwen, Mistral, Kimi, GLM and most others write them.

No MLX, no MPI. Calls whose arguments are JSON are passed on while they come, if ``CallFormat`` says
what stands around them; others are read once they are whole, by mlx-lm's parsers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardmlx.inference.answer_format import Marks
from shardmlx.server.answer_parts import (
    AnswerSyntax,
    Call,
    Incoming,
    Reading,
    Said,
    beginning,
    json_arguments,
    new_id,
    passed_on,
    thoughts,
)
from shardmlx.server.argument_types import plainly_typed


def marked_answer(incoming: Incoming, syntax: AnswerSyntax) -> Reading:
    """Yield the parts of an answer. A call that cannot be read counts as said."""
    yield from beginning(incoming, syntax)
    call = syntax.format.call if syntax.tools else None
    marks = [call.start] if call is not None else []
    has_called = False
    while (yield from passed_on(incoming, marks, Said, trims=has_called)):
        assert call is not None, "it is looked for only if there is one"
        yield from _calls(incoming, syntax, call)
        yield from thoughts(incoming, syntax.format.thought)
        has_called = True


def _calls(incoming: Incoming, syntax: AnswerSyntax, marks: Marks) -> Reading:
    """Yield the calls that stand between two marks."""
    known, has_come = syntax.format.calls, False
    while True:
        opening = known.opening.match(incoming.text) if known and known.opening else None
        if opening is not None:
            incoming.cut(opening.end())
            yield Call(opening["name"], "", new_id())
            yield from json_arguments(incoming)
            has_come = True
            continue
        is_marked = bool(marks.end) and marks.end in incoming.text
        if is_marked or incoming.is_last:
            break
        yield None
    text, end, incoming.text = (
        incoming.text.partition(marks.end) if is_marked else (incoming.text, "", "")
    )
    if has_come:
        after = known.closing.match(text) if known and known.closing else None
        text = text[after.end() :] if after else text
    else:
        calls = _read(text, syntax) if is_marked or not marks.end else None
        yield from calls or ()
        text = f"{marks.start}{text}{end}" if calls is None else ""
    if text:
        yield Said(text)


def _read(text: str, syntax: AnswerSyntax) -> list[Call] | None:
    """Return the calls in a text; None if it cannot be read."""
    assert syntax.format.parse is not None, "a model with marks has a parser"
    try:
        parsed = syntax.format.parse(text, plainly_typed(syntax.tools))
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
