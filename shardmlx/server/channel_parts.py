"""An answer in OpenAI's Harmony format taken apart while it comes, as gpt-oss writes it.

No MLX, no MPI. An answer is several messages, each in a channel::

    <|channel|>analysis<|message|>what it thinks<|end|>
    <|start|>assistant<|channel|>final<|message|>what it says<|return|>

A message to a function, in the channel "commentary", is a call; what else is in that channel is
said. The format: https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardmlx.server.answer_parts import (
    AnswerParts,
    Call,
    MoreArguments,
    Part,
    Said,
    Thought,
    new_id,
    overlap,
)

BODY = "<|message|>"
"""The mark between the head of a message and what it says."""

ENDS = ("<|end|>", "<|call|>", "<|return|>")

HEADS = ("<|channel|>", "<|start|>", BODY, " to=")
"""Beginnings of a head. An answer with another one, as by a grammar, has no messages."""

THOUGHTS = re.compile(r"<\|channel\|>\s*analysis\b")

FUNCTION = re.compile(r"\bto=functions\.(?P<name>[\w.:-]+)")


@dataclass(slots=True)
class ChannelParts(AnswerParts):
    """The parts of one answer that is messages in channels."""

    _kind: Callable[[str], Part] | None = None  # of the message under way; None to pass it over
    _is_head: bool = True
    _is_first: bool = True

    def take(self, text: str, *, is_last: bool) -> Iterator[Part]:
        """Yield the parts that are known with this text."""
        self._text += text
        self._check_begin(is_last)
        while True:
            if self._is_head:
                head, mark, rest = self._text.partition(BODY)
                if not mark:
                    return
                self._text = rest
                yield from self._open(head)
            found = [place for end in ENDS if (place := self._text.find(end)) >= 0]
            if not found:
                break
            yield from self._body(self._text[: min(found)])
            self._text = self._text[min(found) :].partition("|>")[2]
            self._is_head = True
        given = len(self._text) - (0 if is_last else max(overlap(self._text, e) for e in ENDS))
        yield from self._body(self._text[:given])
        self._text = self._text[given:]

    def _check_begin(self, is_last: bool) -> None:
        """Find out whether the answer has messages at all."""
        if not self._is_first or not self._text:
            return
        if not any(head.startswith(self._text[: len(head)]) for head in HEADS):
            self._is_head, self._kind = False, Said
        self._is_first = len(self._text) < max(map(len, HEADS)) and not is_last

    def _open(self, head: str) -> Iterator[Part]:
        self._is_head = False
        called = FUNCTION.search(head)
        if called is None or not self.tools:
            is_thought = THOUGHTS.search(head) and self.format.thought is not None
            self._kind = Thought if is_thought else Said
        elif self.parallel or not self.calls:
            self.calls += 1
            self._kind = MoreArguments
            yield Call(called["name"], "", new_id())
        else:
            self._kind = None

    def _body(self, text: str) -> Iterator[Part]:
        if text and self._kind is not None:
            yield self._kind(text)
