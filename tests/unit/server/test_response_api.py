"""OpenAI's Responses API, by its own package, against a model that repeats."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.helpers.http_serving import CALL, KEY, MODEL, Agent, Serving
from tests.helpers.http_serving import LOOK as TOOL

LOOK: Any = {"type": "function", **TOOL, "strict": True}
USER: Any = {"type": "message", "role": "user", "content": "?"}


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


@pytest.mark.parametrize(
    ("said", "most", "statuses"),
    [
        ("hello", 2, ["incomplete"]),
        ("<think>Hm</think>I look", 9, ["incomplete"]),  # in the thought
        ("<think>Hm</think>I look", 20, ["completed", "incomplete"]),
        (CALL, len(CALL) - 1, ["completed", "completed", "completed"]),  # after a whole call
        ("<think>Hm</think>I.", 30, ["completed", "completed"]),
    ],
)
def test_what_is_cut_is_an_incomplete_item(
    client: openai.OpenAI, said: str, most: int, statuses: list[str]
) -> None:
    asked: Any = {"model": MODEL, "input": said, "max_output_tokens": most, "tools": [LOOK]}
    whole = client.responses.create(**asked)
    *events, last = client.responses.create(**asked, stream=True)
    assert [item.status for item in whole.output] == statuses
    assert [item.status for item in last.response.output] == statuses
    done = [each.item.status for each in events if each.type == "response.output_item.done"]
    assert done == statuses
    is_cut = most < len(said)
    assert whole.status == last.response.status == ("incomplete" if is_cut else "completed")


def told(response: Any) -> list[Any]:
    thought, said, call = response.output
    return [
        (thought.type, thought.content[0].text),
        (said.type, said.content[0].text),
        (call.type, call.name, json.loads(call.arguments)),
    ]


PARTS = [("reasoning", "Hm"), ("message", "I look"), ("function_call", "look", {"at": "sea"})]


def test_items_and_the_same_as_events_which_the_package_collects(client: openai.OpenAI) -> None:
    assert told(client.responses.create(model=MODEL, input=CALL, tools=[LOOK])) == PARTS
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


def function_in(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>.'


PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
}
IN_NAMESPACE: Any = {
    "type": "namespace",
    "name": "mcp__notes__",
    "description": "Notes",
    "tools": [{**LOOK, "name": "find"}],
}
FIND: Any = {"type": "tool_search", "execution": "client", "parameters": LOOK["parameters"]}

CLIENTS_OWN = [
    (
        PATCH,
        function_in("apply_patch", '{"input": "x"}'),
        {"type": "custom_tool_call", "name": "apply_patch", "input": "x"},
        {"name": "apply_patch", "arguments": {"input": "x"}},
    ),
    (
        FIND,
        function_in("tool_search", '{"at": "sea"}'),
        {"type": "tool_search_call", "execution": "client", "arguments": {"at": "sea"}},
        {"name": "tool_search", "arguments": {"at": "sea"}},
    ),
    (
        IN_NAMESPACE,
        function_in("mcp__notes__find", '{"at": "sea"}'),
        {
            "type": "function_call",
            "name": "find",
            "namespace": "mcp__notes__",
            "arguments": '{"at": "sea"}',
        },
        {"name": "mcp__notes__find", "arguments": {"at": "sea"}},
    ),
]
"""Tools that a client runs, calls of them in an answer, as items, and as a template has them."""


@pytest.mark.parametrize(("tool", "said", "item", "function"), CLIENTS_OWN)
def test_tools_that_the_client_runs(
    client: openai.OpenAI, agent: Agent, tool: Any, said: str, item: Any, function: Any
) -> None:
    """Their calls come as items of their kind, and go back as such."""
    whole = client.responses.create(model=MODEL, input=said, tools=[tool])
    with client.responses.stream(model=MODEL, input=said, tools=[tool]) as stream:
        *_, last = stream
    for response in (whole, last.response):
        (call,) = response.output
        told = call.model_dump(exclude_none=True)
        assert {name: told.get(name) for name in item} == item
        assert (told["status"], bool(told["call_id"])) == ("completed", True)
    kind = item["type"]
    output = "tool_search_output" if kind == "tool_search_call" else f"{kind}_output"
    result = {"type": output, "call_id": told["call_id"], "output": "fog.", "tools": [LOOK]}
    history: Any = [USER, told, result, {"role": "user", "content": "So?."}]
    client.responses.create(model=MODEL, input=history, tools=[tool])
    _, called, answered, _ = agent.messages
    assert called["tool_calls"][0]["function"] == function
    assert answered["tool_call_id"] == called["tool_calls"][0]["id"]
    names = [each["function"]["name"] for each in agent.tools]
    assert names == [function["name"], *(["look"] if kind == "tool_search_call" else [])]


CODEX: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You are Codex.",
    "input": [
        {"type": "message", "role": "developer",
         "content": [{"type": "input_text", "text": "Sandbox: none."}]},
        {"type": "message", "role": "user",
         "content": [{"type": "input_text", "text": "<environment_context/>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi."}]},
    ],
    "tools": [LOOK, PATCH, IN_NAMESPACE, FIND],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "service_tier": "priority",
    "prompt_cache_key": "0199-session",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x-codex-installation-id": "8f0e"},
}  # fmt: skip
"""The body of Codex's first request, shortened."""


def test_a_request_of_codex(served: Serving, agent: Agent) -> None:
    url, headers = f"{served.address}/v1/responses", {"authorization": f"Bearer {KEY}"}
    answer = httpx.post(url, json=CODEX, headers=headers)
    assert answer.status_code == 200
    assert '"type": "response.completed"' in answer.text
    assert [message["content"] for message in agent.messages] == [
        "You are Codex.",
        "Sandbox: none.",
        "<environment_context/>",
        "hi.",
    ]
    names = [tool["function"]["name"] for tool in agent.tools]
    assert names == ["look", "apply_patch", "mcp__notes__find", "tool_search"]
    assert "start: /x/" in agent.tools[1]["function"]["description"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look"}])
def test_a_call_may_be_asked_for(client: openai.OpenAI, served: Serving, choice: Any) -> None:
    """By a grammar, and the response says what was asked; so does each event that has it."""
    how: Any = {"model": MODEL, "input": CALL, "tools": [LOOK], "tool_choice": choice}
    more: Any = {"parallel_tool_calls": False}
    answer = client.responses.create(**how, **more)
    assert '\\"look\\"' in str(served.parrot.added[-1].sampling.grammar)
    assert answer.output[-1].name == "look"
    first, *_ = client.responses.create(**how, **more, stream=True)
    for said in (answer.model_dump(), first.response.model_dump()):
        expected = {"tool_choice": choice, **more}
        assert {name: said[name] for name in expected} == expected
    assert client.responses.create(model=MODEL, input="?.").tool_choice == "auto"


def called(**item: Any) -> dict[str, Any]:
    return {"input": [{"type": "function_call", **item}]}


def tool(**says: Any) -> dict[str, Any]:
    return {"tools": [says]}


@pytest.mark.parametrize(
    ("asked", "param", "named"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", ""),
        ({"extra_body": {"n": 2}}, "n", ""),
        (tool(type="web_search"), "tools.0.type", "not understood here"),
        (tool(type="tool_search"), "tools.0.type", "not understood here"),
        (tool(type="local_shell"), "tools.0.type", "not understood here"),
        (tool(type="teleport"), "tools.0.type", "'teleport'"),
        (tool(**{**LOOK, "name": "?"}), "tools.0.name", "pattern"),
        (tool(**{**LOOK, "parameters": 5}), "tools.0.parameters", "object"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'xml'"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "missing"),
        ({"input": []}, "input", "one message"),
        ({"extra_body": {"seed": "a"}}, "seed", "'a'"),
        (tool(type="namespace", name="a", tools=5), "tools.0.tools", "list"),
        (tool(type="namespace", name="a", tools=[5]), "tools.0.tools.0", "object"),
        ({"input": 5}, "input", ""),
        ({"input": [{"type": ["x"]}]}, "input.0", "['x']"),
        ({"input": [{"type": "additional_tools", "tools": 5}]}, "input.0.tools", "list"),
        ({"input": [{**USER, "content": [{"type": ["x"]}]}]}, "input.0.content.0.type", "['x']"),
        ({"input": [{**USER, "content": 5}]}, "input.0.content", "parts"),
        ({"input": [{**USER, "content": None}]}, "input.0.content", "missing"),
        ({"input": [{**USER, "role": "critic"}]}, "input.0.role", "'critic'"),
        ({"input": [{"content": "?"}]}, "input.0.role", "missing"),
        (called(name="look", arguments=5), "input.0.arguments", "object"),
        (called(name="?", namespace=5, arguments=5), "input.0.arguments", "object"),
        (called(name="look", call_id=5), "input.0.call_id", "5"),
        (
            {"input": [USER, {"type": "function_call_output", "output": 5}]},
            "input.1.output",
            "parts",
        ),
        (tool(type="function"), "tools.0.name", "missing"),
        (tool(type="custom", name=""), "tools.0.name", "missing"),
        ({"include": ["message.output_text.logprobs"]}, "include", "logprobs"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context", ""),
        ({"max_output_tokens": 2000}, "max_output_tokens", "999"),
        (
            {"tools": [LOOK], "tool_choice": {"type": "function", "name": "hear"}},
            "tool_choice",
            "'hear'",
        ),
        ({"tools": [LOOK], "tool_choice": {"type": "web_search"}}, "tool_choice", "web_search"),
    ],
)
def test_what_is_refused(
    client: openai.OpenAI, asked: dict[str, Any], param: str, named: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": MODEL, "input": "?", **asked})
    assert caught.value.param == param
    assert named in caught.value.body["message"]
