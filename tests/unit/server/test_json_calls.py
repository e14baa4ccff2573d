"""Calls that are JSON within what is said, over every API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anthropic
import openai
import pytest

from shardmlx.inference.answer_format import AnswerFormat
from shardmlx.inference.call_formats import GENERIC_CALLS, LLAMA3_CALLS, CallFormat
from tests.helpers.http_serving import MODEL, Letters, serving

SCHEMA: Mapping[str, Any] = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("look", "hear")
]


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
