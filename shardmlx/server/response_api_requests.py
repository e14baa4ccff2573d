"""Requests of OpenAI's Responses API, said in the words of its chats. No MLX, no MPI.

What the two have in common is read and checked once, by ``openai_requests``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardmlx.server.accepted_fields import Body, Listed, refuse_unknown
from shardmlx.server.openai_bodies import validated
from shardmlx.server.openai_errors import refused, shown
from shardmlx.server.openai_requests import ApiRequest, Reader, ServedModel, read_chat

Json = dict[str, Any]

SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "chat_template_kwargs")
"""Fields that mean the same in both."""

REPEATED = (
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "tool_choice"),
    *("tools", "temperature", "top_p", "text", "reasoning"),
)
"""Fields that a response says again."""


class ResponseBody(Body):
    """The body of a request to /v1/responses, as far as it is not passed on as it is."""

    input: str | Listed[Json]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Listed[Json] | None = None
    tool_choice: Any = None
    text: Json | None = None
    reasoning: Json | None = None
    stream_options: Json | None = None


def read_response(body: bytes, reader: Reader, served: ServedModel) -> ApiRequest:
    """Read the body of a request to /v1/responses. Raises ``ApiError``."""
    asked = validated(ResponseBody, body)
    return replace(read_chat(as_chat(asked), reader, served), repeated=_repeated(asked))


def _repeated(asked: ResponseBody) -> Json:
    """Return what a response says again of its request: what was given, and what holds without."""
    given = asked.model_dump(exclude_none=True)
    return {
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    } | {name: given[name] for name in REPEATED if name in given}


def as_chat(asked: ResponseBody) -> bytes:
    """Return the body of a chat that asks for the same. Raises ``ApiError``."""
    extra = asked.model_extra or {}
    refuse_unknown({name: value for name, value in extra.items() if name not in SAME})
    chat: Json = {name: extra[name] for name in SAME if name in extra}
    chat["max_tokens"] = asked.max_output_tokens
    chat["reasoning_effort"] = (asked.reasoning or {}).get("effort")
    chat["messages"] = _messages(asked)
    chat["tool_choice"] = _choice(asked.tool_choice)
    if asked.tools:
        chat["tools"] = [_tool(tool, f"tools.{at}") for at, tool in enumerate(asked.tools)]
    if (form := (asked.text or {}).get("format")) is not None:
        chat["response_format"] = _format(form)
    return json.dumps(chat).encode()


def _messages(asked: ResponseBody) -> list[Json]:
    messages: list[Json] = []
    if asked.instructions:
        messages.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        return [*messages, {"role": "user", "content": asked.input}]
    for at, item in enumerate(asked.input):
        kind = item.get("type", "message")
        if kind == "message" and item.get("role") != "assistant":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call_output":
            result = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
            messages.append({"role": "tool", **result})
        elif kind in ("message", "function_call", "reasoning"):
            _add_answered(messages, kind, item)
        else:
            where = f"input.{at}"
            raise refused(f"{where}: an item of type {shown(kind)} is not understood here", where)
    return messages


def _add_answered(messages: list[Json], kind: str, item: Json) -> None:
    """Add what an answer said: thought, text and calls of one answer are one message."""
    last = messages[-1] if messages else {}
    starts_anew = kind == "reasoning" or (kind == "message" and last.get("content"))
    if last.get("role") != "assistant" or starts_anew:
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if kind == "message":
        last["content"] = item.get("content")
    elif kind == "reasoning":
        parts = item.get("content") or []
        last["reasoning_content"] = "".join(
            part.get("text", "") for part in parts if isinstance(part, dict)
        )
    else:
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id", ""), "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(call)


def _tool(tool: Mapping[str, Any], where: str) -> Json:
    if tool.get("type") != "function":
        raise refused(
            f"{where}: tools of type {shown(tool.get('type'))} run on OpenAI's own servers",
            f"{where}.type",
        )
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool.get(name) for name in names}}


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _format(form: Any) -> Any:
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    schema = {name: value for name, value in form.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}
