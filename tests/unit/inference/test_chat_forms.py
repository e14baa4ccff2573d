"""Chats said in another way, for templates that do not take them as they are."""

from __future__ import annotations

from typing import Any

from shardmlx.inference.chat_forms import (
    description,
    with_tools_as_text,
    without_system,
)

TOOL: Any = {
    "type": "function",
    "function": {"name": "look", "description": "Look", "parameters": {"type": "object"}},
}
BOSS: dict[str, Any] = {"role": "system", "content": "Be brief."}
ASKED: dict[str, Any] = {"role": "user", "content": "What is there?"}
SAID: dict[str, Any] = {"role": "user", "content": "And now?"}


def called(number: int, at: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": {"at": at}}
    return {"id": f"c{number}", "type": "function", "function": function}


BOTH: dict[str, Any] = {
    "role": "assistant",
    "content": "I look.",
    "tool_calls": [called(1, "sea"), called(2, "sky")],
}


def result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": text}


def test_tools_are_described_in_the_system_message() -> None:
    (system, asked) = with_tools_as_text([ASKED], [TOOL])
    assert system == {"role": "system", "content": description([TOOL])}
    assert '\n{"name": "look", "description": "Look", "parameters": {' in system["content"]
    assert asked == ASKED
    (system, asked) = with_tools_as_text([BOSS, ASKED], [TOOL])
    assert system["content"] == f"Be brief.\n\n{description([TOOL])}"
    assert with_tools_as_text([BOSS, ASKED], []) == [BOSS, ASKED]


def test_calls_and_results_are_text_and_roles_take_turns() -> None:
    chat = [ASKED, BOTH, result(2, "Blue."), result(1, "Ships."), SAID]
    assert with_tools_as_text(chat, []) == [
        ASKED,
        {
            "role": "assistant",
            "content": 'I look.\n{"name": "look", "arguments": {"at": "sea"}}\n'
            '{"name": "look", "arguments": {"at": "sky"}}',
        },
        {
            "role": "user",
            "content": "Result of look:\nBlue.\n\nResult of look:\nShips.\n\nAnd now?",
        },
    ]
    unknown = [ASKED, {"role": "tool", "tool_call_id": "x", "name": "hear", "content": "Waves."}]
    (merged,) = with_tools_as_text(unknown, [])
    assert merged["content"] == "What is there?\n\nResult of hear:\nWaves."
    assert with_tools_as_text([ASKED, SAID], []) == [ASKED, SAID]


def test_the_system_message_within_the_first_of_the_user() -> None:
    answered = {"role": "assistant", "content": "Aye."}
    assert without_system([BOSS, ASKED, answered]) == [
        {"role": "user", "content": "Be brief.\n\nWhat is there?"},
        answered,
    ]
    assert without_system([BOSS, answered]) == [{**BOSS, "role": "user"}, answered]
    assert without_system([BOSS]) == [{**BOSS, "role": "user"}]
