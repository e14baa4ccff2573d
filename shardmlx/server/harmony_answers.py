"""Answers in OpenAI's Harmony format, as gpt-oss writes them. No MLX, no MPI.

An answer is several messages, each in a channel::

    <|channel|>analysis<|message|>what it thinks<|end|>
    <|start|>assistant<|channel|>final<|message|>what it says<|return|>

A message to a function, in the channel "commentary", is a call; other text of that channel is said.
The format: https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re

from shardmlx.server.answer_parts import (
    AnswerSyntax,
    Call,
    Incoming,
    MoreArguments,
    Reading,
    Said,
    Thought,
    new_id,
    passed_on,
)

BODY = "<|message|>"
"""The mark between the head of a message and its text."""

ENDS = ("<|end|>", "<|call|>", "<|return|>")

HEADS = ("<|channel|>", "<|start|>", BODY, " to=")
"""Beginnings of a head. An answer with another one, as by a grammar, has no messages."""

THOUGHTS = re.compile(r"<\|channel\|>\s*analysis\b")

FUNCTION = re.compile(r"\bto=functions\.(?P<name>[\w.:-]+)")


def harmony_answer(incoming: Incoming, syntax: AnswerSyntax) -> Reading:
    """Yield the parts of an answer that is messages in channels."""
    while any(len(incoming.text) < len(head) and head.startswith(incoming.text) for head in HEADS):
        if incoming.is_last:
            return
        yield None
    if not incoming.text.startswith(HEADS):
        yield from passed_on(incoming, (), Said)
    while incoming.text or not incoming.is_last:
        head, mark, text = incoming.text.partition(BODY)
        if not mark and incoming.is_last:
            return
        if not mark:
            yield None
            continue
        incoming.text = text
        called = FUNCTION.search(head) if syntax.tools else None
        if called is not None:
            yield Call(called["name"], "", new_id())
        is_thought = THOUGHTS.search(head) and syntax.format.thought is not None
        kind = MoreArguments if called else Thought if is_thought else Said
        yield from passed_on(incoming, ENDS, kind)
