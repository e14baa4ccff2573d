"""Rows in the forms of other tools: Alpaca's instructions, and ShareGPT's conversations. No MLX, no
MPI.

::

    {"instruction": ..., "input": ..., "output": ...}
    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}

Both may have more columns, as LLaMA-Factory has them: ``system``, ``tools``, and Alpaca's
``history``, a list of questions with their answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardmlx.errors import UserError
from shardmlx.training.row_notes import NOTHING, shown

INSTRUCTION, INPUT, OUTPUT, HISTORY = "instruction", "input", "output", "history"
"""The columns of Alpaca's form."""

CONVERSATIONS = "conversations"
"""The column of ShareGPT's form."""

_FROM, _VALUE = "from", "value"

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""The roles of ShareGPT's sides."""

_CALL = "function_call"
"""The side whose value is a call, or a list of calls, in JSON."""

_TURNS = (
    'write [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]; the others '
    f"are {', '.join(sorted({*_ROLES, _CALL} - {'human', 'gpt'}))}"
)


def is_turn(value: Any) -> bool:
    """Return whether a value is a turn of ShareGPT, and not a message with a role."""
    return isinstance(value, Mapping) and _FROM in value and value.get("role") is None


def is_foreign(row: Mapping[str, Any]) -> bool:
    """Return whether a row has a column of another tool's form."""
    return CONVERSATIONS in row or INSTRUCTION in row


def messages_of(turns: Sequence[Any], name: str) -> list[Any]:
    """Return turns of ShareGPT, called ``name``, as messages; what is none as it is. A call and its
    results get the same id, which some templates want."""
    messages: list[Any] = []
    count = 0
    open_calls: list[str] = []
    for i, turn in enumerate(turns):
        if not is_turn(turn):
            messages.append(turn)
            continue
        message = message_of(turn, f"{name}[{i}]")
        for call in message.get("tool_calls", ()):
            count += 1
            call["id"] = f"call{count:05d}"  # nine characters, as Mistral's templates want
            open_calls.append(call["id"])
        if message["role"] == "tool" and open_calls:
            message["tool_call_id"] = open_calls.pop(0)
        messages.append(message)
    return messages


def message_of(turn: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a turn of ShareGPT, called ``name``, as a message. Raises ``UserError``."""
    side = turn[_FROM]
    value = turn.get(_VALUE)
    others = {
        key: each
        for key, each in turn.items()
        if key not in (_FROM, _VALUE) and each is not None  # a table has all keys of all turns
    }
    if "content" in others:
        raise UserError(f"{name} has {_VALUE!r}, and 'content' too", "keep one")
    if side == _CALL:
        return {"role": "assistant", **others, "tool_calls": _calls_of(value, f"{name}.value")}
    role = _ROLES.get(side) if isinstance(side, str) else None
    if role is None:
        raise UserError(f"{name} is from {shown(side)}, which is not a side that is known", _TURNS)
    if not isinstance(value, str):
        raise UserError(f"{name}.value is {shown(value)}, not text", _TURNS)
    return {"role": role, "content": value, **others}


def _calls_of(value: Any, name: str) -> list[dict[str, Any]]:
    given = _from_json(value)
    calls = given if isinstance(given, list) else [given]
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise UserError(
                f"{name} is {shown(value)}, no call in JSON",
                'write {"name": "...", "arguments": {...}}, or a list of such objects',
            )
    return [{"type": "function", "function": dict(call)} for call in calls]


def tools_of(value: Any) -> Any:
    """Return the tools of a row, which may be text in JSON, each in the form of a function."""
    tools = _from_json(value)
    if not isinstance(tools, list):
        return tools
    return [
        {"type": "function", "function": each}
        if isinstance(each, Mapping) and "name" in each and "function" not in each
        else each
        for each in tools
    ]


def _from_json(value: Any) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def alpaca_messages(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the conversation of a row in Alpaca's form. Raises ``UserError``."""
    prompt = alpaca_prompt(row, where)
    return [*prompt, {"role": "assistant", "content": _text(row, OUTPUT, where)}]


def alpaca_prompt(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return what a row in Alpaca's form asks: questions and answers of its history, then the
    instruction, with the input, if there is one, on the next line. Raises ``UserError``."""
    messages = []
    for i, pair in enumerate(row.get(HISTORY) or ()):
        if not isinstance(pair, list) or [*map(type, pair)] != [str, str]:
            raise UserError(
                f"{where}: {HISTORY}[{i}] is {shown(pair)}, no question with its answer",
                'write [["question", "answer"], ...]',
            )
        for role, content in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": content})
    parts = [_text(row, INSTRUCTION, where)]
    if row.get(INPUT) not in NOTHING:
        parts.append(_text(row, INPUT, where))
    question = "\n".join(part for part in parts if part.strip())
    return [*messages, {"role": "user", "content": question}]


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        what = f"{key} is {shown(value)}, not text" if key in row else f"it has no key {key!r}"
        raise UserError(f"{where}: {what}", "write text, or take the row out")
    return value
