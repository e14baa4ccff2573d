"""What an answer thinks, says and calls, in whatever pieces it comes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from shardmlx.inference.answer_format import AnswerFormat, Marks
from shardmlx.inference.call_formats import call_format
from shardmlx.server.answer_parts import AnswerParts, Call, MoreArguments, Part, Said, Thought

THINK = Marks("<think>", "</think>")
CALLS = Marks("<tool_call>", "</tool_call>")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
WHOLE = AnswerFormat(THINK, CALLS, lambda text, tools: json.loads(text))
"""Of calls nothing is known but that they can be read once they are whole."""
JSON = replace(WHOLE, calls=call_format("mlx_lm.tool_parsers.json_tools", ""))


def parts_of(text: str, size: int, known: AnswerFormat = JSON, **options: Any) -> list[Part]:
    """The parts of a text that comes in pieces of this size; those of a kind are joined."""
    parts = AnswerParts(known, **{"tools": [TOOL], **options})
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    joined: list[Part] = []
    for number, piece in enumerate(pieces, start=1):
        for part in parts.take(piece, is_last=number == len(pieces)):
            last = joined[-1] if joined else None
            if isinstance(part, Said) and isinstance(last, Said):
                joined[-1] = Said(last.text + part.text)
            elif isinstance(part, Thought) and isinstance(last, Thought):
                joined[-1] = Thought(last.text + part.text)
            elif isinstance(part, MoreArguments) and isinstance(last, Call):
                joined[-1] = replace(last, arguments=last.arguments + part.text)
            else:
                joined.append(part)
    return joined


def call(name: str, **arguments: Any) -> Call:
    return Call(name, json.dumps(arguments), "")


def told(parts: list[Part]) -> list[Part]:
    """Parts without the ids of their calls."""
    return [
        Call(each.name, each.arguments, "") if isinstance(each, Call) else each for each in parts
    ]


LOOK = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
HEAR = '<tool_call>{"name": "hear", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("known", [JSON, WHOLE], ids=["in pieces", "whole"])
@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Aye!", [Said("Aye!")]),
        ("<think>\nHm.\n\nYes.\n</think>\n\nAye!\n", [Thought("Hm.\n\nYes."), Said("Aye!\n")]),
        ("\n<think></think>Aye", [Said("Aye")]),
        ("I <think> so</think>", [Said("I <think> so</think>")]),
        ("a < b, <thin, <tool", [Said("a < b, <thin, <tool")]),
        (LOOK, [call("look", at="sea")]),
        (f"I look.{LOOK}", [Said("I look."), call("look", at="sea")]),
        (f"{LOOK}\n{HEAR}\n", [call("look", at="sea"), call("hear")]),
        (f"<think>so</think>\n{HEAR} ok ", [Thought("so"), call("hear"), Said("ok")]),
        ("<tool_call>{oops</tool_call>!", [Said("<tool_call>{oops</tool_call>!")]),
        ('<tool_call>{"name": "lo', [Said('<tool_call>{"name": "lo')]),
        ("<think>for ever", [Thought("for ever")]),
    ],
)
def test_parts(text: str, size: int, parts: list[Part], known: AnswerFormat) -> None:
    assert told(parts_of(text, size, known)) == parts


def test_arguments_come_while_they_are_written() -> None:
    """What stands in a text of theirs is no mark and no brace."""
    arguments = r'{"at": "a } \" </tool_call> \\", "in": {"x": [1]}}'
    parts = AnswerParts(JSON, [TOOL])
    begun = [
        *parts.take(f'<tool_call>{{"name": "look", "arguments": {arguments[:9]}', is_last=False)
    ]
    assert begun[1:] == [MoreArguments(arguments[:9])]
    for character in arguments[9:]:
        assert [*parts.take(character, is_last=False)] == [MoreArguments(character)]
    assert [*parts.take("}</tool_call>\nSo", is_last=True)] == [Said("So")]


@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_that_is_cut_off_has_the_arguments_that_came(size: int) -> None:
    assert told(parts_of(LOOK[:-17], size)) == [Call("look", '{"at": "se', "")]


@pytest.mark.parametrize("size", [1, 1000])
def test_a_template_may_have_begun_the_thought(size: int) -> None:
    parts = parts_of("Hm.\n</think>\n\nAye!", size, is_thinking=True)
    assert parts == [Thought("Hm."), Said("Aye!")]


@pytest.mark.parametrize("size", [1, 1000])
def test_after_a_thought_what_is_exact_is_said_to_the_letter(size: int) -> None:
    text = "Hm.</think> <think>\n</think>"
    parts = parts_of(text, size, is_thinking=True, is_exact=True, tools=[])
    assert parts == [Thought("Hm."), Said(" <think>\n</think>")]


def test_without_tools_nothing_is_a_call() -> None:
    assert parts_of(HEAR, 3, tools=[]) == [Said(HEAR)]


def test_one_call_alone_where_they_may_not_be_parallel() -> None:
    assert told(parts_of(LOOK + HEAR, 5, parallel=False)) == [call("look", at="sea")]


def test_ids_are_such_as_mistrals_template_takes() -> None:
    first, second = (each.id for each in parts_of(LOOK + HEAR, 5) if isinstance(each, Call))
    assert first != second
    assert all(re.fullmatch(r"[a-zA-Z0-9]{9}", each) for each in (first, second))


@pytest.mark.parametrize(
    "parsed", [{"arguments": {}}, {"name": 3}, {"name": "a", "arguments": [1]}, "a", None]
)
def test_what_a_parser_makes_of_nonsense_is_no_call(parsed: Any) -> None:
    known = AnswerFormat(None, CALLS, lambda text, tools: parsed)
    assert parts_of(HEAR, 1000, known) == [Said(HEAR)]


FORMATS = {
    "json_tools": HEAR.replace("hear", "look").replace("{}", '{"at": "sea"}'),
    "mistral": '[TOOL_CALLS][{"name": "look", "arguments": {"at": "sea"}}]',
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=at>\nsea\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm47": "<tool_call>look<arg_key>at</arg_key><arg_value>sea</arg_value></tool_call>",
    "pythonic": '<|tool_call_start|>[look(at="sea")]<|tool_call_end|>',
    "function_gemma": "<start_function_call>call:look{at:<escape>sea<escape>}<end_function_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
    '<|tool_call_argument_begin|>{"at": "sea"}<|tool_call_end|><|tool_calls_section_end|>',
    "longcat": "<longcat_tool_call>look<longcat_arg_key>at</longcat_arg_key>"
    "<longcat_arg_value>sea</longcat_arg_value></longcat_tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">sea</parameter>'
    "\n</invoke>\n</minimax:tool_call>",
    "mistral with marks": '[TOOL_CALLS]look[ARGS]{"at": "sea"}',
    "gemma4": '<|tool_call>call:look{at:<|"|>sea<|"|>}<tool_call|>',
}


def format_of(name: str) -> AnswerFormat:
    """The format that a model has whose calls look like that."""
    parser = import_module(f"mlx_lm.tool_parsers.{name.partition(' ')[0]}")
    marks = Marks(parser.tool_call_start, parser.tool_call_end)
    return AnswerFormat(
        None, marks, parser.parse_tool_call, call_format(parser.__name__, FORMATS[name])
    )


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("name", FORMATS)
def test_formats_that_mlx_lm_reads(name: str, size: int) -> None:
    known = format_of(name)
    assert told(parts_of("So.\n" + FORMATS[name], size, known)) == [
        Said("So.\n"),
        call("look", at="sea"),
    ]
