"""Items of a history in OpenAI's Responses API, said in the words of its chats. No MLX, no MPI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardmlx.server.accepted_fields import Json, refuse_other_keys
from shardmlx.server.client_tools import call_of, listed
from shardmlx.server.openai_errors import refused, shown
from shardmlx.server.openai_messages import PASSED_IN_MESSAGES, read_parts
from shardmlx.server.openai_requests import TranslatedChat
from shardmlx.server.other_blocks import as_text

CALLS = ("function_call", "custom_tool_call", "tool_search_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output", "tool_search_output")

UNSEEN = ("additional_tools", "web_search_call")
"""Types of items that say nothing by themselves: the text has what a search found."""

OF_SERVERS = (
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_call",
    "mcp_list_tools",
    "mcp_approval_request",
)
"""Types of items in which OpenAI's servers say what they did. They have a line in their place."""

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
        OUTPUTS, frozenset({"status", "caller", "name", "namespace", "execution", "created_by"})
    ),
}
"""Further fields of theirs that change no answer."""


def add_item(chat: TranslatedChat, where: str, item: Json) -> None:
    """Add an item of a history. Raises ``ApiError``."""
    given = item.get("type") or "message"
    kind = str(given)
    is_answered = kind == "message" and item.get("role") == "assistant"
    if kind in KNOWN and not is_answered:
        refuse_other_keys(item, KNOWN[kind], where, PASSED[kind])
    if kind in UNSEEN:
        return
    if kind in OUTPUTS:
        output, call_id = _output(item, where), item.get("call_id") or item.get("id")
        chat.messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
    elif is_answered or kind in ("reasoning", *CALLS, *OF_SERVERS):
        _add_answered(chat, kind, item, where)
    elif kind == "message":
        role = str(item.get("role"))
        content = _content(item.get("content"), f"{where}.content", role)
        chat.messages.append({"role": item.get("role"), "content": content})
    else:
        raise refused(f"{where}: an item of type {shown(given)} is not understood here", where)


def _content(content: Any, where: str, role: str) -> Any:
    """Return what a message says. Raises ``ApiError``. A chat refuses what are no parts."""
    is_parts = isinstance(content, list) and all(isinstance(each, dict) for each in content)
    return read_parts(content, where, role).text if is_parts else content


def _output(item: Json, where: str) -> Any:
    """Return what a tool gave: a text, or parts of it, or JSON of the tools that were found."""
    if item["type"] != "tool_search_output":
        return _content(item.get("output"), f"{where}.output", "tool")
    found = listed(item.get("tools") or [], "tools")
    return json.dumps({"tools": [tool.get("name") for _, tool in found]}, ensure_ascii=False)


def _add_answered(chat: TranslatedChat, kind: str, item: Json, where: str) -> None:
    """Add what an answer said: its thoughts, texts and calls are one message."""
    if not chat.messages or chat.messages[-1].get("role") != "assistant":
        chat.messages.append({"role": "assistant", "content": ""})
    message = chat.messages[-1]
    if kind == "message":
        said = _content(item.get("content"), f"{where}.content", "assistant")
        message["content"] = _after(message["content"], said)
    elif kind in OF_SERVERS:
        message["content"] = _after(message["content"], as_text(item))
    elif kind == "reasoning":
        thoughts = [message.get("reasoning_content"), _thought(item)]
        message["reasoning_content"] = "\n\n".join(filter(None, thoughts))
    else:
        tool, arguments = call_of(item)
        call_id = item.get("call_id") or item.get("id")
        chat.add_call(call_id, tool.in_chat, arguments)


def _after(text: Any, more: Any) -> Any:
    """Return a text with more after it; or what is no text, which a chat refuses."""
    for each in (text, more):
        if not isinstance(each, str):
            return each
    return "\n\n".join(filter(None, [text, more]))


def _thought(item: Json) -> str:
    """Return what an item thought, or else its summary: OpenAI's servers tell nothing else."""
    parts = item.get("content") or item.get("summary")
    return "".join(
        str(part.get("text") or "")
        for part in (parts if isinstance(parts, list) else ())
        if isinstance(part, dict)
    )
