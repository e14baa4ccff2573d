"""Messages and tools of a chat in OpenAI's API, as a chat template wants them. No MLX, no MPI.

Fields that no template reads are let pass: clients send back what servers have told them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from shardmlx.inference.answer_format import Tool
from shardmlx.server.accepted_fields import Body, Listed, refuse_unknown
from shardmlx.server.openai_errors import refused, shown

TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts, and the field in which each has its text; two are of OpenAI's newer API."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names for what a model thought before it answered: DeepSeek's, OpenRouter's, Ollama's."""

MEANINGFUL = ("function_call", "audio", "images", "prefix", "partial")
"""Fields that ask for what is not supported, unless they are empty."""

NO_PARAMETERS = {"type": "object", "properties": {}}


class FunctionBody(Body, extra="ignore"):
    name: str = Field(pattern=r"^[\w.:-]{1,128}$")
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)


class ToolBody(Body, extra="ignore"):
    """A tool that the model may use: a function."""

    type: Literal["function"]
    function: FunctionBody

    @property
    def for_template(self) -> Tool:
        tool = self.model_dump()
        tool["function"]["parameters"] = self.function.parameters or NO_PARAMETERS
        return tool


def _arguments(value: object) -> dict[str, Any]:
    # To refuse a call that was cut off would end the conversation: clients send it each time.
    if isinstance(value, str):
        try:
            read = json.loads(value.strip() or "{}")
        except (ValueError, RecursionError):
            read = value
        value = {} if read is None else read if isinstance(read, dict) else {"arguments": value}
    if not isinstance(value, dict):
        raise ValueError("give an object, or its JSON")
    return value


class CalledBody(Body, extra="ignore"):
    """The function of a call, with its arguments: an object, or the JSON of one."""

    name: str
    arguments: Annotated[dict[str, Any], PlainValidator(_arguments)] = Field(default_factory=dict)


class CallBody(Body, extra="ignore"):
    """A call of a tool, in an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledBody


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("give a text, or a list of parts of type text")
    return "".join(map(_part, value))


def _part(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str) or kind not in TEXTS:
        raise ValueError(f"a part is of type {shown(kind)}: only text is understood here")
    text = part.get(TEXTS[kind])
    if not isinstance(text, str):
        raise ValueError(f"a part of type {kind} has no text")
    return text


Content = Annotated[str, PlainValidator(_text)]


class MessageBody(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Listed[CallBody] | None = None
    tool_call_id: str | None = None

    def for_template(self, where: str) -> dict[str, Any]:
        """Return the message for a chat template. Raises ``ApiError``, which calls it ``where``."""
        extra = self.model_extra or {}
        refuse_unknown({name: extra[name] for name in MEANINGFUL if name in extra}, f"{where}.")
        thoughts = [extra[name] for name in THOUGHTS if isinstance(extra.get(name), str)]
        more = {
            "name": self.name,
            "reasoning_content": thoughts[0] if thoughts and self.role == "assistant" else None,
            "tool_calls": [call.model_dump() for call in self.tool_calls or ()],
            "tool_call_id": self.tool_call_id,
        }
        return {
            # Templates know no role "developer", OpenAI's newer name of "system".
            "role": "system" if self.role == "developer" else self.role,
            "content": self._said(extra, where),
            **{name: value for name, value in more.items() if value},
        }

    def _said(self, extra: Mapping[str, Any], where: str) -> str:
        if self.content is not None:
            return self.content
        if self.role not in ("assistant", "tool"):
            raise refused(f"{where}.content is missing: give a text", f"{where}.content")
        refusal = extra.get("refusal")  # OpenAI's models say it instead
        return refusal if isinstance(refusal, str) else ""
