"""Requests of OpenAI's Responses API, said in the words of its chats. No MLX, no MPI.

``openai_requests`` reads and checks all that the two APIs share.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from shardmlx.inference.prompts import PromptReader
from shardmlx.server.accepted_fields import Body, Listed, refuse_unknown
from shardmlx.server.client_tools import (
    FIELDS,
    ClientTool,
    call_of,
    functions_of,
    listed,
    named_tool,
)
from shardmlx.server.openai_bodies import SAMPLING, validated
from shardmlx.server.openai_errors import refused, shown
from shardmlx.server.openai_requests import ApiRequest, ServedModel
from shardmlx.server.translated_chat import TranslatedChat

Json = dict[str, Any]

SAME = frozenset({"model", "stream", "parallel_tool_calls", "chat_template_kwargs", *SAMPLING})
"""Fields that mean the same in both."""

NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
"""The Responses API's names for other fields of a chat."""

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


def read_response(body: bytes, reader: PromptReader, served: ServedModel) -> ApiRequest:
    """Read the body of a request to /v1/responses. Raises ``ApiError``."""
    asked = validated(ResponseBody, body)
    chat, tools = as_chat(asked)
    request = chat.read(reader, served)
    return replace(request, repeated=_repeated(asked), client_tools=tools)


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


def as_chat(asked: ResponseBody) -> tuple[TranslatedChat, dict[str, ClientTool]]:
    """Return the chat that asks for the same, and its tools by their names there. Raises
    ``ApiError``."""
    extra = asked.model_extra or {}
    refuse_unknown({name: value for name, value in extra.items() if name not in SAME})
    chat = TranslatedChat({name: extra[name] for name in SAME & extra.keys()}, dict(NAMES))
    chat.body |= {
        "max_tokens": asked.max_output_tokens,
        "reasoning_effort": (asked.reasoning or {}).get("effort"),
        "tool_choice": _choice(asked.tool_choice),
        "response_format": _format((asked.text or {}).get("format")),
    }
    tools: dict[str, ClientTool] = {}
    _add_tools(chat, tools, asked.tools or [], "tools")
    if asked.instructions:
        chat.add("instructions", {"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        chat.add("input", {"role": "user", "content": asked.input})
        return chat, tools
    for at, item in enumerate(asked.input):
        where = f"input.{at}"
        _add_item(chat, where, item)
        if item.get("type") in ("tool_search_output", "additional_tools"):
            _add_tools(chat, tools, item.get("tools") or [], f"{where}.tools")
    return chat, tools


def _add_tools(chat: TranslatedChat, known: dict[str, ClientTool], tools: Any, where: str) -> None:
    for at, given in listed(tools, where):
        for place, tool, function in functions_of(given, at):
            if tool.in_chat not in known:
                known[tool.in_chat] = tool
                chat.add_tool(place, "parameters", function)


def _add_item(chat: TranslatedChat, where: str, item: Json) -> None:
    given = item.get("type") or "message"
    kind = str(given)
    if kind in ("additional_tools", "web_search_call"):  # the text has what a search found
        return
    if kind == "message" and item.get("role") != "assistant":
        chat.add(where, {"role": item.get("role"), "content": item.get("content")})
    elif kind in OUTPUTS:
        chat.names[f"messages.{len(chat.messages)}.content"] = f"{where}.output"
        result = {"tool_call_id": item.get("call_id") or item.get("id"), "content": _output(item)}
        chat.add(where, {"role": "tool", **result})
    elif kind in ("message", "reasoning", *CALLS):
        _add_answered(chat, where, kind, item)
    else:
        raise refused(f"{where}: an item of type {shown(given)} is not understood here", where)


CALLS = frozenset(f"{kind}_call" for kind in FIELDS) - {"custom_call"} | {"custom_tool_call"}
OUTPUTS = frozenset(f"{call}_output" for call in CALLS) - {"tool_search_call_output"} | {
    "tool_search_output"
}


def _output(item: Json) -> Any:
    """Return what a tool gave: a text, or parts of it, or JSON of what else it is."""
    output = item.get("output")
    if item["type"] == "tool_search_output":
        found = listed(item.get("tools") or [], "tools")
        output = {"tools": [tool.get("name") for _, tool in found]}
    if item["type"] == "apply_patch_call_output" and not output:
        output = item.get("status")
    is_plain = output is None or isinstance(output, str)
    if is_plain or item["type"] in ("function_call_output", "custom_tool_call_output"):
        return output
    return json.dumps(output, ensure_ascii=False)


def _add_answered(chat: TranslatedChat, where: str, kind: str, item: Json) -> None:
    """Add what an answer said: thought, text and calls of one answer are one message."""
    last = chat.messages[-1] if chat.messages else {}
    starts_anew = kind == "reasoning" or (kind == "message" and last.get("content"))
    if last.get("role") != "assistant" or starts_anew:
        last = {"role": "assistant", "content": ""}
        chat.add(where, last)
    if kind == "message":
        last["content"] = item.get("content")
    elif kind == "reasoning":
        parts = item.get("content")
        last["reasoning_content"] = "".join(
            str(part.get("text") or "")
            for part in (parts if isinstance(parts, list) else ())
            if isinstance(part, dict)
        )
    else:
        tool, arguments = call_of(item)
        call_id = item.get("call_id") or item.get("id")
        chat.add_call(where, FIELDS[tool.kind], call_id, tool.in_chat, arguments)


def _choice(choice: Any) -> Any:
    kind = str(choice.get("type")) if isinstance(choice, dict) else ""
    if kind not in FIELDS:
        return choice
    return {"type": "function", "function": {"name": named_tool(kind, choice).in_chat}}


def _format(form: Any) -> Any:
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    schema = {name: value for name, value in form.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}
