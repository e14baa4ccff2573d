"""Anthropic's Messages API, by its own package where that is installed, against a model that
repeats."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from shardmlx.server.anthropic_api import MessagesBody
from tests.helpers.http_serving import CALL, KEY, MODEL, Agent, Serving
from tests.helpers.http_serving import LOOK as TOOL

LOOK = {"input_schema" if key == "parameters" else key: value for key, value in TOOL.items()}


def post(served: Serving, said: Any, path: str = "", **more: Any) -> httpx.Response:
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    body = {"model": MODEL, "max_tokens": 200, "messages": messages, **more}
    headers = {"x-api-key": KEY}
    return httpx.post(f"{served.address}/v1/messages{path}", json=body, headers=headers)


def arguments(**asked: Any) -> dict[str, Any]:
    """What the template is given beside messages and tools."""
    return MessagesBody.model_validate({"messages": [], **asked}).chat().arguments


def test_a_message(served: Serving) -> None:
    message = post(served, "hello.").json()
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "cache_read_input_tokens": 3,
            "cache_creation_input_tokens": 0,
            "output_tokens": 6,
        },
    }
    assert post(served, "hello", max_tokens=2).json()["stop_reason"] == "max_tokens"


def test_blocks_of_thought_text_and_tools(served: Serving, agent: Agent) -> None:
    message = post(served, CALL, tools=[LOOK]).json()
    assert message["stop_reason"] == "tool_use"
    thought, said, call = message["content"]
    assert thought == {"type": "thinking", "thinking": "Hm", "signature": ""}
    assert said == {"type": "text", "text": "I look"}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "look", {"at": "sea"})
    assert agent.tools == [{"type": "function", "function": TOOL}]


def test_the_same_as_events(served: Serving) -> None:
    text = post(served, CALL, tools=[LOOK], stream=True).text
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert events[0]["message"]["content"] == []
    assert events[-1] == {"type": "message_stop"}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    starts = [event for event in events if event["type"] == "content_block_start"]
    kinds = [(each["index"], each["content_block"]["type"]) for each in starts]
    assert kinds == [(0, "thinking"), (1, "text"), (2, "tool_use")]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(each.get("thinking", "") for each in deltas) == "Hm"
    assert "".join(each.get("text", "") for each in deltas) == "I look"
    assert "".join(each.get("partial_json", "") for each in deltas) == '{"at": "sea"}'
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert stops == [0, 1, 2]


def test_a_round_trip(served: Serving, agent: Agent) -> None:
    content = post(served, CALL, tools=[LOOK]).json()["content"]
    result = {"type": "tool_result", "tool_use_id": content[2]["id"], "is_error": True}
    results = [
        {**result, "content": [{"type": "text", "text": "fog."}]},
        {"type": "text", "text": "So?.", "cache_control": {"type": "ephemeral"}},
    ]
    history = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": content},
        {"role": "user", "content": results},
    ]
    system = [{"type": "text", "text": "Be brief."}]
    assert post(served, history, tools=[LOOK], system=system).status_code == 200
    called = {"name": "look", "arguments": {"at": "sea"}}
    assert agent.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": "I look",
            "reasoning_content": "Hm",
            "tool_calls": [{"id": content[2]["id"], "type": "function", "function": called}],
        },
        {"role": "tool", "content": "Error: fog.", "tool_call_id": content[2]["id"]},
        {"role": "user", "content": "So?."},
    ]


def test_stop_sequences(served: Serving) -> None:
    said = "<think>look</think>I look at it."
    message = post(served, said, stop_sequences=["again", "look"]).json()
    texts = [block.get("thinking", block.get("text")) for block in message["content"]]
    assert texts == ["look", "I "]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "look")


def test_an_answer_goes_on_from_a_last_message_of_the_assistant(
    served: Serving, agent: Agent
) -> None:
    begun = [{"role": "user", "content": "?"}, {"role": "assistant", "content": " yes."}]
    message = post(served, begun).json()
    assert agent.goes_on
    assert agent.messages == begun
    assert message["content"] == [{"type": "text", "text": " yes"}]
    post(served, begun, "/count_tokens")
    assert agent.goes_on


@pytest.mark.parametrize("content", ["", " ", [], [{"type": "text", "text": ""}]])
def test_a_last_message_that_says_nothing_is_none(
    content: Any, served: Serving, agent: Agent
) -> None:
    asked = [{"role": "user", "content": "?."}]
    assert post(served, [*asked, {"role": "assistant", "content": content}]).status_code == 200
    assert (agent.messages, agent.goes_on) == (asked, False)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"model": "claude"}, "the model 'claude' is not served here"),
        ({"container_upload": 1}, "container_upload is not supp"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages.0.content.0: a block of type 'image' is not underst",
        ),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages.0.role: input should be 'user', 'assis",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools.0: tools of type 'web_search_20250305' are Anthropic's",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice asks for a call, and there are no tools"),
        ({"tool_choice": {"type": "must"}}, "tool_choice.type: input should be 'auto', 'any', "),
        ({"output_config": {"a": 1}}, "output_config.a is not"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not"),
        ({"system": 3}, "system: "),
        ({"n": 2}, "n is not supported"),
        ({"stop_sequences": 17 * ["a"]}, "stop_sequences: list should have at most 16 items"),
        ({"tools": [{"name": "?"}]}, "tools.0.name: string should match pattern"),
        ({"tools": [{**LOOK, "input_schema": 5}]}, "tools.0.input_schema: give an object (it is 5"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name is missing"),
        ({"temperature": 3}, "temperature: input should be less than or equal to 2 (it is 3)"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 5}]}]},
            "messages.0.content.0.input",
        ),
        (
            {"max_tokens": 2000},
            "input length and `max_tokens` exceed context limit: 6 + 2000 > 1000",
        ),
        (
            {"messages": [{"role": "user", "content": 1000 * "a"}]},
            "the prompt is too long: 1000 tokens > 999 maximum",
        ),
    ],
)
def test_errors_are_anthropics(served: Serving, body: dict[str, Any], message: str) -> None:
    answer = post(served, "hello.", **body)
    status, kind = (404, "not_found_error") if "model" in body else (400, "invalid_request_error")
    assert answer.status_code == status
    said = answer.json()
    assert (said["type"], said["error"]["type"]) == ("error", kind)
    assert said["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    ("method", "path", "given", "status", "kind"),
    [
        ("POST", "", {}, 401, "authentication_error"),
        ("POST", "/count_tokens", {"x-api-key": "no"}, 401, "authentication_error"),
        ("GET", "", {"x-api-key": KEY}, 405, "invalid_request_error"),
        ("POST", "/batches", {"x-api-key": KEY}, 404, "not_found_error"),
        ("POST", "/", {"x-api-key": KEY}, 404, "not_found_error"),
        ("POST", "", {"x-api-key": KEY}, 415, "invalid_request_error"),
        ("POST", "", {"x-api-key": KEY, "host": "evil.example"}, 421, "invalid_request_error"),
    ],
)
def test_so_are_those_of_the_layers_before_it(
    served: Serving, method: str, path: str, given: dict[str, str], status: int, kind: str
) -> None:
    answer = httpx.request(method, f"{served.address}/v1/messages{path}", headers=given)
    said = answer.json()
    assert (answer.status_code, said["type"], said["error"]["type"]) == (status, "error", kind)
    assert status != 401 or "x-api-key: KEY" in said["error"]["message"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look"}])
def test_a_call_may_be_asked_for(served: Serving, choice: dict[str, str]) -> None:
    assert post(served, CALL, tools=[LOOK], tool_choice=choice).status_code == 200
    assert "look" in str(served.parrot.added[-1].sampling.grammar)


def test_a_call_that_is_cut_off_is_text(served: Serving) -> None:
    """Nobody shall take it for a call without arguments."""
    message = post(served, CALL, tools=[LOOK], max_tokens=CALL.index('a"}')).json()
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][-1]["type"] == "text"
    assert message["content"][-1]["text"].endswith('{"at": "se')


def test_thinking_can_be_turned_off() -> None:
    assert arguments(thinking={"type": "disabled"}) == {"enable_thinking": False}
    assert arguments(thinking={"type": "adaptive"}) == {}


CLAUDE_CODE: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 200,
    "stream": True,
    "metadata": {"user_id": "user_8f0e_account__session_3b1c"},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.177.01c; cch=36ee5;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hello."}]}],
    "tools": [{**LOOK, "eager_input_streaming": True, "cache_control": {"type": "ephemeral"}}],
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high", "task_budget": {"type": "tokens", "total": 9000}},
    "betas": ["claude-code-20250219", "context-management-2025-06-27"],
    "speed": "fast",
    "mcp_servers": [],
    "temperature": 1,
}
"""The body of Claude Code 2.1's first request, shortened."""


@pytest.mark.parametrize("path", ["", "/count_tokens"])
def test_a_request_of_claude_code(served: Serving, agent: Agent, path: str) -> None:
    headers = {"authorization": f"Bearer {KEY}", "anthropic-beta": "claude-code-20250219"}
    for nonce in ("36ee5", "0aaa9"):
        body = json.loads(json.dumps(CLAUDE_CODE).replace("36ee5", nonce))
        url = f"{served.address}/v1/messages{path}?beta=true"
        assert httpx.post(url, json=body, headers=headers).status_code == 200
        assert agent.messages == [
            {"role": "system", "content": "You are Claude Code.\nBe brief."},
            {"role": "user", "content": "hello."},
        ]
    assert arguments(output_config={"effort": "high"}) == {"reasoning_effort": "high"}


@pytest.mark.parametrize(
    ("system", "told"),
    [
        ("x-anthropic-billing-header: cch=1;\nBe brief.", ["Be brief."]),
        ("x-anthropic-billing-header: cch=1;", []),
        ("Of x-anthropic-billing-header: x", ["Of x-anthropic-billing-header: x"]),
    ],
)
def test_a_line_for_billing_is_left_out(system: str, told: list[str]) -> None:
    late = {"role": "system", "content": system}
    body = MessagesBody.model_validate({"messages": [late], "system": system})
    assert [message["content"] for message in body.chat().messages] == 2 * told


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_structure_may_be_asked_for(served: Serving, field: str) -> None:
    properties = {"depth": {"type": "integer"}}
    form = {"type": "json_schema", "schema": {"type": "object", "properties": properties}}
    more: Any = {field: {"format": form} if field == "output_config" else form}
    assert post(served, "?.", **more).status_code == 200
    assert '"depth"' in str(served.parrot.added[-1].sampling.grammar)


def test_by_anthropics_own_package(served: Serving) -> None:
    anthropic: Any = pytest.importorskip("anthropic", reason="needs anthropic: '.[dev]'")
    client = anthropic.Anthropic(base_url=served.address, api_key=KEY, max_retries=0)
    said = {"role": "user", "content": CALL}
    asked: Any = {"model": MODEL, "max_tokens": 200, "messages": [said], "tools": [LOOK]}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        collected = stream.get_final_message()
    assert "".join(pieces) == '{"at": "sea"}'
    assert len(pieces) > 5  # a token is a character here
    for message in (whole, collected):
        assert message.stop_reason == "tool_use"
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert message.content[2].input == {"at": "sea"}
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        client.messages.create(**{**asked, "model": "claude"})
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=served.address, api_key="no").messages.create(**asked)
