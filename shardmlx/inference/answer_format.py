"""Marks by which an answer says what it thought, and the formats of calls of tools that can be
asked for. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

LLAMA3_WORDS = ("ipython", '"parameters": ')
"""Words in the templates of Llama 3.1 and newer: the role of results, and a call's arguments."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The texts before and after a part of an answer. Without an end it goes on to the answer's."""

    start: str
    end: str


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The texts around the arguments of calls.

    A model that is made to call writes ``first``, calls with ``between`` them, and ``last``; a call
    is ``before``, with its name in the place of ``{}``, the arguments, a JSON object, and
    ``after``. Where ``between`` is None there is but one call. A ``thought`` between these marks
    may come before all. ``way`` names how a model is told of tools, and how its calls are read.
    """

    before: str
    after: str
    _: KW_ONLY
    between: str | None = ""
    first: str = ""
    last: str = ""
    thought: Marks | None = None
    way: Literal["own", "llama3", "generic"] = "own"

    def begun(self, name: str) -> str:
        """Return the text before the arguments of a call of this name."""
        return self.before.replace("{}", name)


def json_calls(marks: Marks) -> CallFormat:
    """Return the format in which a model with these ``marks`` is made to call: JSON objects, each
    between them, or a list where no mark ends a call. Arguments of GLM's, Qwen3-Coder's and others'
    own calls are not JSON."""
    before = '{"name": "{}", "arguments": '
    if not marks.end:
        return CallFormat(before, "}", between=", ", first=f"{marks.start}[", last="]")
    return CallFormat(f"{marks.start}\n{before}", f"}}\n{marks.end}", between="\n")


HARMONY_CALLS = CallFormat(
    "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
    "",
    between=None,
    thought=Marks("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
)
"""The format of gpt-oss, which mlx-lm does not read. The mark after a call ends the answer."""

LLAMA3_CALLS = CallFormat('{"name": "{}", "parameters": ', "}", between=None, way="llama3")
"""The format of Llama 3.1 to 3.3. Their templates take one call in a message.

https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/
"""

GENERIC_CALLS = CallFormat('{"name": "{}", "arguments": ', "}", between="\n", way="generic")
"""The format for models whose template knows no tools: a message tells them of it."""


Tool = Mapping[str, Any]
"""A tool as OpenAI's API describes it."""

ParseCall = Callable[[str, Sequence[Tool]], Any]
"""Function that makes of the text between two marks a mapping with ``name`` and ``arguments``, or a
list of them; it raises whatever it likes."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The marks of a model for ``thought`` and ``call``; calls without marks are JSON in what is
    said. ``special`` are the texts of control tokens, with their numbers. An answer that
    ``has_channels`` is messages in OpenAI's Harmony format."""

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
            return cls(thought, call, tokenizer.tool_parser, json_calls(call), special)
        writes_llamas = is_told and all(word in str(template) for word in LLAMA3_WORDS)
        return cls(thought, calls=LLAMA3_CALLS if writes_llamas else GENERIC_CALLS, special=special)

    @property
    def takes_several(self) -> bool:
        """True if an answer may have several calls."""
        return self.calls is None or self.calls.between is not None

    @property
    def way(self) -> str | None:
        """The way in which the model is told of tools; None if there is none."""
        return None if self.calls is None else self.calls.way


HARMONY = AnswerFormat(
    Marks("<|channel|>analysis<|message|>", "<|end|>"),
    Marks("<|channel|>commentary to=functions.", "<|call|>"),
    calls=HARMONY_CALLS,
    has_channels=True,
)
"""The format of gpt-oss."""
