"""Messages and tools of a chat in OpenAI's API, as a chat template wants them. No MLX, no MPI.

Clients send back what servers have told them, and notes of their own: fields that no template reads
are let pass.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from shardmlx.inference.answer_format import Tool
from shardmlx.server.openai_errors import refused, shown

TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts, and the field in which each has its text; two are of OpenAI's newer API."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names for what a model thought before it answered: DeepSeek's, OpenRouter's, Ollama's."""

MEANINGFUL: Mapping[str, tuple[Any, ...]] = {
    "function_call": ({},),
    "audio": ({},),
    "images": ([],),
    "prefix": (False,),
    "partial": (False,),
}
"""Fields that ask for what is not supported, with the values that ask for nothing."""


class _Lenient(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class FunctionBody(_Lenient):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[\w.:-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolBody(_Lenient):
    """A tool that the model may use: a function."""

    type: Literal["function"]
    function: FunctionBody

    @property
    def for_template(self) -> Tool:
        """The tool for a chat template."""
        given = self.function
        function: dict[str, Any] = {"name": given.name, "description": given.description or ""}
        function["parameters"] = given.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class CalledBody(_Lenient):
    """The function of a call, with its arguments as JSON."""

    name: str
    arguments: str = "{}"


class CallBody(_Lenient):
    """A call of a tool, in an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledBody

    @property
    def for_template(self) -> dict[str, Any]:
        """The call for a chat template, which wants the arguments as an object."""
        arguments: Any = self.function.arguments
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class MessageBody(_Lenient):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    tool_calls: list[CallBody] | None = None
    tool_call_id: str | None = None

    @property
    def is_of_tools(self) -> bool:
        """True if only models that know tools understand it."""
        return self.role == "tool" or bool(self.tool_calls)

    @field_validator("content", mode="plain")
    @classmethod
    def _content(cls, value: object) -> str | None:
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError("give a text, or a list of parts of type text")
        return "".join(map(_part, value))

    def for_template(self, where: str) -> dict[str, Any]:
        """Return the message for a chat template. Raises ``ApiError``, in which the message is
        called ``where``.

        Templates know no role "developer", OpenAI's newer name of "system".
        """
        extra = self.model_extra or {}
        for name, neutral in MEANINGFUL.items():
            value = extra.get(name)
            if value is not None and value not in neutral:
                raise refused(
                    f"{where}.{name} is not supported by this server: leave it out",
                    f"{where}.{name}",
                    "unsupported_parameter",
                )
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self._said(extra, where),
        }
        if self.name is not None:
            message["name"] = self.name
        if self.role == "assistant" and (thought := _thought(extra)):
            message["reasoning_content"] = thought
        if self.tool_calls:
            message["tool_calls"] = [call.for_template for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    def _said(self, extra: Mapping[str, Any], where: str) -> str:
        if self.content is not None:
            return self.content
        if self.role != "assistant":
            what = "is null" if "content" in self.model_fields_set else "is missing"
            raise refused(f"{where}.content {what}: give a text", f"{where}.content")
        refusal = extra.get("refusal")  # what OpenAI's models say in its place
        return refusal if isinstance(refusal, str) else ""


def _part(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in TEXTS:
        raise ValueError(f"a part is of type {shown(kind)}: only text is understood here")
    text = part.get(TEXTS[kind])
    if not isinstance(text, str):
        raise ValueError(f"a part of type {kind} has no text")
    return text


def _thought(extra: Mapping[str, Any]) -> str:
    return next((extra[name] for name in THOUGHTS if isinstance(extra.get(name), str)), "")
