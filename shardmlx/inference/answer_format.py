"""Marks by which an answer says what it thought, and which tools it calls. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shardmlx.inference.call_formats import (
    GENERIC_CALLS,
    HARMONY_CALLS,
    LLAMA3_CALLS,
    CallFormat,
    call_format,
)

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

LLAMA3_WORDS = ("ipython", '"parameters": ')
"""Texts in the chat templates of Llama 3.1 and newer: the role of results, and how calls are
written."""

Tool = Mapping[str, Any]
"""A tool as OpenAI's API describes it."""

ParseCall = Callable[[str, Sequence[Tool]], Any]
"""Function that makes of the text between two marks a mapping with ``name`` and ``arguments``, or a
list of them; it raises whatever it likes."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The texts before and after a part of an answer. Without an end it goes on to the answer's."""

    start: str
    end: str


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The marks of a model for ``thought`` and for ``call``, as far as it has them.

    ``calls`` say what stands between the marks, where that is known; without marks they are JSON
    within what is said. ``special`` are the texts of control tokens, with their numbers. An answer
    that ``has_channels`` is messages in OpenAI's Harmony format.
    """

    thought: Marks | None = None
    call: Marks | None = None
    parse: ParseCall | None = None
    calls: CallFormat | None = None
    special: Mapping[str, int] = field(default_factory=dict)
    has_channels: bool = False

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper) -> AnswerFormat:
        """Return that of the model with this tokenizer, by its chat template and its tokens."""
        added = tokenizer.added_tokens_decoder.items()
        special = {token.content: number for number, token in added if token.special}
        template = tokenizer.chat_template
        # Some templates are functions: they are taken to know tools.
        text = template if isinstance(template, str) else ""
        if "<|channel|>analysis" in text:
            return replace(HARMONY, special=special)
        thought = None
        if tokenizer.has_thinking:
            thought = Marks(tokenizer.think_start, tokenizer.think_end)
        if not tokenizer.has_chat_template:
            return cls(thought, special=special)
        is_told = "tools" in text or not isinstance(template, str)
        if is_told and tokenizer.has_tool_calling:
            call = Marks(tokenizer.tool_call_start, tokenizer.tool_call_end)
            calls = call_format(tokenizer.tool_parser.__module__, text)
            return cls(thought, call, tokenizer.tool_parser, calls, special)
        writes_llamas = is_told and all(word in str(template) for word in LLAMA3_WORDS)
        return cls(thought, calls=LLAMA3_CALLS if writes_llamas else GENERIC_CALLS, special=special)

    @property
    def way(self) -> str | None:
        """The way in which the model is told of tools; None if there is none."""
        if self.calls is not None:
            return self.calls.way
        return None if self.call is None else "own"


HARMONY = AnswerFormat(
    Marks("<|channel|>analysis<|message|>", "<|end|>"),
    Marks("<|channel|>commentary to=functions.", "<|call|>"),
    calls=HARMONY_CALLS,
    has_channels=True,
)
"""The format of gpt-oss."""
