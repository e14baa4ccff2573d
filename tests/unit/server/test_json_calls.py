"""Calls that are JSON within what is said, in whatever pieces it comes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import anthropic
import openai
import pytest

from shardmlx.inference.answer_format import AnswerFormat, Marks
from shardmlx.inference.call_formats import GENERIC_CALLS, LLAMA3_CALLS, CallFormat
from shardmlx.server.answer_parts import Call, MoreArguments, Said, Thought
from shardmlx.server.json_calls import JsonParts
from tests.helpers.http_serving import MODEL, Letters, serving

SCHEMA: Mapping[str, Any] = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("look", "hear")
]
LOOK = '{"name": "look", "arguments": {"at": "a }\\" sea"}}'
HEAR = '{"type": "function", "name": "hear", "parameters": {"in": {}}}'
SEEN = ("look", '{"at": "a }\\" sea"}')
HEARD = ("hear", '{"in": {}}')


def told(text: str, size: int, **options: Any) -> list[Any]:
    """Thoughts, words and calls of a text that comes in pieces of this size."""
    known = AnswerFormat(Marks("<think>", "</think>"), calls=GENERIC_CALLS)
    parts = JsonParts(known, TOOLS, **options)
    joined: list[Any] = []
    last: Any
    for at in range(0, len(text), size):
        for part in parts.take(text[at : at + size], is_last=at + size >= len(text)):
            last = joined[-1] if joined else None
            match part:
                case Call():
                    joined.append((part.name, ""))
                case MoreArguments():
                    joined[-1] = (last[0], last[1] + part.text)
                case Said() if isinstance(last, str):
                    joined[-1] += part.text
                case Said():
                    joined.append(part.text)
                case Thought() if isinstance(last, Thought):
                    joined[-1] = Thought(last.text + part.text)
                case Thought():
                    joined.append(part)
    return joined


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Aye!\n", ["Aye!\n"]),
        (LOOK, [SEEN]),
        (f"I look.\n\n{LOOK}", ["I look.", SEEN]),
        (f"{LOOK}\n{HEAR}\n", [SEEN, HEARD]),
        (f"[{LOOK}, {HEAR}]", [SEEN, HEARD]),
        (f"<|python_tag|>{LOOK}; {HEAR}", [SEEN, HEARD]),
        (f"```json\n{LOOK}\n```\nSo.", [SEEN, "So."]),
        (f"<tool_call>\n{LOOK}\n</tool_call>\n<tool_call>{HEAR}</tool_call>", [SEEN, HEARD]),
        (f"<think>so {{</think>\n{LOOK} ok", [Thought("so {"), SEEN, "ok"]),
        (LOOK[:-7], [("look", '{"at": "a }\\"')]),
        ('{"name": "look", "arg', ['{"name": "look", "arg']),
        ('{"name": "John", "arguments": {}}', ['{"name": "John", "arguments": {}}']),
        ("code { return 1 } [1, 2] ```x``` [", ["code { return 1 } [1, 2] ```x``` ["]),
        ("a <|python_tag|>print(1)", ["a <|python_tag|>print(1)"]),
    ],
)
def test_parts(text: str, parts: list[Any], size: int) -> None:
    assert told(text, size) == parts


def test_one_call_alone_where_they_may_not_be_parallel() -> None:
    assert told(f"{LOOK}\n{HEAR}", 5, parallel=False) == [SEEN]


def test_words_are_not_held_back() -> None:
    parts = JsonParts(AnswerFormat(calls=GENERIC_CALLS), TOOLS)
    said = "A set { 1, 2 } has two."
    given = [[*parts.take(character, is_last=False)] for character in said]
    assert [each.text for some in given for each in some if isinstance(each, Said)]
    assert given[said.index("1")] == [Said(" { 1")]


@pytest.mark.parametrize("unit", ["\n", "[", " [", "```", "{", '{"name": "', ":", "{}"])
def test_an_answer_that_repeats_itself_takes_time_that_grows_with_it_alone(unit: str) -> None:
    parts = JsonParts(AnswerFormat(calls=GENERIC_CALLS), TOOLS)
    began = time.process_time()
    said = [part for _ in range(2000) for part in parts.take(unit, is_last=False)]
    said += parts.take("", is_last=True)
    assert time.process_time() - began < 3
    assert "".join(part.text for part in said if isinstance(part, Said)) == (2000 * unit).lstrip()


class Told(Letters):
    """A reader for a model that writes calls as JSON."""

    def __init__(self, calls: CallFormat) -> None:
        self.answer_format = AnswerFormat(calls=calls)


@pytest.mark.parametrize("calls", [GENERIC_CALLS, LLAMA3_CALLS], ids=lambda each: each.way)
def test_every_api_and_the_list_of_models_know_the_way(calls: CallFormat) -> None:
    said = '{"name": "look", "parameters": {"at": "sea"}}.'
    asked: Any = [{"role": "user", "content": said}]
    with (
        serving(reader=Told(calls), complaint=lambda grammar: "") as server,
        openai.OpenAI(base_url=f"{server.address}/v1", api_key="x", max_retries=0) as client,
        anthropic.Anthropic(base_url=server.address, api_key="x", max_retries=0) as other,
    ):
        assert client.models.list().data[0].model_extra == {
            "max_model_len": 1000,
            "tools": calls.way,
        }
        for choice in ("auto", "required"):
            completion = client.chat.completions.create(
                model=MODEL, messages=asked, tools=TOOLS, tool_choice=choice
            )
            (call,) = completion.choices[0].message.tool_calls
            assert (call.function.name, call.function.arguments) == ("look", '{"at": "sea"}')
            grammar = server.parrot.added[-1].sampling.grammar
            assert (grammar is not None) == (choice == "required")
        assert calls.before.format("look") in str(grammar).replace("\\", "")
        response = client.responses.create(
            model=MODEL, input=said, tools=[{"type": "function", **TOOLS[0]["function"]}]
        )
        assert [(item.type, item.arguments) for item in response.output] == [
            ("function_call", '{"at": "sea"}')
        ]
        message = other.messages.create(
            model=MODEL,
            max_tokens=99,
            messages=asked,
            tools=[{"name": "look", "input_schema": dict(SCHEMA)}],
            tool_choice={"type": "any"},
        )
        assert [(block.type, block.input) for block in message.content] == [
            ("tool_use", {"at": "sea"})
        ]


def test_an_answer_has_a_structure_or_is_a_call() -> None:
    shape: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    with (
        serving(reader=Told(GENERIC_CALLS), complaint=lambda grammar: "") as server,
        openai.OpenAI(base_url=f"{server.address}/v1", api_key="x", max_retries=0) as client,
    ):
        for said in ('{"name": "Paris"}', LOOK):
            asked: Any = [{"role": "user", "content": f"{said}."}]
            choice = client.chat.completions.create(
                model=MODEL, messages=asked, tools=TOOLS, response_format=shape
            ).choices[0]
            called = [
                (each.function.name, each.function.arguments)
                for each in choice.message.tool_calls or []
            ]
            assert (choice.message.content, called) == (
                (None, [SEEN]) if said is LOOK else (said, [])
            )
            grammar = str(server.parrot.added[-1].sampling.grammar)
            assert {"body: said | calls", "start: body"} <= set(grammar.split("\n"))


def test_arguments_are_streamed_as_they_come() -> None:
    said: Any = [{"role": "user", "content": f"{LOOK}."}]
    with (
        serving(reader=Told(GENERIC_CALLS)) as server,
        openai.OpenAI(base_url=f"{server.address}/v1", api_key="x", max_retries=0) as client,
    ):
        pieces = [
            call.function.arguments
            for chunk in client.chat.completions.create(
                model=MODEL, messages=said, tools=TOOLS, stream=True
            )
            for call in chunk.choices[0].delta.tool_calls or []
        ]
    assert json.loads("".join(pieces)) == {"at": 'a }" sea'}
    assert len(pieces) == 1 + len(SEEN[1].replace(" ", ""))  # space comes with what follows it
