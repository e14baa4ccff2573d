"""The grammar of an answer that calls a tool, whatever the model would say. No MLX, no MPI."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from shardmlx.inference.answer_format import Tool
from shardmlx.inference.call_formats import CallFormat
from shardmlx.server.argument_types import has_value
from shardmlx.server.openai_errors import refused, shown
from shardmlx.server.structure import LITTLE_SPACE, closed, endless, json_term
from shardmlx.server.written_arguments import ArgumentRules, Rules


def call_rules(
    tools: Sequence[Tool], written: CallFormat, special: Mapping[str, int], *, parallel: bool
) -> list[str]:
    """Return the rules of a ``body`` that calls one of ``tools``, or several if calls may be
    ``parallel``, each with arguments of its schema.

    ``special`` are the texts of control tokens with their numbers: text cannot spell these. Raises
    ``ApiError`` for what the format has no place for.
    """
    rules = Rules(special)
    calls = [_call(tool, written, rules) for tool in tools]
    call = rules.add("call", " | ".join(calls))
    body = [*rules.terms(written.first), call]
    if parallel and written.between is not None:
        body.append(f"({' '.join([*rules.terms(written.between), call])})*")
    body += rules.terms(written.last)
    if written.thought is not None:
        start, end = (" ".join(rules.terms(mark)) for mark in written.thought)
        text = rules.add("TEXT", r"/(?s:.*)/")
        body.insert(0, f"({start} {text} {end})?")
    return [f"body: {' '.join(body)}", *rules.lines]


def _call(tool: Tool, written: CallFormat, rules: Rules) -> str:
    """Add the rule of a call of one tool; return its name."""
    name = tool["function"]["name"]
    if not re.fullmatch(written.names, name):
        raise refused(
            f"tool_choice: this model's format of calls has no place for the name {shown(name)}: "
            "give 'auto'",
            "tool_choice",
            "unsupported_parameter",
        )
    before = " ".join(rules.terms(written.before.format(name)))
    after = " ".join(rules.terms(written.after))
    schema = closed({"type": "object", **tool["function"]["parameters"]})
    if not has_value(schema):
        raise endless("tools")
    if written.arguments is None:
        sequences = [rules.add("json", json_term(schema, LITTLE_SPACE))]
    else:
        arguments = ArgumentRules(rules, written.arguments, schema, name)
        try:
            sequences = arguments.sequences(schema)
        except (AttributeError, KeyError, TypeError, ValueError):  # it may be any JSON
            raise refused(f"the parameters of {shown(name)} are no JSON schema", "tools") from None
    calls = [f"{before} {each} {after}" for each in sequences if each or written.empty is None]
    if "" in sequences and written.empty is not None:
        calls.append(" ".join(rules.terms(written.empty.format(name))))
    return rules.add("call", " | ".join(calls))
