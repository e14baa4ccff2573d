"""What an answer thinks, says and calls, in each format, in whatever pieces it comes."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from shardmlx.inference.answer_format import (
    GENERIC_CALLS,
    HARMONY,
    AnswerFormat,
    Marks,
    json_calls,
)
from shardmlx.server.answer_parts import AnswerPart, whole_call
from tests.helpers.answers import call, parser_of, parts_of, said, thought

THINK = Marks("<think>", "</think>")
CALLS = Marks("<tool_call>", "</tool_call>")
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("look", "hear")
]
JSON = AnswerFormat(THINK, CALLS, lambda text, tools: json.loads(text), json_calls(CALLS))
IN_TEXT = AnswerFormat(THINK, calls=GENERIC_CALLS)


LOOK = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
LOOKS, HEARS = call("look", '{"at": "sea"}'), call("hear", "{}")
HEAR = '<tool_call>{"name": "hear", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Aye!", [said("Aye!")]),
        ("<think>\nHm.\n\nYes.\n</think>\n\nAye!\n", [thought("Hm.\n\nYes."), said("Aye!\n")]),
        ("\n<think></think>Aye", [said("Aye")]),
        ("I <think> so</think>", [said("I <think> so</think>")]),
        ("a < b, <thin, <tool", [said("a < b, <thin, <tool")]),
        (LOOK, [LOOKS]),
        (f"I look.{LOOK}", [said("I look."), LOOKS]),
        (f"{LOOK}\n{HEAR}\n", [LOOKS, HEARS]),
        (f"<think>so</think>\n{HEAR} ok ", [thought("so"), HEARS, said("ok")]),
        (f"{HEAR}<think>so</think>{HEAR}", [HEARS, thought("so"), HEARS]),
        ("<tool_call>{oops</tool_call>!", [said("<tool_call>{oops</tool_call>!")]),
        ('<tool_call>{"name": "lo', [said('<tool_call>{"name": "lo')]),
        ("<think>for ever", [thought("for ever")]),
    ],
)
def test_calls_between_marks(text: str, size: int, parts: list[AnswerPart]) -> None:
    assert parts_of(text, size, JSON, tools=TOOLS) == parts


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (LOOK, [LOOKS]),
        (f"I look.{LOOK}", [said("I look."), LOOKS]),
        (f"{LOOK}\n{HEAR}\n", [LOOKS, HEARS]),
        (f"<think>so</think>\n{HEAR} ok ", [thought("so"), HEARS, said("ok")]),
        ('<tool_call>{"name": "look", "arguments": {"a": "}\\""}, "id": 1}</tool_call>', None),
        ('<tool_call>{"arguments": {"at": "sea"}, "name": "look"}</tool_call>', [LOOKS]),
        ("<tool_call>{oops</tool_call>!", [said("<tool_call>{oops</tool_call>!")]),
        ('<tool_call>{"name": "lo', [said('<tool_call>{"name": "lo')]),
        ('<tool_call>{"name": "look", "arguments": {"at": "se', [call("look", '{"at": "se')]),
    ],
)
def test_arguments_between_marks_in_pieces(
    text: str, size: int, parts: list[AnswerPart] | None
) -> None:
    found = parts_of(text, size, JSON, tools=TOOLS, in_pieces=True)
    assert found == (parts or [call("look", '{"a": "}\\""}'), said('"id": 1')])


LISTED = AnswerFormat(None, Marks("[TOOL_CALLS]", ""), lambda text, tools: json.loads(text))
SEVERAL = (
    '[TOOL_CALLS][{"name": "look", "arguments": {"at": "sea"}}, {"name": "hear", "arguments": {}}]'
)


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_list_of_calls(size: int, in_pieces: bool) -> None:
    assert parts_of(SEVERAL, size, LISTED, tools=TOOLS, in_pieces=in_pieces) == [LOOKS, HEARS]


def test_pieces_come_as_soon_as_they_are_there() -> None:
    parser = parser_of(JSON, tools=TOOLS, in_pieces=True)
    steps = ['<tool_call>{"name": "look", "argu', 'ments": {"at"', ': "s', 'ea"}', "}</tool_call>"]
    found = [[*parser.take(step, is_last=step == steps[-1])] for step in steps]
    assert [[(part.name, part.text) for part in parts] for parts in found] == [
        [],
        [("look", ""), ("", '{"at"')],
        [("", ': "s')],
        [("", 'ea"}')],
        [],
    ]


def test_only_the_first_call_counts_where_one_is_taken_in_pieces_too() -> None:
    alone = parts_of(f"{LOOK}{HEAR}", 3, JSON, tools=TOOLS, in_pieces=True, parallel=False)
    assert alone == [LOOKS]


BARE_LOOK = '{"name": "look", "arguments": {"at": "a }\\" sea"}}'
BARE_HEAR = '{"type": "function", "name": "hear", "parameters": {"in": {}}}'
SEEN, HEARD = call("look", '{"at": "a }\\" sea"}'), call("hear", '{"in": {}}')


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Aye!\n", [said("Aye!\n")]),
        (BARE_LOOK, [SEEN]),
        (f"I look.\n\n{BARE_LOOK}", [said("I look."), SEEN]),
        (f"{BARE_LOOK}\n{BARE_HEAR}\n", [SEEN, HEARD]),
        (f"[{BARE_LOOK}, {BARE_HEAR}]", [SEEN, HEARD]),
        (f"<|python_tag|>{BARE_LOOK}; {BARE_HEAR}", [SEEN, HEARD]),
        (f"```json\n{BARE_LOOK}\n```\nSo.", [SEEN, said("So.")]),
        (
            f"<tool_call>\n{BARE_LOOK}\n</tool_call>\n<tool_call>{BARE_HEAR}</tool_call>",
            [SEEN, HEARD],
        ),
        (f"<think>so {{</think>\n{BARE_LOOK} ok", [thought("so {"), SEEN, said("ok")]),
        (f"So: {BARE_LOOK[:-7]}", [said(f"So: {BARE_LOOK[:-7]}")]),
        *(
            (text, [said(text)])
            for text in (
                '{"name": "look", "arg',
                '{"name": "John", "arguments": {}}',
                "code { return 1 } [1, 2] ```x``` [",
                "a <|python_tag|>print(1)",
            )
        ),
    ],
)
def test_calls_within_text(text: str, parts: list[AnswerPart], size: int) -> None:
    assert parts_of(text, size, IN_TEXT, tools=TOOLS) == parts
    if not text.startswith("So: {"):  # cut off
        assert parts_of(text, size, IN_TEXT, tools=TOOLS, in_pieces=True) == parts


THINKS = "<|channel|>analysis<|message|>Hm < 3 <|e<|end|><|start|>assistant"
SAYS = "<|channel|>final<|message|>Aye!"
CHANNEL = (
    '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "sea"}<|call|>'
)
OTHER_WAY = ' to=functions.look<|channel|>commentary json<|message|>{"at": "sea"}'
HM = thought("Hm < 3 <|e")


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (SAYS, [said("Aye!")]),
        (THINKS + SAYS, [HM, said("Aye!")]),
        (THINKS + CHANNEL, [HM, LOOKS]),
        (THINKS + OTHER_WAY, [HM, LOOKS]),
        (
            f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CHANNEL}",
            [said("I look."), LOOKS],
        ),
        (THINKS[: THINKS.index(" <|e")], [thought("Hm < 3")]),
        ('{"day": "mon"}', [said('{"day": "mon"}')]),
        ("<", []),
    ],
)
def test_messages_in_channels(text: str, size: int, parts: list[AnswerPart]) -> None:
    for in_pieces in (False, True):
        assert parts_of(text, size, HARMONY, tools=TOOLS, in_pieces=in_pieces) == parts


CUT = CHANNEL.index("sea")


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("known", "text", "parts"),
    [
        (JSON, LOOK[:-17], [said(LOOK[:-17])]),
        (HARMONY, CHANNEL[:CUT], [said('{"at": "')]),
        (HARMONY, CHANNEL.replace("}", ""), [said('{"at": "sea"')]),
    ],
)
def test_a_call_that_is_cut_off_is_text(
    known: AnswerFormat, text: str, parts: list[AnswerPart], size: int
) -> None:
    """Nobody shall run it."""
    assert parts_of(text, size, known, tools=TOOLS) == parts


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("text", "syntax", "parts"),
    [
        ("Hm.\n</think>\n\nAye!", {"tools": TOOLS}, [thought("Hm."), said("Aye!")]),
        (
            "Hm.</think> <think>\n</think>",
            {"continues": True},
            [thought("Hm."), said(" <think>\n</think>")],
        ),
    ],
    ids=["any", "to the letter"],
)
def test_a_template_may_have_begun_the_thought(
    text: str, syntax: dict[str, Any], parts: list[AnswerPart], size: int
) -> None:
    assert parts_of(text, size, JSON, is_thinking=True, **syntax) == parts


@pytest.mark.parametrize(
    ("known", "text", "told"),
    [(JSON, HEAR, HEAR), (IN_TEXT, BARE_HEAR, BARE_HEAR), (HARMONY, CHANNEL, '{"at": "sea"}')],
)
def test_without_tools_nothing_is_a_call(known: AnswerFormat, text: str, told: str) -> None:
    assert parts_of(text, 3, known) == [said(told)]


@pytest.mark.parametrize(
    ("known", "text"),
    [
        (JSON, LOOK + HEAR),
        (IN_TEXT, f"{LOOK}\n{BARE_HEAR}"),
        (HARMONY, f"{CHANNEL}<|start|>assistant{CHANNEL}"),
    ],
)
def test_one_call_alone_where_they_may_not_be_parallel(known: AnswerFormat, text: str) -> None:
    assert parts_of(text, 5, known, tools=TOOLS, parallel=False) == [LOOKS]


def test_ids_are_such_as_mistrals_template_takes() -> None:
    came = parser_of(JSON, tools=TOOLS).take(LOOK + HEAR, is_last=True)
    first, second = (each.id for each in came if each.id)
    assert first != second
    assert all(re.fullmatch(r"[a-zA-Z0-9]{9}", each) for each in (first, second))


@pytest.mark.parametrize(
    "parsed", [{"arguments": {}}, {"name": 3}, {"name": "a", "arguments": [1]}, "a", None]
)
def test_what_a_parser_makes_of_nonsense_is_no_call(parsed: Any) -> None:
    known = AnswerFormat(None, CALLS, lambda text, tools: parsed)
    text = "<tool_call>hear</tool_call>"
    assert parts_of(text, 1000, known, tools=TOOLS) == [said(text)]


def test_words_are_not_held_back() -> None:
    parser = parser_of(IN_TEXT, tools=TOOLS)
    text = "A set { 1, 2 } has two."
    given = [[*parser.take(character, is_last=False)] for character in text]
    assert given[text.index("1")] == [said(" { 1")]


@pytest.mark.parametrize("unit", ["\n", "[", " [", "```", "{", '{"name": "', ":", "{}"])
def test_an_answer_that_repeats_itself_takes_time_that_grows_with_it_alone(unit: str) -> None:
    parser = parser_of(IN_TEXT, tools=TOOLS)
    began = time.process_time()
    parts = [part for _ in range(2000) for part in parser.take(unit, is_last=False)]
    parts += parser.take("", is_last=True)
    assert time.process_time() - began < 3
    assert "".join(part.text for part in parts if part.kind == "said") == (2000 * unit).lstrip()


def test_a_call_has_no_half_of_a_character() -> None:
    """A client would have to send it back, which UTF-8 cannot."""
    written = r'{"at": "\ud83d", "on": "\ud83d\ude00", "by": "\\ud83d"}'
    expected = {"at": "\ufffd", "on": "\N{GRINNING FACE}", "by": "\\ud83d"}
    for arguments in (written, json.loads(written)):
        made = whole_call("look", arguments)
        assert json.loads(made.text) == expected
        made.text.encode()
