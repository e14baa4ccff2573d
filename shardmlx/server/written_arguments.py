"""The grammar of a call's arguments that are no JSON object, each of its schema. No MLX, no MPI."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardmlx.inference.call_formats import ArgumentFormat
from shardmlx.server.argument_types import (
    DEEPEST,
    Schema,
    properties_of,
    referred,
    string_branches,
    types_of,
)
from shardmlx.server.openai_errors import ApiError, refused, shown
from shardmlx.server.structure import LITTLE_SPACE, escaped, json_term, quoted, terms

TEXT = r"[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f]*"
"""Characters of a text: all but those of control."""

MOST = 10**15
"""Numbers are no larger, unless their schema says so: 1E999 is none that can be read."""

NUMBERS = frozenset({"integer", "number"})
NESTED = frozenset({"array", "object"})

ITEMS_SAY = frozenset({"type", "items", "minItems", "maxItems", "title", "description", "default"})
"""Keys in the schema of an array that is written like arguments, not as JSON."""


@dataclass(slots=True)
class Rules:
    """Rules of a grammar; ``special`` are the texts of control tokens, which text cannot spell,
    with their numbers."""

    special: Mapping[str, int]
    lines: list[str] = field(default_factory=list)

    def add(self, name: str, says: str) -> str:
        """Add a rule; return its name, with a number of its own."""
        name = f"{name}_{len(self.lines)}"
        self.lines.append(f"{name}: {says}")
        return name

    def terms(self, text: str) -> Iterator[str]:
        """Yield a text in a grammar's words: control tokens by their numbers."""
        return terms(text, self.special)


@dataclass(frozen=True, slots=True)
class ArgumentRules:
    """Rules for the arguments of one tool, added to ``rules``.

    ``root`` is the schema of them all, ``tool`` its name.
    """

    rules: Rules
    form: ArgumentFormat
    root: Schema
    tool: str

    def sequences(self, schema: Schema, path: str = "") -> list[str]:
        """Return what the arguments may be, in the order of their schema; "" for none at all.

        Raises ``ApiError`` for one that cannot be written.
        """
        required = schema.get("required") or []
        properties = dict(properties_of(schema))
        for name in required:
            properties.setdefault(name, {})
        items = [
            (self._argument(name, each, f"{path}{name}"), name in required)
            for name, each in properties.items()
        ]
        comma = " ".join(self.rules.terms(self.form.between))
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

    def _argument(self, name: str, schema: Any, path: str) -> str:
        if not re.fullmatch(self.form.names, name):
            raise self._refused(path, "its name")
        before = " ".join(self.rules.terms(self.form.before.format(name)))
        values = self._values(schema, path, self.form.after)
        return self.rules.add("argument", f"{before} ({' | '.join(values)})")

    def _values(self, schema: Any, path: str, after: str) -> list[str]:
        """Return what a value may be, with what comes after it."""
        if schema is True:
            schema = {}
        if not isinstance(schema, dict) or path.count(".") + path.count("[") > DEEPEST:
            raise self._refused(path, "its schema")
        if "$ref" in schema:
            schema = referred(schema, self.root)
        form, types = self.form, types_of(schema, self.root)
        others = types - {"string"}
        end = " ".join(self.rules.terms(after))
        if form.quote is None:
            return [f"{self._json(schema, types)} {end}"]
        if not others:
            return [self._text(schema, path, after)]
        is_text = "string" in types
        if form.quote:
            plain = others - NESTED
            values = [self._text(schema, path, after)] if is_text else []
            if plain:
                narrow = schema if plain == types else {"allOf": [schema], "type": sorted(plain)}
                values.append(f"{self._json(narrow, plain)} {end}")
            if nested := others & NESTED:
                values.append(f"{self._nested(schema, nested, types, path)} {end}")
            return values
        if form.reads_json:
            return [f"{self._json(schema, types)} {end}"]
        if is_text and others == {"null"}:
            return [self._text(schema, path, after), f'"null" {end}']
        kinds = {"number" if each in NUMBERS else each for each in types - {"null"}}
        if is_text or (len(kinds) > 1 and kinds != NESTED):
            raise self._refused(path, f"values of several types ({', '.join(sorted(types))})")
        return [f"{self._json(schema, types)} {end}"]

    def _json(self, schema: Schema, types: frozenset[str]) -> str:
        bounds = {"minimum": -MOST, "maximum": MOST} if types & NUMBERS else {}
        shared = {name: self.root[name] for name in ("$defs", "definitions") if name in self.root}
        return self.rules.add("json", json_term({**bounds, **schema, **shared}, LITTLE_SPACE))

    def _nested(
        self, schema: Schema, nested: frozenset[str], types: frozenset[str], path: str
    ) -> str:
        """Return the rule of an array or object whose parts are written like arguments."""
        if self.form.holds != "same" or types != nested or len(nested) > 1 or "type" not in schema:
            raise self._refused(path, "arrays and objects" if not self.form.holds else "its schema")
        if nested == {"object"} and "properties" in schema:
            says = [f'"{{" {each} "}}"' for each in self.sequences(schema, f"{path}.")]
            return self.rules.add("object", " | ".join(says))
        least, most = schema.get("minItems", 0), schema.get("maxItems", "")
        if schema.keys() - ITEMS_SAY or most == 0 or nested != {"array"}:
            raise self._refused(path, "its schema")
        comma = " ".join(self.rules.terms(self.form.between))
        values = self._values(schema.get("items", {}), f"{path}[]", "")
        item = self.rules.add("item", " | ".join(values))
        left = most - 1 if most else ""
        some = f'"[" {item} ({comma} {item}){{{max(least - 1, 0)},{left}}} "]"'
        return self.rules.add("array", some if least else f'"[" "]" | {some}')

    def _text(self, schema: Schema, path: str, after: str) -> str:
        """Return the rule of a text, with what ends it."""
        form, rules = self.form, self.rules
        end = [*rules.terms(form.quote or after)]
        # With what ends it, for else the beginning of that would count as text.
        last = "" if end[0].startswith("<[") else end.pop(0)
        branches = string_branches(schema, self.root)
        no_texts = list(self._no_texts(is_null="null" in types_of(schema, self.root)))
        says = " | ".join(each for one in branches for each in self._texts(one, no_texts, path))
        text = rules.add("TEXT", f"({says}) {last}")
        if form.quote:
            return " ".join([*rules.terms(form.quote), text, *end, *rules.terms(after)])
        return " ".join([text, *end])

    def _texts(self, schema: Schema, no_texts: Sequence[str], path: str) -> Iterator[str]:
        """Yield the terms of a grammar for texts of a schema, but those of these patterns."""
        chosen = [schema["const"]] if "const" in schema else schema.get("enum")
        if chosen is not None:
            texts = [each for each in chosen if isinstance(each, str)]
            if any(not self._can_be_text(each) for each in texts):
                raise self._refused(path, "one of its values")
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

    def _refused(self, path: str, what: str) -> ApiError:
        return refused(
            f"tool_choice: argument {shown(path)} of {shown(self.tool)}: this model's format of "
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
