"""Answers of gpt-oss: messages in channels, in whatever pieces they come."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import httpx
import pytest

from shardmlx.inference.answer_format import HARMONY
from shardmlx.server.answer_parts import Call, MoreArguments, Said, Thought
from shardmlx.server.channel_parts import ChannelParts
from tests.helpers.http_serving import Agent, serving

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
THINKS = "<|channel|>analysis<|message|>Hm < 3 <|e<|end|><|start|>assistant"
SAYS = "<|channel|>final<|message|>Aye!"
CALLS = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "sea"}<|call|>'
OTHER_WAY = ' to=functions.look<|channel|>commentary json<|message|>{"at": "sea"}'


def told(text: str, size: int, **options: Any) -> list[tuple[type, str]]:
    """Kinds and texts of the parts, joined, of a text that comes in pieces of this size."""
    parts = ChannelParts(HARMONY, **{"tools": [TOOL], **options})
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    came = [
        (type(part), part.name if isinstance(part, Call) else part.text)
        for number, piece in enumerate(pieces, start=1)
        for part in parts.take(piece, is_last=number == len(pieces))
    ]
    grouped = groupby(came, key=lambda each: each[0])
    return [(kind, "".join(text for _, text in each)) for kind, each in grouped]


LOOKS = [(Call, "look"), (MoreArguments, '{"at": "sea"}')]


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (SAYS, [(Said, "Aye!")]),
        (THINKS + SAYS, [(Thought, "Hm < 3 <|e"), (Said, "Aye!")]),
        (THINKS + CALLS, [(Thought, "Hm < 3 <|e"), *LOOKS]),
        (THINKS + OTHER_WAY, [(Thought, "Hm < 3 <|e"), *LOOKS]),
        (f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALLS}",
         [(Said, "I look."), *LOOKS]),
        (THINKS[: THINKS.index(" <|e")], [(Thought, "Hm < 3")]),
        ('{"day": "mon"}', [(Said, '{"day": "mon"}')]),
        ("<", []),
    ],
)  # fmt: skip
def test_parts(text: str, size: int, parts: list[tuple[type, str]]) -> None:
    assert told(text, size) == parts


def test_one_call_alone_where_they_may_not_be_parallel() -> None:
    assert told(f"{CALLS}<|start|>assistant{CALLS}", 1000, parallel=False) == LOOKS


def test_without_tools_nothing_is_a_call() -> None:
    assert told(CALLS, 1000, tools=[]) == [(Said, '{"at": "sea"}')]


def test_a_server_tells_thoughts_apart() -> None:
    reader = Agent()
    reader.answer_format = HARMONY
    asked = [{"role": "user", "content": f"{THINKS}{SAYS}."}]
    with serving(reader=reader) as server:
        answer = httpx.post(
            f"{server.address}/v1/chat/completions", json={"messages": asked}
        ).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm < 3 <|e", "Aye!")
