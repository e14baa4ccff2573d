"""Which properties an object may have, told by llguidance of whole texts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardmlx.server.closed_schema import closed
from shardmlx.server.structure import LITTLE_SPACE, grammar_of, json_term

llguidance: Any = pytest.importorskip("llguidance", reason="needs llguidance: pip install it")

TOKENS = llguidance.LLTokenizer("byte")
INTEGER = {"type": "integer"}
A: Any = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
B: Any = {"properties": {"b": INTEGER}, "required": ["b"]}
DEFINED = {"$defs": {"A": A, "B": B}}
TO_A, TO_B = {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}
OPEN = {"additionalProperties": True}
NODE: Any = {
    "type": "object",
    "properties": {"v": INTEGER, "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
    "required": ["v"],
}


def takes(schema: Any, value: Any) -> bool:
    """True if the closed schema lets an answer be this value."""
    matcher = llguidance.LLMatcher(
        TOKENS, grammar_of([f"body: {json_term(closed(schema), LITTLE_SPACE)}"])
    )
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENS.tokenize_str(json.dumps(value))
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


OBJECTS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "of several, closed by itself": (
        {**A, "allOf": [B], "unevaluatedProperties": False},
        [{"a": 1, "b": 2}],
        [{"a": 1, "b": 2, "z": 1}],
    ),
    "without properties, closed by itself": (
        {"type": "object", "unevaluatedProperties": False},
        [{}],
        [{"z": 1}],
    ),
    "open by itself": ({**A, "unevaluatedProperties": True}, [{"a": 1, "z": "y"}], [{"z": 1}]),
    "beside a definition of a twin's name": (
        {
            "$defs": {**DEFINED["$defs"], "shardmlx-open-0": INTEGER},
            "properties": {"z": {"$ref": "#/$defs/shardmlx-open-0"}},
            "required": ["z"],
            "allOf": [TO_A, TO_B],
        },
        [{"z": 3, "a": 1, "b": 2}],
        [{"z": "y", "a": 1, "b": 2}, {"z": 3, "a": 1, "b": 2, "y": 1}],
    ),
    "with what says nothing": (
        {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "string", "format": "path"},
            "dependentRequired": {},
            "properties": {"l": {"type": "array", "uniqueItems": False, "items": INTEGER}},
        },
        [{"l": [1, 1], "z": "/etc"}],
        [{"z": 1}],
    ),
    "on top": (A, [{"a": 1}], [{"a": 1, "z": 1}]),
    "inside": ({"properties": {"o": A}}, [{"o": {"a": 1}}], [{"o": {"a": 1, "z": 1}}]),
    "in a list": ({"type": "array", "items": A}, [[{"a": 1}]], [[{"a": 1}, {"a": 1, "z": 1}]]),
    "in a tuple": ({"prefixItems": [A], "items": A}, [[{"a": 1}]], [[{"a": 1, "z": 1}]]),
    "by a reference": ({**TO_A, **DEFINED}, [{"a": 1}], [{"a": 1, "z": 1}]),
    "by an older reference": (
        {"properties": {"o": {"$ref": "#/definitions/A"}}, "definitions": {"A": A}},
        [{"o": {"a": 1}}],
        [{"o": {"a": 1, "z": 1}}],
    ),
    "that holds itself": (
        {"$ref": "#/$defs/Node", "$defs": {"Node": NODE}},
        [{"v": 1, "next": {"v": 2, "next": None}}],
        [{"v": 1, "next": {"v": 2, "z": 3}}],
    ),
    "that holds itself, described": (
        {**A, "properties": {"a": INTEGER, "n": {"allOf": [{"$ref": "#"}], "description": "x"}}},
        [{"a": 1, "n": {"a": 2}}],
        [{"a": 1, "n": {"a": 2, "z": 3}}],
    ),
    "of several schemas": (
        {"allOf": [TO_A, TO_B], **DEFINED},
        [{"a": 1, "b": 2}],
        [{"a": 1}, {"a": 1, "b": 2, "z": 3}],
    ),
    "of a schema and more": (
        {**TO_A, "properties": {"q": B}, **DEFINED},
        [{"a": 1, "q": {"b": 1}}],
        [{"a": 1, "z": 1}, {"a": 1, "q": {"b": 1, "z": 1}}],
    ),
    "of one schema or another": (
        {"anyOf": [TO_A, TO_B, {"type": "null"}], **DEFINED},
        [{"a": 1}, {"b": 1}, None],
        [{"a": 1, "b": 1}, {"a": 1, "z": 1}],
    ),
    "of one or another, and more": (
        {"properties": {"k": INTEGER}, "required": ["k"], "anyOf": [TO_A, TO_B], **DEFINED},
        [{"k": 1, "a": 1}, {"k": 1, "b": 1}],
        [{"k": 1}, {"k": 1, "a": 1, "z": 1}],
    ),
    "that needs one or another": (
        {"properties": {"x": INTEGER, "y": INTEGER}, "anyOf": [{"required": [e]} for e in "xy"]},
        [{"x": 1}, {"y": 1}, {"x": 1, "y": 1}],
        [{}, {"x": 1, "z": 1}],
    ),
    "that needs what it does not describe": (
        {"properties": {"a": INTEGER}, "required": ["b"]},
        [{"a": 1, "b": "any"}],
        [{"a": 1}, {"a": 1, "b": 1, "z": 1}],
    ),
    "with names by a pattern": (
        {"properties": {"a": INTEGER}, "patternProperties": {"^x": A}},
        [{"x1": {"a": 1}}],
        [{"z": 1}, {"x1": {"a": 1, "z": 1}}],
    ),
    "with names that are keywords": (
        {"properties": {"properties": A, "$ref": INTEGER, "anyOf": B}},
        [{"properties": {"a": 1}, "$ref": 1}],
        [{"properties": {"a": 1, "z": 1}}, {"anyOf": {"b": 1, "z": 1}}],
    ),
    "with no properties": ({"type": "object", "properties": {}}, [{}], [{"z": 1}]),
    # Those that say themselves what further properties they may have, and those that name none.
    "that is open": ({"properties": {"o": {**A, **OPEN}}}, [{"o": {"a": 1, "z": 1}}], [{"z": 1}]),
    "that is open in a part": ({"allOf": [{**A, **OPEN}, B]}, [{"a": 1, "b": 1, "z": 1}], []),
    "that is a map": (
        {"type": "object", "properties": {}, "additionalProperties": A},
        [{"any": {"a": 1}}],
        [{"any": {"a": 1, "z": 1}}],
    ),
    "that names nothing": ({"type": "object", "required": ["b"]}, [{"b": 1, "z": 1}], [{}]),
    "that is data": ({"const": {"properties": {"a": 1}}}, [{"properties": {"a": 1}}], [{}]),
}


@pytest.mark.parametrize("which", OBJECTS)
def test_an_object_has_the_properties_that_its_schema_names(which: str) -> None:
    schema, right, wrong = OBJECTS[which]
    assert [value for value in right if not takes(schema, value)] == []
    assert [value for value in wrong if takes(schema, value)] == []


def test_a_schema_stays_as_it_was_given() -> None:
    before = json.dumps(OBJECTS["of several schemas"][0])
    closed(OBJECTS["of several schemas"][0])
    assert json.dumps(OBJECTS["of several schemas"][0]) == before


def test_schemas_that_refer_to_each_other_many_times_take_a_moment() -> None:
    """Each definition is looked at once: by paths there would be two to the power of sixty."""
    chain = {
        f"D{n}": {"anyOf": 2 * [{"$ref": f"#/$defs/D{n + 1}"}], "properties": {f"p{n}": INTEGER}}
        for n in range(60)
    }
    whole = {"allOf": [{"$ref": "#/$defs/D0"}], "properties": {"x": INTEGER}}
    made = closed({**whole, "$defs": {**chain, "D60": A}})
    assert made["additionalProperties"] is False
    assert set(made["properties"]) == {"x", "a", *(f"p{n}" for n in range(60))}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "idn-email"},
        {"type": "object", "propertyNames": {"type": "string", "pattern": "^x"}},
        {"type": "array", "uniqueItems": True},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"properties": {"format": {"not": {}}}},
    ],
)
def test_what_would_not_be_kept_to_is_refused(schema: Any) -> None:
    grammar = grammar_of([f"body: {json_term(closed(schema), LITTLE_SPACE)}"])
    assert llguidance.LLMatcher(TOKENS, grammar).is_error()


def test_a_property_of_a_keywords_name_stays() -> None:
    named: Any = {"properties": {"format": INTEGER, "uniqueItems": INTEGER}}
    assert closed(named)["properties"] == named["properties"]
    values: Any = {"enum": [{"format": "path"}], "default": {"uniqueItems": False}}
    assert closed(values) == values
