"""Tools of OpenAI's Responses API that the client runs, as functions of a chat. No MLX, no MPI."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field, TypeAdapter

from shardmlx.inference.answer_format import Tool
from shardmlx.server.accepted_fields import CALLERS, Body, Json, JsonObject, Listed
from shardmlx.server.openai_errors import refused, shown
from shardmlx.server.openai_messages import tool_of
from shardmlx.server.request_bodies import validated

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


def call_in(item: Mapping[str, Any]) -> tuple[ClientTool, Any]:
    """Return the tool that an item of a history calls, and the arguments of its function."""
    written = str(item["type"])
    kind = written.removesuffix("_call").removesuffix("_tool")
    if written in DESCRIBED:
        given = item.get(DESCRIBED[written])
        return ClientTool("function", kind), given if isinstance(given, dict) else {}
    tool = named_tool(kind, item)
    given = item.get(FIELDS[kind])
    return tool, {"input": given} if kind == "custom" else given


class ToolFormat(Body):
    """The form of what a tool of kind "custom" is given: a text, or what a grammar allows."""

    type: str | None = None
    syntax: str | None = None
    definition: str = ""


class OfferedTool(Body):
    """A tool in a request, or a namespace of several."""

    type: str = ""
    name: str = Field("", pattern=r"^[\w.:-]{0,128}$")
    description: str = ""
    parameters: JsonObject = Field(default_factory=dict)
    format: ToolFormat | None = None
    execution: str | None = None
    tools: Listed[OfferedTool] | None = None

    passes = frozenset({"strict", "defer_loading", "output_schema"})
    neutral: ClassVar = CALLERS

    def refuse_unknown(self, where: str = "") -> None:
        """Raise ``ApiError`` for a field that is not known, and for a tool of another kind."""
        runs_there = self.type == "tool_search" and self.execution != "client"
        if self.type not in (*FIELDS, "namespace") or runs_there:
            raise refused(
                f"{where}: a tool of type {shown(self.type)} is not understood here: give it as a "
                "function",
                f"{where}.type",
            )
        if not self.name and self.type != "tool_search":
            raise refused(f"{where}.name is missing", f"{where}.name")
        super().refuse_unknown(where)

    def functions(self, namespace: str | None = None) -> Iterator[tuple[ClientTool, Tool]]:
        """Yield all that the tool is, each with the function that stands for it in a chat."""
        if self.type == "namespace":
            for inner in self.tools or ():
                yield from inner.functions(namespace or self.name)
            return
        tool = ClientTool(self.type, self.name or self.type, namespace)
        takes = self.parameters or (ONE_TEXT if self.type == "custom" else {})
        yield tool, tool_of(tool.in_chat, self._described, takes)

    @property
    def _described(self) -> str:
        form = self.format
        if form is None or not form.definition:
            return self.description
        syntax = f"The input keeps to this grammar ({form.syntax}):\n{form.definition}"
        return "\n\n".join(filter(None, [self.description, syntax]))


TOOLS = TypeAdapter(Listed[OfferedTool])


def tools_in(item: Mapping[str, Any], where: str) -> list[OfferedTool]:
    """Return the tools of an item of a history, which is ``where``. Raises ``ApiError``."""
    tools = validated(TOOLS, item.get("tools") or [], f"{where}.tools")
    for at, tool in enumerate(tools):
        tool.refuse_unknown(f"{where}.tools.{at}")
    return tools
