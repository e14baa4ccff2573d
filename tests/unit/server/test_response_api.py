"""OpenAI's Responses API, by its own package, against a model that repeats."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.helpers.http_serving import MODEL, Agent, Serving, serving

LOOK: Any = {
    "type": "function",
    "name": "look",
    "description": "Look at something",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    "strict": True,
}
CALL = '<think>Hm</think>I look<tool_call>{"name": "look", "arguments": {"at": "sea"}}</tool_call>.'


def test_a_text(client: openai.OpenAI, agent: Agent) -> None:
    answer = client.responses.create(
        model=MODEL,
        input="hello.",
        instructions="Be brief.",
        store=True,
        reasoning={"effort": "low"},
    )
    assert (answer.status, answer.output_text, answer.model) == ("completed", "hello", MODEL)
    assert answer.model_dump(exclude_none=True)["usage"] == {
        "input_tokens": 6,
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    }
    assert agent.messages[0] == {"role": "system", "content": "Be brief."}
    cut = client.responses.create(model=MODEL, input="hello", max_output_tokens=2)
    assert (cut.status, cut.output_text) == ("incomplete", "he")
    assert cut.incomplete_details.reason == "max_output_tokens"


def told(response: Any) -> list[Any]:
    thought, said, call = response.output
    return [
        (thought.type, thought.content[0].text),
        (said.type, said.content[0].text),
        (call.type, call.name, json.loads(call.arguments)),
    ]


PARTS = [("reasoning", "Hm"), ("message", "I look"), ("function_call", "look", {"at": "sea"})]


def test_thought_text_and_calls_are_items(client: openai.OpenAI) -> None:
    assert told(client.responses.create(model=MODEL, input=CALL, tools=[LOOK])) == PARTS


def test_the_same_as_events_which_the_package_collects(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input=CALL, tools=[LOOK]) as stream:
        events = list(stream)
        assert told(stream.get_final_response()) == PARTS
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert kinds[-1] == "completed"
    assert [kind for kind in dict.fromkeys(kinds) if kind.endswith("done")] == [
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_text.done",
        "function_call_arguments.done",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_round_trip(client: openai.OpenAI, agent: Agent) -> None:
    """All items of an answer are one message to the template."""
    answer = client.responses.create(model=MODEL, input=CALL, tools=[LOOK])
    call: Any = answer.output[2]
    history: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "?"}]},
        *(item.model_dump() for item in answer.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "fog."},
    ]
    client.responses.create(model=MODEL, input=history, tools=[LOOK])
    function = {"name": "look", "arguments": {"at": "sea"}}
    assert agent.messages == [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": "I look",
            "reasoning_content": "Hm",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "content": "fog.", "tool_call_id": call.call_id},
    ]


def test_a_structure_may_be_asked_for(client: openai.OpenAI, served: Serving) -> None:
    schema = {"type": "object", "properties": {"depth": {"type": "integer"}}}
    form: Any = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    answer = client.responses.create(model=MODEL, input="?.", text={"format": form})
    assert '"depth"' in str(served.parrot.added[-1].sampling.grammar)
    assert answer.text.format.name == "x"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look"}])
def test_a_call_may_be_asked_for(client: openai.OpenAI, served: Serving, choice: Any) -> None:
    """By a grammar, and the response says what was asked; so does each event that has it."""
    how: Any = {"model": MODEL, "input": CALL, "tools": [LOOK], "tool_choice": choice}
    more: Any = {"instructions": "Look.", "max_output_tokens": 200, "parallel_tool_calls": False}
    answer = client.responses.create(**how, **more)
    assert '\\"look\\"' in str(served.parrot.added[-1].sampling.grammar)
    assert answer.output[-1].name == "look"
    first, *_ = client.responses.create(**how, **more, stream=True)
    for said in (answer.model_dump(), first.response.model_dump()):
        assert {name: said[name] for name in ("tool_choice", *more)} == {
            "tool_choice": choice,
            **more,
        }
    assert client.responses.create(model=MODEL, input="?.").tool_choice == "auto"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported by this serv"),
        ({"background": True}, "background is not supported by this server"),
        ({"truncation": "auto"}, "truncation is not supported by this server"),
        (
            {"tools": [{"type": "web_search"}]},
            "tools.0: tools of type 'web_search' run on Open",
        ),
        ({"input": [{"type": "image_generation_call"}]}, "input.0: an item of type 'image_genera"),
        (
            {"tools": [LOOK], "tool_choice": {"type": "function", "name": "hear"}},
            "tool_choice: 'hear' is none of the tools",
        ),
        ({"tools": [LOOK], "tool_choice": {"type": "web_search"}}, "tool_choice {'type': 'web_s"),
        ({"input": 5}, "input"),
    ],
)
def test_what_is_refused(client: openai.OpenAI, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": MODEL, "input": "?", **asked})
    assert caught.value.body["message"].startswith(message)


def test_a_stream_that_fails_says_so() -> None:
    with serving(reader=Agent()) as server:
        server.parrot.fails = "a fault"
        body = {"input": "hello.", "stream": True}
        text = httpx.post(f"{server.address}/v1/responses", json=body).text
    last = text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\n")
    assert "no text is generated any more: a fault" in last
