"""The grammar of an answer that calls a tool, whatever the model would say. No MLX, no MPI."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardmlx.inference.answer_format import Tool
from shardmlx.inference.call_formats import CallFormat
from shardmlx.server.structure import json_term, quoted


def call_rules(
    tools: Sequence[Tool], written: CallFormat, special: Mapping[str, int], *, parallel: bool
) -> list[str]:
    """Return the rules of a ``body`` that calls one of ``tools``, or several if calls may be
    ``parallel``, each with arguments of its schema.

    ``special`` are the texts of control tokens with their numbers: text cannot spell these.
    """
    first, between, last = (
        _terms(text, special) for text in (written.first, written.between, written.last)
    )
    more = f"({' '.join([*between, 'call'])})*"
    body = [*first, "call", *([more] if parallel else []), *last]
    rules = [
        f"body: {' '.join(body)}",
        f"call: {' | '.join(f'call_{at}' for at in range(len(tools)))}",
    ]
    for at, tool in enumerate(tools):
        before = _terms(written.before.format(tool["function"]["name"]), special)
        call = [*before, f"arguments_{at}", *_terms(written.after, special)]
        rules += [f"call_{at}: {' '.join(call)}", f"arguments_{at}: {json_term(_closed(tool))}"]
    return rules


def _closed(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments: no others than it names, unless it says so."""
    schema = tool["function"]["parameters"]
    more = {"additionalProperties": False} if "properties" in schema else {}
    return {"type": "object", **more, **schema}


def _terms(text: str, special: Mapping[str, int]) -> Iterator[str]:
    """Yield a text in a grammar's words: control tokens by their numbers."""
    marks = sorted(special, key=len, reverse=True)
    pattern = "|".join(map(re.escape, marks)) or "(?!)"
    for part in re.split(f"({pattern})", text):
        if part in special:
            yield f"<[{special[part]}]>"
        elif part:
            yield quoted(part)
