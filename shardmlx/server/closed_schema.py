"""JSON schemas whose objects have only the properties that they name. No MLX, no MPI.

JSON Schema lets an object have any further property. A small model would go on with others up to
its limit, so llama.cpp and vLLM close each object that names properties, unless it has
``additionalProperties`` of its own: so here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from shardmlx.server.accepted_fields import words

Schema = Mapping[str, Any]

ALTERNATIVES = ("anyOf", "oneOf")
"""Keywords whose schemas are for the same object, which follows one of them."""

SAME_OBJECT = ("allOf", *ALTERNATIVES)
"""Keywords whose schemas are for the same object."""

NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords that have schemas by names, each for another value."""

LISTED = ("prefixItems", "items")
"""Keywords that may have a list of schemas, each for another value."""

SINGLE = ("items", "additionalItems", "additionalProperties", "contains", "unevaluatedItems")
"""Keywords that have a schema for another value."""

UNEVALUATED = "unevaluatedProperties"

OWN_RULE = frozenset({"additionalProperties", UNEVALUATED})
"""Keywords by which a schema says itself what further properties there may be."""

SAY_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "propertyNames": ({}, True, {"type": "string"}),
    "uniqueItems": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "minContains": (0,),
    UNEVALUATED: ({}, True),
    "unevaluatedItems": ({}, True),
}
"""Values that change nothing, of keywords that llguidance refuses. Zod writes the first."""

CHECKED_FORMATS = words("""
    date-time date time duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference
    iri iri-reference uuid uri-template json-pointer relative-json-pointer regex
""")
"""The formats of JSON Schema. Others (pydantic's "path", OpenAPI's "binary") are notes, it says."""

PATTERNS = "patternProperties"
"""The keyword that names properties by patterns, which other schemas of the object do not see."""

DEFINITIONS = ("$defs", "definitions")

BESIDE_ONE = frozenset({"properties", PATTERNS, "$ref", *ALTERNATIVES, *OWN_RULE})
"""Keywords that say something of the same object beside a single schema of ``allOf``."""

TWIN = "shardmlx-open-"
"""The beginning of the name of a definition's copy that lets further properties pass."""


def closed(schema: Schema) -> dict[str, Any]:
    """Return a schema whose objects, at any depth, have only the properties that it names, but
    where it says itself what others they may have.

    Schemas of one object (``allOf``, ``anyOf`` and ``oneOf``, beside ``properties`` and ``$ref``)
    count together: a property that one of them names is open to the others.
    """
    return _Closing(schema).whole()


@dataclass(frozen=True, slots=True)
class _Names:
    """The properties that schemas of one object describe, and those that they require."""

    described: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()

    @classmethod
    def of(cls, schema: Schema) -> _Names:
        """Return those that a schema itself has."""
        required = filter(_is_text, _list(schema.get("required")))
        return cls(frozenset(_object(schema.get("properties"))), frozenset(required))

    def __or__(self, other: _Names) -> _Names:
        return _Names(self.described | other.described, self.required | other.required)


NONE = _Names()


@dataclass
class _Closing:
    """The work on one schema. Where a definition describes only a part of an object, the schema
    gets an open copy of it, a twin: ``twins`` has their names, ``made`` the twins by name."""

    root: Schema
    twins: dict[str, str] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)

    def whole(self) -> dict[str, Any]:
        """Return the whole schema, closed, with the twins that it refers to."""
        result: dict[str, Any] = self.closed(self.root)
        if self.made:
            result["$defs"] = {**_object(result.get("$defs")), **self.made}
        return result

    def closed(self, schema: Any, others: _Names = NONE) -> Any:
        """Return a schema for an object that may have its own properties and ``others``."""
        if not isinstance(schema, dict):
            return schema
        if schema.get(UNEVALUATED) is False:  # in other words what is done here
            schema = {"properties": {}, **schema}
            del schema[UNEVALUATED]
        only_refers = others == NONE and not schema.keys() & {"properties", *SAME_OBJECT}
        if "$ref" in schema and only_refers:
            return self._inside(schema)  # the definition is closed where it stands
        if len(_list(schema.get("allOf"))) == 1 and not schema.keys() & BESIDE_ONE:
            # Older pydantic's way to describe a reference.
            (only,) = schema["allOf"]
            return {**self._inside(schema), "allOf": [self.closed(only, others)]}
        result = self._part(schema)
        has_rule = bool(schema.keys() & OWN_RULE)
        alternatives = [key for key in ALTERNATIVES if isinstance(schema.get(key), list)]
        for key in alternatives:
            rest = {name: value for name, value in schema.items() if name != key}
            beside = None if has_rule or PATTERNS in schema else self.names(rest, set())
            result[key] = [
                self.opened(each) if beside is None else self.closed(each, others | beside)
                for each in schema[key]
            ]
        if has_rule or alternatives:
            return result
        own = self.names(schema, set())
        if own is None:
            return result
        names = own | others
        if not names.described and "properties" not in schema:
            return result
        properties = _object(result.get("properties"))
        further = dict.fromkeys(
            sorted((names.described | names.required) - properties.keys()), True
        )
        if properties or further:
            result["properties"] = {**properties, **further}
        return {**result, "additionalProperties": False}

    def opened(self, schema: Any) -> Any:
        """Return a schema for a part of an object: its other values are closed."""
        if not isinstance(schema, dict):
            return schema
        result = self._part(schema)
        for key in ALTERNATIVES:
            if isinstance(schema.get(key), list):
                result[key] = [self.opened(each) for each in schema[key]]
        return result

    def names(self, schema: Any, seen: set[str]) -> _Names | None:
        """Return the properties that a schema of an object names, with those of other schemas of
        the same object; None if another schema says itself what further ones there may be.
        Definitions that were ``seen`` are passed over."""
        if not isinstance(schema, dict):
            return NONE
        parts = [each for key in SAME_OBJECT for each in _list(schema.get(key))]
        found = _Names.of(schema)
        reference = str(schema.get("$ref"))
        if "$ref" in schema and reference not in seen:
            seen.add(reference)
            target = definition_in(self.root, reference)
            if target is None:
                return None
            parts.append(target)
        for part in parts:
            has_rule = isinstance(part, dict) and part.keys() & {*OWN_RULE, PATTERNS}
            names = None if has_rule else self.names(part, seen)
            if names is None:
                return None
            found |= names
        return found

    def _part(self, schema: Schema) -> dict[str, Any]:
        """Return a schema in which those of other values are closed, and those that hold for the
        same object in any case are open."""
        result = self._inside(schema)
        if isinstance(schema.get("allOf"), list):
            result["allOf"] = [self.opened(each) for each in schema["allOf"]]
        if isinstance(schema.get("$ref"), str):
            result["$ref"] = self._twin(schema["$ref"])
        return result

    def _inside(self, schema: Schema) -> dict[str, Any]:
        """Return a schema in which those of other values are closed, without what says nothing."""
        result = {key: value for key, value in schema.items() if not _says_nothing(key, value)}
        for key in NAMED:
            if isinstance(schema.get(key), dict):
                result[key] = {name: self.closed(each) for name, each in schema[key].items()}
        for key in SINGLE:
            if isinstance(schema.get(key), dict):
                result[key] = self.closed(schema[key])
        for key in LISTED:
            if isinstance(schema.get(key), list):
                result[key] = [self.closed(each) for each in schema[key]]
        return result

    def _twin(self, reference: str) -> str:
        """Return a reference to the same definition, but open. One that means none stays."""
        target = definition_in(self.root, reference)
        if target is None:
            return reference
        if reference not in self.twins:
            name = f"{TWIN}{len(self.twins)}"
            while name in _object(self.root.get("$defs")):
                name += "-"
            self.twins[reference] = name  # before the copy is made, which may refer to itself
            own = {key: value for key, value in target.items() if key not in DEFINITIONS}
            self.made[name] = self.opened(own)
        return f"#/$defs/{self.twins[reference]}"


def definition_in(root: Schema, reference: str) -> dict[str, Any] | None:
    """Return the definition that a reference within the schema ``root`` means; None if there is
    none."""
    if not reference.startswith("#"):
        return None
    target: Any = root
    for step in filter(None, unquote(reference[1:]).split("/")):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        elif isinstance(target, dict) and name in target:
            target = target[name]
        else:
            return None
    return target if isinstance(target, dict) else None


def _says_nothing(key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in CHECKED_FORMATS
    return any(value is each or value == each for each in SAY_NOTHING.get(key, ()))


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
