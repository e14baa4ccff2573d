"""Tools of OpenAI's Responses API that the client runs, as functions of a chat. No MLX, no MPI."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardmlx.server.accepted_fields import CALLERS, Json, refuse_other_keys
from shardmlx.server.openai_errors import refused, shown

FIELDS: Mapping[str, str] = {
    "function": "arguments",
    "custom": "input",
    "tool_search": "arguments",
}
"""The kinds of tools, and the field of a calling item that becomes the function's arguments."""

ONE_TEXT: Json = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""The parameters of the function that stands for a tool of kind "custom"."""


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool that the client runs, of one of the kinds of ``FIELDS``."""

    kind: str
    name: str
    namespace: str | None = None

    @property
    def in_chat(self) -> str:
        """The name of its function in a chat."""
        if self.namespace is None:
            return self.name
        return f"{self.namespace.removesuffix('__')}__{self.name}"

    def called(self, arguments: str) -> Json:
        """Return the fields of an item that calls it with these arguments, which are JSON."""
        named = {"name": self.name} | ({"namespace": self.namespace} if self.namespace else {})
        if self.kind == "function":
            return {**named, "arguments": arguments}
        given = json.loads(arguments)
        if self.kind == "custom":
            text = given.get("input")
            return {**named, "input": text if isinstance(text, str) else arguments}
        return {"arguments": given, "execution": "client"}


def named_tool(kind: str, given: Mapping[str, Any]) -> ClientTool:
    """Return the tool of this kind that an item or a choice names."""
    namespace = given.get("namespace")
    return ClientTool(kind, str(given.get("name") or kind), str(namespace) if namespace else None)


DESCRIBED: Mapping[str, str] = {
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
    "computer_call": "action",
}
"""Calling items of tools that OpenAI describes to its own models and the client runs, each with the
field that says what to do. A history may have them."""


def call_of(item: Mapping[str, Any]) -> tuple[ClientTool, Any]:
    """Return the tool that an item of a history calls, and the arguments of its function."""
    written = str(item["type"])
    kind = written.removesuffix("_call").removesuffix("_tool")
    if written in DESCRIBED:
        given = item.get(DESCRIBED[written])
        return ClientTool("function", kind), given if isinstance(given, dict) else {}
    tool = named_tool(kind, item)
    given = item.get(FIELDS[kind])
    return tool, {"input": given} if kind == "custom" else given


PASSED = frozenset({"strict", "defer_loading", "output_schema"})
"""Fields of a tool that change no answer."""

KNOWN = ("type", "name", "description", "parameters", "format", "execution", "tools")


def functions_of(tool: Mapping[str, Any], where: str) -> Iterator[tuple[ClientTool, Json]]:
    """Yield tool and function of all that stand for a tool. Raises ``ApiError``."""
    kind = tool.get("type")
    if kind == "namespace":
        refuse_other_keys(tool, KNOWN, where, PASSED, CALLERS)
        for place, inner in listed(tool.get("tools"), f"{where}.tools"):
            for named, function in functions_of(inner, place):
                own = ClientTool(named.kind, named.name, str(tool.get("name")))
                yield own, {**function, "name": own.in_chat}
        return
    runs_there = kind == "tool_search" and tool.get("execution") != "client"
    if str(kind) not in FIELDS or runs_there:
        raise refused(
            f"{where}: a tool of type {shown(kind)} is not understood here: give it as a function",
            f"{where}.type",
        )
    refuse_other_keys(tool, KNOWN, where, PASSED, CALLERS)
    if kind != "tool_search" and not tool.get("name"):
        raise refused(f"{where}.name is missing", f"{where}.name")
    named = ClientTool(str(kind), str(tool.get("name") or kind))
    given = {name: tool[name] for name in ("description", "parameters") if tool.get(name)}
    custom = {"parameters": ONE_TEXT} if kind == "custom" else {}
    function = {"name": named.name, **custom, **given}
    form = tool.get("format")
    if isinstance(form, dict):
        refuse_other_keys(form, ("type", "syntax", "definition"), f"{where}.format")
    if isinstance(form, dict) and form.get("definition"):
        syntax = f"The input keeps to this grammar ({form.get('syntax')}):\n{form['definition']}"
        description = str(given.get("description", ""))
        function["description"] = "\n\n".join(filter(None, [description, syntax]))
    yield named, function


def listed(objects: Any, where: str) -> Iterator[tuple[str, Json]]:
    """Yield the objects of a list, each with its place. Raises ``ApiError`` for what is none."""
    if not isinstance(objects, list):
        raise refused(f"{where}: give a list", where)
    for at, each in enumerate(objects):
        if not isinstance(each, dict):
            raise refused(f"{where}.{at}: give an object", f"{where}.{at}")
        yield f"{where}.{at}", each
