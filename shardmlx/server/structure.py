"""The structure that a request wants its answer to have, or a call of a tool, as a grammar. No MLX,
no MPI.

OpenAI's ``response_format``, and vLLM's ``structured_outputs``; the grammar is llguidance's Lark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import Field
from pydantic import Json as FromJson

from shardmlx.errors import UserError
from shardmlx.inference.answer_format import CallFormat, Tool
from shardmlx.server.accepted_fields import Body, Json, Listed
from shardmlx.server.closed_schema import closed
from shardmlx.server.openai_errors import refused

LONGEST_GRAMMAR = 2_000_000
"""Characters of a grammar. All answers wait while it is made ready, a second for every million."""

LONGEST_RULE = 100_000
"""Characters of a rule alone: it may take its length squared. Several take the sum of squares."""

SPACE = r"[ \n\t]{0,20}"
"""Space between the parts of JSON. Without a bound a model might write nothing else."""

LITTLE_SPACE = " ?"
"""Space between the parts of a call's arguments: templates write them in a line."""


Schema = dict[str, Any] | FromJson[dict[str, Any]]
"""A JSON schema, or the JSON of one."""


class SchemaBody(Body):
    """A JSON schema with a name. An answer keeps to it, whether it is to be ``strict`` or not."""

    json_schema: dict[str, Any] = Field(alias="schema")

    passes = frozenset({"name", "description", "strict"})


class ResponseFormatBody(Body):
    """The ``response_format`` of a request: OpenAI's, or with ``schema`` beside ``type``, as
    llama.cpp, Together and Fireworks have it, with either type of JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaBody | None = None
    plain_schema: dict[str, Any] | None = Field(None, alias="schema")

    passes = frozenset({"name", "description", "strict"})

    def wanted(self, where: str) -> Json | None:
        """Return the schema that an answer must follow; None if there is none. Raises ``ApiError``,
        which calls the form ``where``."""
        named = None if self.json_schema is None else self.json_schema.json_schema
        plain = self.plain_schema
        if None not in (named, plain) and named != plain:
            raise refused(f"{where} has two schemas: give one of them", f"{where}.schema")
        schema = named if plain is None else plain
        if self.type == "json_schema" and schema is None:
            raise refused(f"{where}: its schema is missing", where)
        if self.type == "text" and schema:
            raise refused(f"{where} has a schema: give type json_schema", f"{where}.type")
        if self.type == "json_object":
            return {"type": "object", **(schema or {})}
        return schema if self.type == "json_schema" else None

    def structure(self, where: str) -> Structure | None:
        """Return the structure that an answer must have, if any. Raises ``ApiError``, which calls
        the form ``where``."""
        schema = self.wanted(where)
        return None if schema is None else Structure(where, _rules("json", schema, where))


class StructureBody(Body):
    """The ``structured_outputs`` of a request."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Listed[str] | None = None
    grammar: str | None = None

    passes = frozenset({"disable_fallback"})
    # The properties that a schema names are all that there are, in any case.
    neutral: ClassVar = {"disable_additional_properties": (True, False)}


class StructuredBody(Body):
    """The fields by which a request asks for a structure of its answer."""

    response_format: ResponseFormatBody | None = None
    structured_outputs: StructureBody | None = None

    def structure(self) -> Structure | None:
        """Return what structure is asked for; None if none is. Raises ``ApiError``."""
        asked = [each for each in self._fields() if each[2] is not None]
        if not asked:
            return None
        (param, kind, value), *others = asked
        if others:
            said = f"{param} ({kind}) and {others[0][0]} ({others[0][1]}) both ask for a structure"
            raise refused(f"{said}: give one of them", param)
        if kind == "grammar":
            return Structure(param, [value], is_whole=True)
        return Structure(param, _rules(kind, value, param))

    def _fields(self) -> list[tuple[str, str, Any]]:
        """Return field, kind and value of each structure that may be asked for."""
        named = self.response_format or ResponseFormatBody(type="text", schema=None)
        other = self.structured_outputs or StructureBody(json=None)
        any_object = {"type": "object"}
        return [
            ("response_format", named.type, named.wanted("response_format")),
            ("structured_outputs", "json", other.json_),
            ("structured_outputs", "json_object", any_object if other.json_object else None),
            ("structured_outputs", "regex", other.regex),
            ("structured_outputs", "choice", other.choice),
            ("structured_outputs", "grammar", other.grammar),
        ]


def _rules(kind: str, value: Any, param: str) -> list[str]:
    """Return the rules of a ``body`` of such a structure. Raises ``ApiError``."""
    if kind == "regex":
        return [f"body: /{escaped(value)}/"]
    if kind == "choice":
        if not value or not all(value):
            raise refused(f"{param}: give texts to choose from", param)
        # In a rule llguidance follows at most 2,000 of them.
        return ["body: CHOICE", f"CHOICE: {' | '.join(map(quoted, value))}"]
    return [f"body: {json_term(closed(value))}"]


@dataclass(frozen=True, slots=True)
class Structure:
    """A structure that field ``param`` asks for: rules of a ``body``, or a whole grammar."""

    param: str
    rules: Sequence[str]
    is_whole: bool = False

    def or_body(self, others: Sequence[str]) -> Structure:
        """Return this structure or the ``body`` of others. Raises ``ApiError`` if it is whole."""
        if self.is_whole:
            raise refused(
                f"{self.param} is a grammar of the whole answer: give it, or tools", self.param
            )
        first, second = (
            [rules[0].replace("body", name, 1), *rules[1:]]
            for name, rules in (("said", self.rules), ("calls", others))
        )
        return replace(self, rules=["body: said | calls", *first, *second])

    def grammar(
        self,
        complaint: Callable[[str], str] | None,
        thought_end: str | None,
        special: Mapping[str, int],
    ) -> str:
        """Return the grammar of an answer that begins in a thought, if ``thought_end`` is given.
        Raises ``ApiError`` for one of which there is a ``complaint``, or where that is None."""
        param = self.param
        if self.is_whole and thought_end is not None:
            raise refused(
                f"{param}: the model's thought would have to keep to the grammar too: add "
                '"chat_template_kwargs": {"enable_thinking": false}',
                param,
            )
        if complaint is None:
            raise refused(
                f"{param} needs llguidance on rank 0, and on ranks of the last stage: pip install "
                "llguidance there",
                param,
                "unsupported_parameter",
            )
        # Without the thought, after which it would be too late.
        alone = self.rules[0] if self.is_whole else grammar_of(self.rules)
        squares = sum(len(rule) ** 2 for rule in self.rules)
        if len(alone) > LONGEST_GRAMMAR or squares > LONGEST_RULE**2:
            raise refused(
                f"{param}: as a grammar it has {len(alone)} characters: at most {LONGEST_RULE} are "
                f"read, or {LONGEST_GRAMMAR} of many short rules, as those of tools are",
                param,
            )
        if said := complaint(alone):
            raise refused(f"{param}: {UserError(said)}", param)
        return alone if thought_end is None else grammar_of(self.rules, thought_end, special)


def grammar_of(
    rules: Sequence[str], thought_end: str | None = None, special: Mapping[str, int] | None = None
) -> str:
    """Return the grammar of the ``body`` of ``rules``, after a thought with such an end, if any."""
    if thought_end is None:
        return "\n".join(["start: body", *rules])
    end = list(terms(thought_end, special or {}))
    thought = f"thought: /(?s:.*)/ {' '.join(end)}"
    if end == [quoted(thought_end)]:  # text, which ends the thought where it first comes
        thought = f"thought[suffix={end[0]}]: /(?s:.*)/"
    return "\n".join(["start: thought body", *rules, thought])


def terms(text: str, special: Mapping[str, int]) -> Iterator[str]:
    """Yield a text in a grammar's words: ``special`` tokens by their numbers."""
    pattern = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
    for part in re.split(f"({pattern})", text):
        if part in special:
            yield f"<[{special[part]}]>"
        elif part:
            yield quoted(part)


def json_term(schema: Mapping[str, Any], space: str = SPACE) -> str:
    """Return the term of a grammar for JSON of a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': space}})}"


def quoted(text: str) -> str:
    """Return the term of a grammar for a text."""
    return json.dumps(text, ensure_ascii=False)


def escaped(pattern: str) -> str:
    """Return a pattern for between two slashes, in one line."""
    told = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return re.sub(r"(?s)\\.|[/\n]", lambda found: told.get(found[0], found[0]), pattern)


def _said(special: Mapping[str, int], text: str) -> str:
    """Return a text in a grammar's words."""
    return " ".join(terms(text, special))


def call_rules(
    tools: Sequence[Tool], written: CallFormat, special: Mapping[str, int], *, parallel: bool
) -> list[str]:
    """Return the rules of a ``body`` that calls one of ``tools``, or several if calls may be
    ``parallel``."""

    said = partial(_said, special)
    thought = ""
    more = ""
    rules = []
    if written.thought is not None:
        thought = f"({said(written.thought.start)} THOUGHT {said(written.thought.end)})?"
        rules.append("THOUGHT: /(?s:.*)/")
    for number, tool in enumerate(tools):
        name = tool["function"]["name"]
        schema = closed({"type": "object", **tool["function"]["parameters"]})
        rules.append(f"arguments_{number}: {json_term(schema, LITTLE_SPACE)}")
        before = said(written.begun(name))
        rules.append(f"call_{number}: {before} arguments_{number} {said(written.after)}")
    rules.append(f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}")
    if parallel and written.between is not None:
        more = f"({said(written.between)} call)*"
    body = [thought, said(written.first), "call", more, said(written.last)]
    return [f"body: {' '.join(filter(None, body))}", *rules]
