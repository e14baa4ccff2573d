"""Tools of OpenAI's Responses API that the client runs, as functions of a chat. No MLX, no MPI."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardmlx.server.accepted_fields import Json
from shardmlx.server.openai_errors import refused, shown

_TEXT = {"type": "string"}
_NUMBER = {"type": "integer"}
_TEXTS = {"type": "array", "items": _TEXT}


def _takes(required: str, **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": required.split()}


FIELDS: Mapping[str, str] = {
    "function": "arguments",
    "custom": "input",
    "local_shell": "action",
    "shell": "action",
    "apply_patch": "operation",
    "tool_search": "arguments",
}
"""The kinds of tools, and the field of a calling item that becomes the function's arguments."""

FUNCTIONS: Mapping[str, Json] = {
    "custom": {"parameters": _takes("input", input=_TEXT)},
    "local_shell": {
        "description": "Runs a command on the user's machine",
        "parameters": _takes(
            "command", command=_TEXTS, working_directory=_TEXT, timeout_ms=_NUMBER
        ),
    },
    "shell": {
        "description": "Runs commands of a shell on the user's machine",
        "parameters": _takes(
            "commands", commands=_TEXTS, timeout_ms=_NUMBER, max_output_length=_NUMBER
        ),
    },
    "apply_patch": {
        "description": "Creates, changes or deletes a file; diff is in the V4A format",
        "parameters": _takes(
            "type path",
            type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            path=_TEXT,
            diff=_TEXT,
        ),
    },
    "tool_search": {},
}
"""The function of a chat that stands for a tool of each kind, beside what the tool itself says."""


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

    def called(self, arguments: str) -> Json | None:
        """Return the fields of an item that calls it; None if cut off, and no function."""
        try:
            given = json.loads(arguments)
        except ValueError:
            given = None
        named = {"name": self.name} | ({"namespace": self.namespace} if self.namespace else {})
        if self.kind == "function":
            status = "completed" if isinstance(given, dict) else "incomplete"
            return {**named, "arguments": arguments, "status": status}
        if not isinstance(given, dict):
            return None
        match self.kind:
            case "custom":
                text = given.get("input")
                return {**named, "input": text if isinstance(text, str) else arguments}
            case "local_shell":
                return {"action": {"type": "exec", "env": {}, **given}}
            case "tool_search":
                return {"arguments": given, "execution": "client"}
        return {FIELDS[self.kind]: given}


def named_tool(kind: str, given: Mapping[str, Any]) -> ClientTool:
    """Return the tool of this kind that an item or a choice names."""
    namespace = given.get("namespace")
    return ClientTool(kind, str(given.get("name") or kind), str(namespace) if namespace else None)


def call_of(item: Mapping[str, Any]) -> tuple[ClientTool, Any]:
    """Return the tool that an item of a history calls, and the arguments of its function."""
    kind = str(item["type"]).removesuffix("_call").removesuffix("_tool")
    tool = named_tool(kind, item)
    given = item.get(FIELDS[kind])
    if kind == "custom":
        return tool, {"input": given}
    if kind in ("local_shell", "shell") and isinstance(given, dict):
        drop = {"type": "exec", "env": {}}
        given = {
            name: each
            for name, each in given.items()
            if each is not None and drop.get(name, ...) != each
        }
    return tool, given


def functions_of(tool: Mapping[str, Any], where: str) -> Iterator[tuple[str, ClientTool, Json]]:
    """Yield place, tool and function of all that stand for a tool. Raises ``ApiError``."""
    kind = tool.get("type")
    if kind == "namespace":
        for place, inner in listed(tool.get("tools"), f"{where}.tools"):
            for at, named, function in functions_of(inner, place):
                own = ClientTool(named.kind, named.name, str(tool.get("name")))
                yield at, own, {**function, "name": own.in_chat}
        return
    if str(kind) not in FIELDS or _runs_there(tool):
        raise refused(
            f"{where}: no client runs this tool of type {shown(kind)}: leave it out",
            f"{where}.type",
        )
    named = ClientTool(str(kind), str(tool.get("name") or kind))
    given = {name: tool[name] for name in ("description", "parameters") if tool.get(name)}
    function = {"name": named.name, **FUNCTIONS.get(named.kind, {}), **given}
    form = tool.get("format")
    if isinstance(form, dict) and form.get("definition"):
        syntax = f"The input keeps to this grammar ({form.get('syntax')}):\n{form['definition']}"
        description = str(given.get("description", ""))
        function["description"] = "\n\n".join(filter(None, [description, syntax]))
    yield where, named, function


def _runs_there(tool: Mapping[str, Any]) -> bool:
    """Return whether a tool of a kind that either side can run is to run on the server."""
    if tool.get("type") == "tool_search":
        return tool.get("execution") != "client"
    environment = tool.get("environment")
    kind = environment.get("type", "local") if isinstance(environment, dict) else "local"
    return tool.get("type") == "shell" and bool(kind != "local")


def listed(objects: Any, where: str) -> Iterator[tuple[str, Json]]:
    """Yield the objects of a list, each with its place. Raises ``ApiError`` for what is none."""
    if not isinstance(objects, list):
        raise refused(f"{where}: give a list", where)
    for at, each in enumerate(objects):
        if not isinstance(each, dict):
            raise refused(f"{where}.{at}: give an object", f"{where}.{at}")
        yield f"{where}.{at}", each
