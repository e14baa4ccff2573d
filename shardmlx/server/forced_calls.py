"""The grammar of an answer that calls a tool, whatever the model would say. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardmlx.inference.answer_format import CallFormat, Tool
from shardmlx.server.structure import LITTLE_SPACE, closed, json_term, terms


def call_rules(
    tools: Sequence[Tool], written: CallFormat, special: Mapping[str, int], *, parallel: bool
) -> list[str]:
    """Return the rules of a ``body`` that calls one of ``tools``, or several if calls may be
    ``parallel``."""

    def said(text: str) -> str:
        return " ".join(terms(text, special))

    thought, more, rules = "", "", []
    if written.thought is not None:
        thought = f"({said(written.thought.start)} THOUGHT {said(written.thought.end)})?"
        rules.append("THOUGHT: /(?s:.*)/")
    for number, tool in enumerate(tools):
        name = tool["function"]["name"]
        schema = closed({"type": "object", **tool["function"]["parameters"]})
        rules.append(f"arguments_{number}: {json_term(schema, LITTLE_SPACE)}")
        before, after = said(written.begun(name)), said(written.after)
        rules.append(f"call_{number}: {before} arguments_{number} {after}")
    rules.append(f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}")
    if parallel and written.between is not None:
        more = f"({said(written.between)} call)*"
    body = [thought, said(written.first), "call", more, said(written.last)]
    return [f"body: {' '.join(filter(None, body))}", *rules]
