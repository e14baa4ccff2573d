"""Marks by which an answer says what it thought, and the formats in which models write calls of
tools, most of them those of mlx-lm's tool parsers. No MLX, no MPI.

A grammar can ask for a call in any of these formats.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

LLAMA3_WORDS = ("ipython", '"parameters": ')
"""Words in the templates of Llama 3.1 and newer: the role of results, and a call's arguments."""

_WORD = r"\w+"
_NO_MARKS = r"[^\s<>\"'=\[\]{},:]+"
_PYTHON = rf"(?!(?:{'|'.join(keyword.kwlist)})$)[A-Za-z_]\w*"


@dataclass(frozen=True, slots=True)
class ArgumentFormat:
    """The way to write arguments of a call that are no JSON object.

    Each is ``before``, with its name in the place of ``{}``, a value, and ``after``; ``between``
    stands between two. Names match ``names``. A value is JSON, but for texts: they are written as
    they are, between ``quote`` and ``quote``, and cannot have one of ``ends`` within; or, if that
    is None, as JSON too.

    ``strips``: space around a text is lost. ``has_null``: the text "null" is no text.
    ``reads_json``: a text may be written as JSON where it might as well be of another type. Where
    texts have a ``quote``, arrays and objects have no place.
    """

    before: str
    after: str
    ends: tuple[str, ...] = ()
    _: KW_ONLY
    between: str = ""
    names: str = _NO_MARKS
    quote: str | None = ""
    strips: bool = False
    has_null: bool = False
    reads_json: bool = False


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The texts around the arguments of calls.

    A model that is made to call writes ``first``, calls with ``between`` them, and ``last``; a call
    is ``before``, with its name in the place of ``{}``, the arguments, and ``after``. Without
    arguments it is ``empty``, if that is not None. Names match ``names``. Where ``between`` is None
    there is but one call. A ``thought`` between these marks may come before all.

    Arguments are a JSON object, or as ``arguments`` say. A JSON object can be passed on while it
    comes: ``opening`` matches what stands before it, after the answer's mark of calls or the call
    before, with the call's ``name``; ``closing`` what may follow the last. ``way`` names how a
    model is told of tools, and how its calls are read.
    """

    before: str
    after: str
    arguments: ArgumentFormat | None = None
    _: KW_ONLY
    between: str | None = ""
    first: str = ""
    last: str = ""
    empty: str | None = None
    names: str = r"[\w.-]+"
    thought: tuple[str, str] | None = None
    opening: re.Pattern[str] | None = None
    closing: re.Pattern[str] | None = None
    way: Literal["own", "llama3", "generic"] = "own"


_OBJECT = r'\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\{)'

_BY_PARSER: Mapping[str, CallFormat] = {
    "mlx_lm.tool_parsers.json_tools": CallFormat(
        '<tool_call>\n{{"name": "{}", "arguments": ',
        "}\n</tool_call>",
        between="\n",
        opening=re.compile(rf"\s*{_OBJECT}"),
        closing=re.compile(r"\s*\}\s*"),
    ),
    "mlx_lm.tool_parsers.mistral": CallFormat(
        '{{"name": "{}", "arguments": ',
        "}",
        between=", ",
        first="[TOOL_CALLS][",
        last="]",
        opening=re.compile(rf"[\s\[,}}]*{_OBJECT}"),
        closing=re.compile(r"\s*\}\s*\]?\s*"),
    ),
    "mlx_lm.tool_parsers.kimi_k2": CallFormat(
        "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        first="<|tool_calls_section_begin|>",
        last="<|tool_calls_section_end|>",
        opening=re.compile(
            r"\s*(?:<\|tool_call_end\|>)?\s*(?:<\|tool_call_begin\|>)?\s*(?:functions\.)?"
            r"(?P<name>[^\s:<]+):\d+\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
        ),
        closing=re.compile(r"\s*(?:<\|tool_call_end\|>)?\s*"),
    ),
    "mlx_lm.tool_parsers.qwen3_coder": CallFormat(
        "<tool_call>\n<function={}>\n",
        "</function>\n</tool_call>",
        ArgumentFormat(
            "<parameter={}>\n", "\n</parameter>\n", ("</parameter>", "</tool_call>"), has_null=True
        ),
        between="\n",
    ),
    "mlx_lm.tool_parsers.glm47": CallFormat(
        "<tool_call>{}",
        "</tool_call>",
        ArgumentFormat(
            "<arg_key>{}</arg_key><arg_value>",
            "</arg_value>",
            ("</arg_value>", "</tool_call>"),
            strips=True,
            reads_json=True,
        ),
        between="\n",
    ),
    "mlx_lm.tool_parsers.longcat": CallFormat(
        "<longcat_tool_call>{}",
        "</longcat_tool_call>",
        ArgumentFormat(
            "<longcat_arg_key>{}</longcat_arg_key><longcat_arg_value>",
            "</longcat_arg_value>",
            ("</longcat_arg_value>", "</longcat_tool_call>"),
            strips=True,
            reads_json=True,
        ),
        between="\n",
        empty='<longcat_tool_call>{{"name": "{}", "arguments": {{}}}}</longcat_tool_call>',
    ),
    "mlx_lm.tool_parsers.minimax_m2": CallFormat(
        '<invoke name="{}">\n',
        "</invoke>\n",
        ArgumentFormat(
            '<parameter name="{}">',
            "</parameter>\n",
            ("</parameter>", "</invoke>", "</minimax:tool_call>"),
            strips=True,
            has_null=True,
        ),
        first="<minimax:tool_call>\n",
        last="</minimax:tool_call>",
    ),
    "mlx_lm.tool_parsers.minicpm5": CallFormat(
        '<function name="{}">',
        "</function>",
        ArgumentFormat(
            '<param name="{}">', "</param>", ("</param>", "</function>"), strips=True, has_null=True
        ),
        between="\n",
    ),
    "mlx_lm.tool_parsers.muse_spark": CallFormat(
        '<atem:invoke name="{}">\n',
        "</atem:invoke>\n",
        ArgumentFormat('<atem:parameter name="{}">', "</atem:parameter>\n", quote=None),
        first="<atem:function_calls>\n",
        last="</atem:function_calls>",
    ),
    "mlx_lm.tool_parsers.pythonic": CallFormat(
        "{}(",
        ")",
        ArgumentFormat("{}=", "", between=", ", names=_PYTHON, quote=None),
        between=", ",
        first="<|tool_call_start|>[",
        last="]<|tool_call_end|>",
        names=_PYTHON,
    ),
    "mlx_lm.tool_parsers.function_gemma": CallFormat(
        "<start_function_call>call:{}{{",
        "}<end_function_call>",
        ArgumentFormat(
            "{}:",
            "",
            ("<escape>", "}", "<end_function_call>"),
            between=",",
            names=_WORD,
            quote="<escape>",
        ),
        names=_WORD,
    ),
    "mlx_lm.tool_parsers.gemma4": CallFormat(
        "<|tool_call>call:{}{{",
        "}<tool_call|>",
        ArgumentFormat(
            "{}:", "", ('<|"|>', "<tool_call|>"), between=",", names=_WORD, quote='<|"|>'
        ),
        names=r"[\w-]+",
    ),
}
"""The formats of mlx-lm's tool parsers, by their modules, but for Kimi K3, which cannot run here.
Laguna's parser is that of GLM."""

_MISTRAL_WITH_MARKS = CallFormat(
    "[TOOL_CALLS]{}[ARGS]",
    "",
    opening=re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*(?P<name>[\w-]+)\s*\[ARGS\]\s*(?=\{)"),
    closing=re.compile(r"\s*"),
)

HARMONY_CALLS = CallFormat(
    "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
    "",
    between=None,
    thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
)
"""The format of gpt-oss, which mlx-lm does not read. The mark after a call ends the answer."""

LLAMA3_CALLS = CallFormat('{{"name": "{}", "parameters": ', "}", between=None, way="llama3")
"""The format of Llama 3.1 to 3.3. Their templates take one call in a message.

https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/
"""

GENERIC_CALLS = CallFormat(
    '{{"name": "{}", "arguments": ', "}", between="\n", names=r"[\w.:-]+", way="generic"
)
"""The format for models whose template knows no tools: a message tells them of it."""

KNOWN = (*(parser.rpartition(".")[2] for parser in _BY_PARSER), "gpt-oss")
"""Names of the formats in which a call can be asked for."""


def call_format(parser: str, template: str) -> CallFormat | None:
    """Return the format of a parser of mlx-lm, by its module and the chat template, if known."""
    if parser == "mlx_lm.tool_parsers.mistral" and "[ARGS]" in template:
        return _MISTRAL_WITH_MARKS
    return _BY_PARSER.get(parser)


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
