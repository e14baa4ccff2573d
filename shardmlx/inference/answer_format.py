"""Marks by which an answer says what it thought, and which tools it calls. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardmlx.inference.call_formats import HARMONY_CALLS, CallFormat

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
    within what is said. ``special`` are the texts of
    control tokens, with their numbers. An answer that ``has_channels`` is messages in OpenAI's
    Harmony format.
    """

    thought: Marks | None = None
    call: Marks | None = None
    parse: ParseCall | None = None
    calls: CallFormat | None = None
    special: Mapping[str, int] = field(default_factory=dict)
    has_channels: bool = False

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
