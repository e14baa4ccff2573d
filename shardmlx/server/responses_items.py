"""Items of a history in OpenAI's Responses API, as messages of a chat. No MLX, no MPI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardmlx.server.accepted_fields import Json, refuse_other_keys, words
from shardmlx.server.client_tools import DESCRIBED, FIELDS, call_in, tools_in
from shardmlx.server.openai_errors import refused, shown
from shardmlx.server.openai_messages import (
    PASSED_IN_MESSAGES,
    History,
    arguments_of,
    call_of,
    content_of,
    read_parts,
)
from shardmlx.server.other_blocks import as_text

CALLS = ("function_call", "custom_tool_call", "tool_search_call", *DESCRIBED)
OUTPUTS = (
    "function_call_output",
    "custom_tool_call_output",
    "tool_search_output",
    *(f"{kind}_output" for kind in DESCRIBED),
)

ROLES = ("system", "developer", "user", "assistant", "tool")

UNSEEN = ("additional_tools", "web_search_call")
"""Types of items that say nothing by themselves: the text has what a search found."""

OF_SERVERS = (
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_call",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "program",
    "program_output",
    "compaction",
    "compaction_summary",
    "context_compaction",
)
"""Types of items in which OpenAI's servers say what they did, or what they alone can read. They
have a line in their place."""

ANSWERED = ("reasoning", *CALLS, *OF_SERVERS)
"""Types of items that are a part of an answer."""

KNOWN: Mapping[str, tuple[str, ...]] = {
    "message": ("type", "role", "content"),
    "additional_tools": ("type", "tools"),
    **dict.fromkeys(OUTPUTS, ("type", "call_id", "id", "output", "tools")),
}
"""Fields of items that a client writes. Items that a server has written may have any."""

PASSED: Mapping[str, frozenset[str]] = {
    "message": PASSED_IN_MESSAGES | {"phase"},
    "additional_tools": frozenset({"id", "role", "status"}),
    **dict.fromkeys(
        OUTPUTS,
        words("""
            status caller name namespace execution created_by max_output_length
            acknowledged_safety_checks
        """),
    ),
}
"""Further fields of theirs that change no answer."""


def add_item(history: History, where: str, item: Json) -> None:
    """Add an item of a history. Raises ``ApiError``."""
    given = item.get("type") or "message"
    kind = str(given)
    is_answered = kind == "message" and item.get("role") == "assistant"
    if kind in KNOWN and not is_answered:
        refuse_other_keys(item, KNOWN[kind], where, PASSED[kind])
    if kind in UNSEEN:
        return
    if is_answered or kind in ANSWERED:
        _add_answered(history, kind, item, where)
    elif kind in OUTPUTS:
        call_id = _call_id(item, where)
        history.add("tool", _output(item, where), tool_call_id=call_id)
    elif kind == "message":
        _add_message(history, item, where)
    else:
        raise refused(f"{where}: an item of type {shown(given)} is not understood here", where)


def _add_message(history: History, item: Json, where: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        wrong = "is missing" if role is None else f"is {shown(role)}"
        raise refused(f"{where}.role {wrong}: give one of {', '.join(ROLES)}", f"{where}.role")
    history.add(role, _content(item.get("content"), f"{where}.content", history.read_as(role)))


def _content(content: Any, where: str, role: str) -> str:
    """Return what a message says. Raises ``ApiError``."""
    if content is None and role not in ("assistant", "tool"):
        raise refused(f"{where} is missing: give a text", where)
    return read_parts(content_of(content or "", where), where, role).text


def _call_id(item: Json, where: str) -> str:
    given = item.get("call_id") or item.get("id")
    if given is not None and not isinstance(given, str):
        raise refused(f"{where}.call_id is {shown(given)}: give a text", f"{where}.call_id")
    return given or ""


def _output(item: Json, where: str) -> str:
    """Return what a tool gave: a text, or parts of it, or JSON of the tools that were found."""
    if item["type"] != "tool_search_output":
        output = item.get("output")
        parts = [output] if isinstance(output, dict) else output  # a screenshot
        return _content(parts, f"{where}.output", "tool")
    found = tools_in(item, where)
    return json.dumps({"tools": [tool.name for tool in found]}, ensure_ascii=False)


def _add_answered(history: History, kind: str, item: Json, where: str) -> None:
    """Add what an answer said: its thoughts, texts and calls are one message."""
    if history.messages and history.messages[-1]["role"] == "assistant":
        message = history.messages[-1]
    else:
        message = history.add("assistant", "")
    if kind == "message":
        said = _content(item.get("content"), f"{where}.content", "assistant")
        message["content"] = _after(message["content"], said)
    elif kind in OF_SERVERS:
        message["content"] = _after(message["content"], as_text(item))
    elif kind == "reasoning":
        if thought := _after(message.get("reasoning_content", ""), _thought(item)):
            message["reasoning_content"] = thought
    else:
        tool, given = call_in(item)
        try:
            arguments = arguments_of({} if given is None else given)
        except ValueError as error:
            place = f"{where}.{FIELDS.get(tool.kind, 'arguments')}"
            raise refused(f"{place}: {error}", place) from None
        call = call_of(_call_id(item, where), tool.in_chat, arguments)
        message.setdefault("tool_calls", []).append(call)


def _after(text: str, more: str) -> str:
    """Return a text with more after it."""
    return "\n\n".join(filter(None, [text, more]))


def _thought(item: Json) -> str:
    """Return what an item thought, or else its summary: OpenAI's servers tell nothing else."""
    parts = item.get("content") or item.get("summary")
    return "".join(
        str(part.get("text") or "")
        for part in (parts if isinstance(parts, list) else ())
        if isinstance(part, dict)
    )
