"""Types of a tool's arguments, by its JSON schema. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def plainly_typed(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools of whose arguments mlx-lm's parsers can tell the type: most look for a ``type``
    and follow no references, so that an ``integer`` that may be ``null`` would come out as text."""
    typed = []
    for tool in tools:
        function = tool["function"]
        schema = function.get("parameters") or {}
        known = schema.get("properties")
        properties = known.items() if isinstance(known, dict) else ()
        parameters = {**schema, "properties": {name: _plain(e, schema) for name, e in properties}}
        typed.append({**tool, "function": {**function, "parameters": parameters}})
    return typed


def _plain(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return a schema within ``root`` without its reference, and without a choice if beside null
    it has a single one; null, where a text is expected, would be a text."""
    own = _referred(schema, root)
    choices = own.get("anyOf") if isinstance(own, dict) else None
    if not isinstance(choices, list):
        return own
    others = [_referred(each, root) for each in choices if each != {"type": "null"}]
    is_one = len(others) == 1 and isinstance(others[0], dict) and others[0].get("type") != "string"
    return others[0] if is_one else own


def _referred(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return what a schema refers to, if it does: definitions stand at the top of ``root``."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(reference, str):
        return schema
    *_, place, name = ("", "", *reference.split("/"))
    definitions = root.get(place)
    return definitions.get(name, {}) if isinstance(definitions, dict) else {}
