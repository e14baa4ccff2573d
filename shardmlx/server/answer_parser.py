"""An answer read while it comes: its thoughts, its text, and its calls of tools. No MLX, no MPI.

A format is a generator: it takes the text of an answer away as it reads it, and yields parts; None
where it needs more text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from shardmlx.inference.answer_format import AnswerFormat, Marks, Tool
from shardmlx.inference.detokenize import StopStrings, before_any, overlap
from shardmlx.server.answer_parts import (
    AnswerPart,
    Kind,
    Reading,
    UnreadText,
    begun_call,
    call_in_pieces,
    whole_call,
)
from shardmlx.server.closed_schema import definition_in


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSyntax:
    """The way to read one answer of a model with this ``format``.

    If ``is_thinking``, the template has written the first mark of a thought. An answer that
    ``continues`` a text may begin with space, and does not think again. Calls are looked for if
    there are ``tools``; unless they may be ``parallel``, only the first counts. Arguments come
    ``in_pieces`` as far as the model writes them as JSON.
    """

    format: AnswerFormat = field(default_factory=AnswerFormat)
    tools: Sequence[Tool] = ()
    is_thinking: bool = False
    parallel: bool = True
    continues: bool = False
    in_pieces: bool = False


def passed_on(
    incoming: UnreadText, marks: Sequence[str], kind: Kind, *, trims: bool = False
) -> Generator[AnswerPart | None, None, str]:
    """Yield the text before the first of ``marks``, in pieces of this ``kind``, without the space
    before it if it ``trims``; pass over the mark and return it, or "" at the end of the answer."""
    while True:
        end, mark = before_any(marks, incoming.text, is_last=incoming.is_last)
        is_over = bool(mark) or incoming.is_last
        piece = incoming.text[:end].rstrip() if trims else incoming.text[:end]
        incoming.cut(end + len(mark) if is_over else len(piece))
        if piece:
            yield AnswerPart(kind, piece)
        if is_over:
            return mark
        yield None


def begins(incoming: UnreadText, mark: str | None) -> Generator[None, None, bool]:
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


def beginning(incoming: UnreadText, syntax: AnswerSyntax) -> Reading:
    """Yield the thoughts with which an answer begins."""
    marks = syntax.format.thought
    if syntax.is_thinking and marks is not None:
        yield from _thought(incoming, marks)
    if not syntax.continues:
        yield from thoughts(incoming, marks)


def thoughts(incoming: UnreadText, marks: Marks | None) -> Reading:
    """Yield the thoughts that come next, and pass over the space around them."""
    while (yield from begins(incoming, marks.start if marks is not None else None)):
        assert marks is not None, "a thought has marks"
        yield from _thought(incoming, marks)


def _thought(incoming: UnreadText, marks: Marks) -> Reading:
    yield from begins(incoming, None)
    yield from passed_on(incoming, [marks.end], "thought", trims=True)


def up_to(incoming: UnreadText, marks: Sequence[str]) -> Generator[None, None, tuple[str, str]]:
    """Wait for the first of ``marks``, or the answer's end; take the text before it, and the mark,
    and return both."""
    while True:
        end, mark = before_any(marks, incoming.text, is_last=True)
        if mark or incoming.is_last:
            return incoming.cut(end), incoming.cut(len(mark))
        yield None


# Calls between marks, as Qwen, Mistral, Kimi, GLM and most others write them. They are read once
# they are whole: JSON by itself, others by mlx-lm's parsers.


def marked_answer(incoming: UnreadText, syntax: AnswerSyntax) -> Reading:
    """Yield the parts of an answer. A call that cannot be read counts as said."""
    yield from beginning(incoming, syntax)
    call = syntax.format.call if syntax.tools else None
    marks = [call.start] if call is not None else []
    has_called = False
    while (yield from passed_on(incoming, marks, "said", trims=has_called)):
        assert call is not None, "it is looked for only if there is one"
        yield from _calls(incoming, syntax, call)
        yield from thoughts(incoming, syntax.format.thought)
        has_called = True


OBJECT = re.compile(
    r'[\s\[,}]*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\{)'
)
"""A call between marks up to its arguments, the first one or a further one of a list."""

REST = " \n\t}],"
"""Characters that may follow the arguments of the last call."""


def _calls_in_pieces(
    incoming: UnreadText, marks: Marks
) -> Generator[AnswerPart | None, None, bool]:
    """Yield calls that are JSON in pieces; return whether there was one, and all was read."""
    has_called = False
    while True:
        if opening := OBJECT.match(incoming.text):
            incoming.cut(opening.end())
            yield from call_in_pieces(incoming, opening["name"])
            has_called = True
        elif incoming.is_last or (marks.end and marks.end in incoming.text):
            break
        else:
            yield None
    if has_called:
        text, _ = yield from up_to(incoming, [marks.end] if marks.end else [])
        if text := text.strip(REST):
            yield AnswerPart("said", text)
    return has_called


def _calls(incoming: UnreadText, syntax: AnswerSyntax, marks: Marks) -> Reading:
    if syntax.in_pieces and (yield from _calls_in_pieces(incoming, marks)):
        return
    text, end = yield from up_to(incoming, [marks.end] if marks.end else [])
    calls = None if marks.end and not end else _read(text, syntax)
    yield from calls or [AnswerPart("said", f"{marks.start}{text}{end}")]


def _listed(parsed: Any) -> list[Any]:
    return parsed if isinstance(parsed, list) else [parsed]


def _is_call(parsed: Any) -> bool:
    return isinstance(parsed, dict) and {"name", "arguments"} <= parsed.keys()


def _read(text: str, syntax: AnswerSyntax) -> list[AnswerPart] | None:
    """Return the calls in a text; None if it cannot be read."""
    assert syntax.format.parse is not None, "a model with marks has a parser"
    calls: Any = None
    with suppress(ValueError, RecursionError):
        calls = _listed(json.loads(text))
    try:
        if not calls or not all(map(_is_call, calls)):
            calls = _listed(syntax.format.parse(text, plainly_typed(syntax.tools)))
        return [
            whole_call(each["name"], each.get("arguments", each.get("parameters", {})))
            for each in calls
        ]
    except Exception:  # a parser may raise whatever it likes
        return None


def plainly_typed(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools of whose arguments mlx-lm's parsers can tell the type: most look for a ``type``
    and follow no references, so that an ``integer`` that may be ``null`` would come out as text."""
    typed = []
    for tool in tools:
        function = tool["function"]
        schema = function.get("parameters") or {}
        known = schema.get("properties")
        properties = known.items() if isinstance(known, dict) else ()
        parameters = {**schema, "properties": {name: _plain(e, schema) for name, e in properties}}
        typed.append({**tool, "function": {**function, "parameters": parameters}})
    return typed


def _plain(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return a schema within ``root`` without its reference, and without a choice if beside null
    it has a single one; null, where a text is expected, would be a text."""
    own = _referred(schema, root)
    choices = own.get("anyOf") if isinstance(own, dict) else None
    if not isinstance(choices, list):
        return own
    others = [_referred(each, root) for each in choices if each != {"type": "null"}]
    is_one = len(others) == 1 and isinstance(others[0], dict) and others[0].get("type") != "string"
    return others[0] if is_one else own


def _referred(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return what a schema within ``root`` refers to, if it does."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(reference, str):
        return schema
    return definition_in(root, reference) or {}


# Calls that are JSON within the text: those of Llama 3, and of models that know no tools.

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

JSON = json.JSONDecoder()

END = "</tool_call>"

AFTER = re.compile(rf"\A(?:[\s}}\]`;,]|{END})*")
"""Text after the arguments of a call."""


def json_answer(incoming: UnreadText, syntax: AnswerSyntax) -> Reading:
    """Yield the parts of an answer in which calls of known tools are JSON."""
    yield from beginning(incoming, syntax)
    names = (re.escape(tool["function"]["name"]) for tool in syntax.tools)
    opening = re.compile(LEAD + OPENING.format("|".join(names)))
    while incoming.text or not incoming.is_last:
        found = opening.search(incoming.text)
        length = found.start() if found else len(incoming.text) - _unclear(incoming)
        if text := incoming.cut(length):
            yield AnswerPart("said", text)
        if found:
            if syntax.in_pieces:
                incoming.cut(len(found[0]))
                yield from call_in_pieces(incoming, found["name"])
            else:
                yield from _json_call(incoming, found)
            yield from _closing(incoming)
        elif not incoming.is_last:
            yield None


def _json_call(incoming: UnreadText, opening: re.Match[str]) -> Reading:
    """Yield the call that begins here with its ``opening``; one that is cut off counts as said."""
    while True:
        with suppress(ValueError, RecursionError):
            _, end = JSON.raw_decode(incoming.text, len(opening[0]))
            yield whole_call(opening["name"], incoming.cut(end)[len(opening[0]) :])
            return
        if incoming.is_last:
            yield AnswerPart("said", incoming.cut(len(incoming.text)))
            return
        yield None


def _unclear(incoming: UnreadText) -> int:
    """Return how many characters at the end may be of what comes before a call."""
    if incoming.is_last:
        return 0
    marks = max(overlap(incoming.text, mark) for mark in BEFORE)
    opening = MAY_OPEN.search(incoming.text)
    return max(marks, len(opening[0]) if opening else 0)


def _closing(incoming: UnreadText) -> Reading:
    while True:
        incoming.text = AFTER.sub("", incoming.text)
        if incoming.is_last or not END.startswith(incoming.text):
            return
        yield None


# OpenAI's Harmony format, as gpt-oss writes it: several messages, each in a channel.
#
#     <|channel|>analysis<|message|>what it thinks<|end|>
#     <|start|>assistant<|channel|>final<|message|>what it says<|return|>
#
# A message to a function, in the channel "commentary", is a call; other text of that channel is
# said. The format: https://cookbook.openai.com/articles/openai-harmony.

BODY = "<|message|>"
"""The mark between the head of a message and its text."""

ENDS = ("<|end|>", "<|call|>", "<|return|>")

HEADS = ("<|channel|>", "<|start|>", BODY, " to=")
"""Beginnings of a head. An answer with another one, as by a grammar, has no messages."""

THOUGHTS = re.compile(r"<\|channel\|>\s*analysis\b")

FUNCTION = re.compile(r"\bto=functions\.(?P<name>[\w.:-]+)")


def harmony_answer(incoming: UnreadText, syntax: AnswerSyntax) -> Reading:
    """Yield the parts of an answer that is messages in channels."""
    while any(len(incoming.text) < len(head) and head.startswith(incoming.text) for head in HEADS):
        if incoming.is_last:
            return
        yield None
    if not incoming.text.startswith(HEADS):
        yield from passed_on(incoming, (), "said")
    while incoming.text or not incoming.is_last:
        head, mark, text = incoming.text.partition(BODY)
        if not mark and incoming.is_last:
            return
        if not mark:
            yield None
            continue
        incoming.text = text
        called = FUNCTION.search(head) if syntax.tools else None
        if called is not None and syntax.in_pieces and (yield from _is_object(incoming)):
            yield begun_call(called["name"])
            yield from passed_on(incoming, ENDS, "call")
        elif called is not None:
            text, _ = yield from up_to(incoming, ENDS)
            try:
                yield whole_call(called["name"], text)
            except (ValueError, TypeError, RecursionError):
                yield AnswerPart("said", text)
        else:
            yield from passed_on(incoming, ENDS, "thought" if THOUGHTS.search(head) else "said")


def _is_object(incoming: UnreadText) -> Generator[None, None, bool]:
    """Return whether what comes next is an object, after space."""
    yield from begins(incoming, None)
    return incoming.text.startswith("{")


class AnswerParser:
    """The parts of an answer up to a stop string in what is said. Without a syntax all is said.
    ``characters`` counts the text that it has taken in, with what is held back."""

    def __init__(self, syntax: AnswerSyntax | None, stop: Sequence[str] = ()) -> None:
        syntax = syntax or AnswerSyntax(continues=True)
        is_json = syntax.tools and syntax.format.call is None
        read = json_answer if is_json else marked_answer
        self._incoming = UnreadText()
        self._reading = (harmony_answer if syntax.format.has_channels else read)(
            self._incoming, syntax
        )
        self._stops = StopStrings(stop)
        self._calls = 0
        self._parallel = syntax.parallel
        self.characters = 0

    @property
    def stop(self) -> str | None:
        """The stop string that has ended what is said; None so far."""
        return self._stops.found

    def take(self, text: str, *, is_last: bool) -> Iterator[AnswerPart]:
        """Yield the parts that are known with this text; what may begin a mark is held back."""
        self._incoming.text += text
        self._incoming.is_last = is_last
        self.characters += len(text)
        for part in self._reading:
            if part is None or self.stop is not None:
                break
            if part.kind == "said":
                yield from self._said(part.text, is_last=False)
                continue
            yield from self._said("", is_last=True)
            self._calls += bool(part.id)
            if self._parallel or self._calls <= 1 or part.kind != "call":
                yield part
        if is_last and self.stop is None:
            yield from self._said("", is_last=True)

    def _said(self, text: str, *, is_last: bool) -> Iterator[AnswerPart]:
        if known := self._stops.take(text, is_last=is_last):
            yield AnswerPart("said", known)
