"""Formats of mlx-lm's tool parsers in which the arguments of a call are JSON. No MLX, no MPI.

Such arguments can be passed on while they come, and a grammar can ask for a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The texts around the arguments of calls.

    ``opening`` matches what stands between the answer's mark of calls, or the arguments of the call
    before, and the arguments of a call, with its ``name``; ``closing`` what may follow the last.
    A model that is made to call writes ``first``, calls with ``between`` them, and ``last``; a call
    is ``before``, with its name in the place of ``{}``, the arguments, and ``after``.
    """

    opening: re.Pattern[str]
    closing: re.Pattern[str]
    before: str
    after: str
    between: str
    first: str = ""
    last: str = ""


_OBJECT = r'\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\{)'

_JSON = CallFormat(
    opening=re.compile(rf"\s*{_OBJECT}"),
    closing=re.compile(r"\s*\}\s*"),
    before='<tool_call>\n{{"name": "{}", "arguments": ',
    after="}\n</tool_call>",
    between="\n",
)

_MISTRAL = CallFormat(
    opening=re.compile(rf"[\s\[,}}]*{_OBJECT}"),
    closing=re.compile(r"\s*\}\s*\]?\s*"),
    before='{{"name": "{}", "arguments": ',
    after="}",
    between=", ",
    first="[TOOL_CALLS][",
    last="]",
)

_MISTRAL_WITH_MARKS = CallFormat(
    opening=re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*(?P<name>[\w-]+)\s*\[ARGS\]\s*(?=\{)"),
    closing=re.compile(r"\s*"),
    before="[TOOL_CALLS]{}[ARGS]",
    after="",
    between="",
)

_KIMI = CallFormat(
    opening=re.compile(
        r"\s*(?:<\|tool_call_end\|>)?\s*(?:<\|tool_call_begin\|>)?\s*(?:functions\.)?"
        r"(?P<name>[^\s:<]+):\d+\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
    ),
    closing=re.compile(r"\s*(?:<\|tool_call_end\|>)?\s*"),
    before="<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>",
    after="<|tool_call_end|>",
    between="",
    first="<|tool_calls_section_begin|>",
    last="<|tool_calls_section_end|>",
)

_BY_PARSER: Mapping[str, CallFormat] = {
    "mlx_lm.tool_parsers.json_tools": _JSON,
    "mlx_lm.tool_parsers.mistral": _MISTRAL,
    "mlx_lm.tool_parsers.kimi_k2": _KIMI,
}


def call_format(parser: str, template: str) -> CallFormat | None:
    """Return the format of a parser of mlx-lm, by its module, for a model with this
    chat template; None if its arguments are no JSON."""
    known = _BY_PARSER.get(parser)
    return _MISTRAL_WITH_MARKS if known is _MISTRAL and "[ARGS]" in template else known
