"""Types of a tool's arguments, by its JSON schema. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]

DEEPEST = 16
"""Levels of references and choices that are followed."""

_JSON_TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def properties_of(schema: Schema) -> Mapping[str, Any]:
    """Return the schemas of an object's properties, by name."""
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def types_of(schema: Any, root: Schema, depth: int = DEEPEST) -> frozenset[str]:
    """Return the JSON types of values of a schema within ``root``; none if it does not say."""
    if not isinstance(schema, dict) or not depth:
        return frozenset()
    if "$ref" in schema:
        return types_of(referred(schema, root), root, depth - 1)
    if "type" in schema:
        said = schema["type"]
        return frozenset(map(str, said if isinstance(said, list) else [said]))
    if "const" in schema:
        return frozenset({_JSON_TYPES[type(schema["const"])]})
    if isinstance(schema.get("enum"), list):
        return frozenset(_JSON_TYPES[type(each)] for each in schema["enum"])
    for choice in ("anyOf", "oneOf"):
        if isinstance(schema.get(choice), list):
            every = [types_of(each, root, depth - 1) for each in schema[choice]]
            return frozenset().union(*every) if all(every) else frozenset()
    return frozenset()


def referred(schema: Schema, root: Schema) -> dict[str, Any]:
    """Return what a schema says with what the ``$ref`` of it refers to within ``root``."""
    at: Any = root
    for step in filter(None, str(schema["$ref"]).removeprefix("#").split("/")):
        at = at.get(step) if isinstance(at, dict) else None
    here = {name: each for name, each in schema.items() if name != "$ref"}
    return {**at, **here} if isinstance(at, dict) else here


def plainly_typed(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools of whose arguments mlx-lm's parsers can tell the type: most look for a ``type``
    and follow no references, so that an ``integer`` that may be ``null`` would come out as text."""
    typed = []
    for tool in tools:
        function = tool["function"]
        schema = function.get("parameters") or {}
        known = properties_of(schema).items()
        properties = {name: _plain(types_of(each, schema)) or each for name, each in known}
        parameters = {**schema, "properties": properties}
        typed.append({**tool, "function": {**function, "parameters": parameters}})
    return typed


def _plain(types: frozenset[str]) -> dict[str, Any] | None:
    if types == {"integer", "number"}:
        types = frozenset({"number"})
    values = types - {"null"}
    if len(types) == 1 or (len(values) == 1 and values != {"string"}):
        (only,) = values or types
        return {"type": only}
    return {"anyOf": [{"type": each} for each in sorted(types)]} if types else None
