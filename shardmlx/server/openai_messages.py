"""Messages of a chat in OpenAI's API, and how a chat template wants them. No MLX, no MPI.

Clients send back what servers have told them, and notes of their own: fields that no template reads
are let pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator

from shardmlx.server.openai_errors import refused, shown

TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts, and the field in which each has its text; two are of OpenAI's newer API."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names for what a model thought before it answered: DeepSeek's, OpenRouter's, Ollama's."""

MEANINGFUL: Mapping[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "function_call": ({},),
    "tool_call_id": ("",),
    "audio": ({},),
    "images": ([],),
    "prefix": (False,),
    "partial": (False,),
}
"""Fields that ask for what is not supported, with the values that ask for nothing."""


class MessageBody(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | None = None
    name: str | None = None

    @field_validator("content", mode="plain")
    @classmethod
    def _content(cls, value: object) -> str | None:
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError("give a text, or a list of parts of type text")
        return "".join(map(_part, value))

    def for_template(self, where: str) -> dict[str, str]:
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
        message = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self._said(extra, where),
        }
        if self.name is not None:
            message["name"] = self.name
        if self.role == "assistant" and (thought := _thought(extra)):
            message["reasoning_content"] = thought
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
