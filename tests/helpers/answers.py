"""The parts of an answer that comes in pieces, joined."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

from shardmlx.inference.answer_format import (
    GENERIC_CALLS,
    HARMONY,
    LLAMA3_CALLS,
    AnswerFormat,
    Marks,
    json_calls,
)
from shardmlx.server.answer_parser import AnswerParser, AnswerSyntax
from shardmlx.server.answer_parts import AnswerPart

BARE_JSON = {"llama3": LLAMA3_CALLS, "generic": GENERIC_CALLS}


def thought(text: str) -> AnswerPart:
    return AnswerPart("thought", text)


def said(text: str) -> AnswerPart:
    return AnswerPart("said", text)


def call(name: str, arguments: str) -> AnswerPart:
    return AnswerPart("call", arguments, name)


def parser_of(known: AnswerFormat, **syntax: Any) -> AnswerParser:
    return AnswerParser(AnswerSyntax(format=known, **syntax))


def parts_of(text: str, size: int, known: AnswerFormat, **syntax: Any) -> list[AnswerPart]:
    """The parts of a text that comes in pieces of this size: calls without ids, and those of a kind
    joined."""
    parser = parser_of(known, **syntax)
    joined: list[AnswerPart] = []
    for at in range(0, len(text), size):
        for part in parser.take(text[at : at + size], is_last=at + size >= len(text)):
            if joined and joined[-1].kind == part.kind and not part.id:
                joined[-1] = replace(joined[-1], text=joined[-1].text + part.text)
            else:
                joined.append(replace(part, id=""))
    return joined


def format_of(parser: str) -> AnswerFormat:
    """The format of a model whose calls this parser of mlx-lm reads, or none of its own does."""
    if parser == "gpt-oss":
        return HARMONY
    if parser in BARE_JSON:
        return AnswerFormat(calls=BARE_JSON[parser])
    module = import_module(f"mlx_lm.tool_parsers.{parser}")
    parse = module.parse_tool_call
    marks = Marks(module.tool_call_start, module.tool_call_end)
    return AnswerFormat(None, marks, parse, json_calls(marks))
