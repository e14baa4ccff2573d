"""A chat said in another way, for templates that do not take it as it is. No MLX, no MPI."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardmlx.inference.answer_format import Tool
from shardmlx.inference.call_formats import GENERIC_CALLS

Message = dict[str, Any]

HOW_TO_CALL = """You can call functions. Each line below describes one, as JSON:
{}

To call a function, answer with JSON alone, in this form:
{}
To call several, write each in a line of its own. You are then told their results. If no function \
helps, answer in words."""


def description(tools: Sequence[Tool]) -> str:
    """Return what a model is told whose template knows no tools."""
    described = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return HOW_TO_CALL.format("\n".join(described), _call("NAME", {"ARGUMENT": "VALUE"}))


def with_tools_as_text(chat: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[Message]:
    """Return a chat of which every message is text alone.

    The system message describes ``tools``, if there are any. An earlier call is the text by which
    the model would call, its result a message of the user; results of one answer, and what the user
    says to them, are one message, since templates want the roles by turns.
    """
    told: list[Message] = []
    names: dict[str, str] = {}
    follows_result = False
    for message in chat:
        said = {name: each for name, each in message.items() if not name.startswith("tool_call")}
        if calls := message.get("tool_calls"):
            functions = [call["function"] for call in calls]
            names |= {call.get("id"): call["function"]["name"] for call in calls}
            written = [_call(each["name"], each.get("arguments")) for each in functions]
            said["content"] = "\n".join(filter(None, [message.get("content"), *written]))
        is_result = message["role"] == "tool"
        if is_result:
            name = names.get(message.get("tool_call_id", ""), message.get("name"))
            which = f"Result of {name}" if name else "Result"
            said = {"role": "user", "content": f"{which}:\n{message.get('content') or ''}"}
        if told and told[-1]["role"] == said["role"] == "user" and (is_result or follows_result):
            told[-1]["content"] += f"\n\n{said['content']}"
        else:
            told.append(said)
        follows_result = said["role"] == "user" and (is_result or follows_result)
    if tools:
        if not (told and told[0]["role"] == "system"):
            told.insert(0, {"role": "system", "content": ""})
        parts = (told[0]["content"], description(tools))
        told[0]["content"] = "\n\n".join(filter(None, parts))
    return told


def with_one_system(chat: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a chat that begins with all that its system messages say, and has no other one."""
    said = [message["content"] for message in chat if message["role"] == "system"]
    others = [dict(message) for message in chat if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(filter(None, said))}, *others]


def without_system(chat: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a chat whose first user message begins with what its system message says."""
    system, *rest = map(dict, chat)
    if not (rest and rest[0]["role"] == "user"):
        return [{**system, "role": "user"}, *rest]
    return [{**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}, *rest[1:]]


def with_single_calls(chat: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a chat in which each call of an answer is a message of its own, before its result."""
    groups: list[list[Message]] = []
    waiting: dict[str, list[list[Message]]] = {}
    for message in map(dict, chat):
        calls = message.get("tool_calls") or []
        for number, call in enumerate(calls):
            content = "" if number else message["content"]
            groups.append([{**message, "content": content, "tool_calls": [call]}])
            waiting.setdefault(call.get("id", ""), []).append(groups[-1])
        if called := waiting.get(message.get("tool_call_id", "")) if not calls else None:
            called.pop(0).append(message)
        elif not calls:
            groups.append([message])
    return [message for group in groups for message in group]


def _call(name: str, arguments: Any) -> str:
    """Return the text by which a model calls a tool."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return GENERIC_CALLS.before.format(name) + written + GENERIC_CALLS.after
