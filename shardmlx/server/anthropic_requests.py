"""Requests of Anthropic's Messages API, said in OpenAI's words. No MLX, no MPI.

What the two have in common is read and checked once, by ``openai_requests``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from shardmlx.server.accepted_fields import Body, Listed, refuse_unknown
from shardmlx.server.openai_bodies import validated
from shardmlx.server.openai_errors import ApiError, refused, shown

Json = dict[str, Any]

SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "chat_template_kwargs")
"""Fields that mean the same in both APIs."""


class MessagesBody(Body):
    """The body of a request to /v1/messages, as far as it is not passed on as it is."""

    messages: Listed[Json]
    max_tokens: int | None = None
    system: str | Listed[Json] | None = None
    stop_sequences: Listed[str] | None = None
    tools: Listed[Json] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None


def as_chat(body: bytes, *, counts: bool = False) -> bytes:
    """Return the body of a chat of OpenAI's API that asks for the same.

    One that only ``counts`` tokens names no ``max_tokens``. Raises ``ApiError``.
    """
    asked = validated(MessagesBody, body)
    if asked.max_tokens is None and not counts:
        raise refused("max_tokens is missing", "max_tokens")
    extra = asked.model_extra or {}
    chat: Json = {name: extra[name] for name in SAME if name in extra}
    refuse_unknown({name: value for name, value in extra.items() if name not in SAME})
    chat["max_tokens"] = asked.max_tokens
    chat["stop"] = asked.stop_sequences or None
    chat["messages"] = list(_messages(asked))
    if asked.tools:
        chat["tools"] = [_tool(tool, f"tools.{at}") for at, tool in enumerate(asked.tools)]
    chat |= _choice(asked.tool_choice or {})
    if (asked.thinking or {}).get("type") == "disabled":
        chat["reasoning_effort"] = "none"
    return json.dumps(chat).encode()


def _messages(asked: MessagesBody) -> Iterator[Json]:
    if asked.system:
        yield {"role": "system", "content": _text(asked.system, "system")}
    for at, message in enumerate(asked.messages):
        where = f"messages.{at}"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise refused(f"{where}.role is {shown(role)}: give user or assistant", f"{where}.role")
        if isinstance(content, str):
            yield {"role": role, "content": content}
        elif isinstance(content, list):
            yield from (_answered if role == "assistant" else _asked)(content, where)
        else:
            raise refused(f"{where}.content: give a text, or a list of blocks", f"{where}.content")


def _asked(blocks: list[Any], where: str) -> Iterator[Json]:
    """Yield what a user's blocks say: results of tools, each a message of its own, and text."""
    texts = []
    for at, block in enumerate(blocks):
        place = f"{where}.content.{at}"
        if _kind(block, ("text", "tool_result"), place) == "text":
            texts.append(block)
            continue
        result = _text(block.get("content") or "", place)
        if block.get("is_error"):
            result = f"Error: {result}"
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id", ""), "content": result}
    if texts:
        yield {"role": "user", "content": _text(texts, where)}


def _answered(blocks: list[Any], where: str) -> Iterator[Json]:
    """Yield the message that an assistant's blocks are."""
    kinds = ("text", "thinking", "redacted_thinking", "tool_use")
    message: Json = {"role": "assistant", "content": ""}
    calls = []
    for at, block in enumerate(blocks):
        match _kind(block, kinds, f"{where}.content.{at}"):
            case "text":
                message["content"] += _text([block], f"{where}.content.{at}")
            case "thinking":
                message["reasoning_content"] = block.get("thinking")
            case "tool_use":
                function = {
                    "name": block.get("name"),
                    "arguments": json.dumps(block.get("input") or {}),
                }
                calls.append({"id": block.get("id", ""), "type": "function", "function": function})
    if calls:
        message["tool_calls"] = calls
    yield message


def _kind(block: Any, known: tuple[str, ...], where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in known:
        raise refused(
            f"{where}: a block of type {shown(kind)} is not understood here", f"{where}.type"
        )
    return str(kind)


def _text(content: Any, where: str) -> str:
    """Return a text, or that of a list of blocks of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(f"{where}: give a text, or a list of blocks", where)
    texts = []
    for at, block in enumerate(content):
        _kind(block, ("text",), f"{where}.{at}")
        if not isinstance(block.get("text"), str):
            raise refused(f"{where}.{at}.text: give a text", f"{where}.{at}.text")
        texts.append(block["text"])
    return "\n".join(texts)


def _tool(tool: Mapping[str, Any], where: str) -> Json:
    if tool.get("type") not in (None, "custom"):
        raise refused(
            f"{where}: tools of type {shown(tool['type'])} run on Anthropic's own servers",
            f"{where}.type",
        )
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": function}


def _choice(choice: Mapping[str, Any]) -> Json:
    function = {"type": "function", "function": {"name": choice.get("name")}}
    names = {"auto": "auto", "none": "none", "any": "required", "tool": function}
    kind = choice.get("type")
    chat: Json = {"tool_choice": names.get(str(kind), kind)}
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    return chat


def error_body(error: ApiError) -> Json:
    """Return an error as Anthropic's API tells it."""
    kinds = {
        401: "authentication_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
    usual = "api_error" if error.status >= 500 else "invalid_request_error"
    said = {"type": kinds.get(error.status, usual), "message": str(error)}
    return {"type": "error", "error": said}
