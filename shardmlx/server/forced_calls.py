"""The grammar of an answer that calls a tool, whatever the model would say. No MLX, no MPI.

Arguments are JSON of their schema, or written one by one as ``ArgumentFormat`` says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardmlx.inference.answer_format import ArgumentFormat, CallFormat, Tool
from shardmlx.server.argument_types import (
    Schema,
    properties_of,
    referred,
    string_branches,
    types_of,
)
from shardmlx.server.openai_errors import ApiError, refused, shown
from shardmlx.server.structure import LITTLE_SPACE, closed, escaped, json_term, quoted, terms

TEXT = r"[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f]*"
"""Characters of a text: all but those of control."""

MOST = 10**15
"""Numbers are no larger, unless their schema says so: 1E999 is none that can be read."""

NUMBERS = frozenset({"integer", "number"})
NESTED = frozenset({"array", "object"})


@dataclass(slots=True)
class Rules:
    """Rules of a grammar; ``special`` are control tokens, which text cannot spell, by number."""

    special: Mapping[str, int]
    lines: list[str] = field(default_factory=list)

    def add(self, name: str, says: str) -> str:
        """Add a rule; return its name, with a number of its own."""
        name = f"{name}_{len(self.lines)}"
        self.lines.append(f"{name}: {says}")
        return name

    def terms(self, text: str) -> str:
        """Return a text in a grammar's words: control tokens by their numbers."""
        return " ".join(terms(text, self.special))


@dataclass(frozen=True, slots=True)
class ArgumentRules:
    """Rules for the arguments of the ``tool``, of schema ``root``, added to ``rules``."""

    rules: Rules
    form: ArgumentFormat
    root: Schema
    tool: str

    def sequences(self) -> list[str]:
        """Return what the arguments may be, in order; "" for none at all. Raises ``ApiError``."""
        required = self.root.get("required") or []
        properties = dict(properties_of(self.root))
        for name in required:
            properties.setdefault(name, {})
        items = [
            (self._argument(name, each), name in required) for name, each in properties.items()
        ]
        comma = self.rules.terms(self.form.between)
        found = []
        for at, (first, is_required) in enumerate(items):
            later = [
                f"{comma} {rule}" if needed else f"({comma} {rule})?"
                for rule, needed in items[at + 1 :]
            ]
            found.append(" ".join([first, *later]))
            if is_required:
                return found
        return [*found, ""]

    def _argument(self, name: str, schema: Any) -> str:
        if not re.fullmatch(self.form.names, name):
            raise self._refused(name, "its name")
        before = self.rules.terms(self.form.before.format(name))
        values = self._values({} if schema is True else schema, name)
        return self.rules.add("argument", f"{before} ({' | '.join(values)})")

    def _values(self, schema: Any, name: str) -> list[str]:
        if not isinstance(schema, dict):
            raise self._refused(name, "its schema")
        if "$ref" in schema:
            schema = referred(schema, self.root)
        form, types = self.form, types_of(schema, self.root)
        is_text, others = "string" in types, types - {"string"}
        end = self.rules.terms(form.after)
        if form.quote is None or (others and form.reads_json):
            return [f"{self._json(schema, types)} {end}"]
        if not others:
            return [self._text(schema, name)]
        if form.quote:
            if others & NESTED:
                raise self._refused(name, "arrays and objects")
            if not is_text:
                return [f"{self._json(schema, types)} {end}"]
            plain = {"allOf": [schema], "type": sorted(others)}
            return [self._text(schema, name), f"{self._json(plain, others)} {end}"]
        if is_text and others == {"null"}:
            return [self._text(schema, name), f'"null" {end}']
        kinds = {"number" if each in NUMBERS else each for each in types - {"null"}}
        if is_text or (len(kinds) > 1 and kinds != NESTED):
            raise self._refused(name, f"values of several types ({', '.join(sorted(types))})")
        return [f"{self._json(schema, types)} {end}"]

    def _json(self, schema: Schema, types: frozenset[str]) -> str:
        bounds = {"minimum": -MOST, "maximum": MOST} if types & NUMBERS else {}
        shared = {name: self.root[name] for name in ("$defs", "definitions") if name in self.root}
        return self.rules.add("json", json_term({**bounds, **schema, **shared}, LITTLE_SPACE))

    def _text(self, schema: Schema, name: str) -> str:
        """Return the rule of a text, with what ends it."""
        form, rules = self.form, self.rules
        end = [*terms(form.quote or form.after, rules.special)]
        # The rule includes the end mark: else the mark's beginning would count as text.
        last = "" if end[0].startswith("<[") else end.pop(0)
        no_texts = list(self._no_texts(is_null="null" in types_of(schema, self.root)))
        says = " | ".join(
            each
            for branch in string_branches(schema, self.root)
            for each in self._texts(branch, no_texts, name)
        )
        text = rules.add("TEXT", f"({says}) {last}")
        said = " ".join([text, *end])
        return f"{rules.terms(form.quote)} {said} {rules.terms(form.after)}" if form.quote else said

    def _texts(self, schema: Schema, no_texts: Sequence[str], name: str) -> Iterator[str]:
        """Yield the terms of a grammar for texts of a schema, but those of these patterns."""
        chosen = [schema["const"]] if "const" in schema else schema.get("enum")
        if chosen is not None:
            texts = [each for each in chosen if isinstance(each, str)]
            if any(not self._can_be_text(each) for each in texts):
                raise self._refused(name, "one of its values")
            yield from map(quoted, texts)
            return
        pattern = schema.get("pattern")
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        terms = [f"/{escaped(TEXT)}/"]
        if isinstance(pattern, str):
            terms.append(f"/{escaped(_anywhere(pattern))}/")
        if least or most != "":
            terms.append(f"/(?s:.{{{least},{most}}})/")
        terms += [f"~/{escaped(each)}/" for each in no_texts]
        yield f"({' & '.join(terms)})"

    def _no_texts(self, *, is_null: bool) -> Iterator[str]:
        """Yield patterns of what is no text to who reads it, who may look for null too."""
        form = self.form
        ends = "|".join(re.escape(each) for each in form.ends if each not in self.rules.special)
        if ends:
            yield rf"(?s:.*)({ends})(?s:.*)"
        if form.strips:
            yield r"\s(?s:.*)|(?s:.*)\s"
        if form.has_null:
            yield r"(?i:null)"
            if is_null:
                yield r"(?i:none|nil)|[\[{](?s:.*)"

    def _can_be_text(self, text: str) -> bool:
        form = self.form
        lost = form.strips and text != text.strip()
        is_null = form.has_null and text.lower() in ("null", "none", "nil")
        return not (lost or is_null or any(each in text for each in form.ends))

    def _refused(self, name: str, what: str) -> ApiError:
        return refused(
            f"tool_choice: argument {shown(name)} of {shown(self.tool)}: this model's format of "
            f"calls has no place for {what}: give 'auto'",
            "tool_choice",
            "unsupported_parameter",
        )


def _anywhere(pattern: str) -> str:
    """Return a pattern for whole texts of one that is looked for within them."""
    is_end = pattern.endswith("$") and not pattern.endswith(r"\$")
    before = "" if pattern.startswith("^") else "(?s:.*)"
    after = "" if is_end else "(?s:.*)"
    return f"{before}({pattern.removeprefix('^')[: -1 if is_end else None]}){after}"


def call_rules(
    tools: Sequence[Tool], written: CallFormat, special: Mapping[str, int], *, parallel: bool
) -> list[str]:
    """Return the rules of a ``body`` that calls one of ``tools``, or several if calls may be
    ``parallel``. Raises ``ApiError`` for what the format has no place for."""
    rules = Rules(special)
    calls = [_call(tool, written, rules) for tool in tools]
    call = rules.add("call", " | ".join(calls))
    thought, more = "", ""
    if parallel and written.between is not None:
        more = f"({rules.terms(written.between)} {call})*"
    if written.thought is not None:
        start, end = map(rules.terms, written.thought)
        thought = f"({start} {rules.add('TEXT', '/(?s:.*)/')} {end})?"
    body = [thought, rules.terms(written.first), call, more, rules.terms(written.last)]
    return [f"body: {' '.join(filter(None, body))}", *rules.lines]


def _call(tool: Tool, written: CallFormat, rules: Rules) -> str:
    name = tool["function"]["name"]
    if not re.fullmatch(written.names, name):
        raise refused(
            f"tool_choice: this model's format of calls has no place for the name {shown(name)}: "
            "give 'auto'",
            "tool_choice",
            "unsupported_parameter",
        )
    before = rules.terms(written.before.format(name))
    after = rules.terms(written.after)
    schema = closed({"type": "object", **tool["function"]["parameters"]})
    if written.arguments is None:
        sequences = [rules.add("json", json_term(schema, LITTLE_SPACE))]
    else:
        try:
            sequences = ArgumentRules(rules, written.arguments, schema, name).sequences()
        except (AttributeError, KeyError, TypeError, ValueError):  # it may be any JSON
            raise refused(f"the parameters of {shown(name)} are no JSON schema", "tools") from None
    calls = [f"{before} {each} {after}" for each in sequences if each or written.empty is None]
    if "" in sequences and written.empty is not None:
        calls.append(rules.terms(written.empty.format(name)))
    return rules.add("call", " | ".join(calls))
