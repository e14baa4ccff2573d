"""Messages and tools of a chat in OpenAI's API, as a chat template wants them. No MLX, no MPI.

An earlier answer may have any further fields: clients send back what servers have told them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from shardmlx.inference.answer_format import Tool
from shardmlx.server.accepted_fields import (
    Body,
    Json,
    JsonObject,
    Listed,
    refuse_other_keys,
    refuse_unknown,
    words,
)
from shardmlx.server.json_texts import with_whole_characters
from shardmlx.server.openai_errors import refused, shown
from shardmlx.server.other_blocks import as_text, joined

TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts, and the field in which each has its text; two are of OpenAI's newer API."""

PASSED_IN_TEXTS = words(
    "id cache_control prompt_cache_breakpoint citations annotations logprobs _meta"
)
"""Fields of a text that change no answer."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names for what a model thought before it answered: DeepSeek's, OpenRouter's, Ollama's."""

MEANINGFUL = ("function_call", "prefix", "partial")
"""Fields of an answer that ask for what is not supported, unless they are empty."""

PASSED_IN_MESSAGES = words("""
    id opts type status model index weight timestamp created created_at createdAt updated_at
    refusal annotations cache_control metadata provider_options providerOptions
""") | {*THOUGHTS}
"""Fields that clients write into the messages of their users, and that change no answer."""

DEEPEST = 100
"""Values within each other in a call's arguments. A small model writes ``[[[[...`` at times."""

ToolName = Annotated[str, Field(pattern=r"^[\w.:-]{1,128}$")]

NO_PARAMETERS = {"type": "object", "properties": {}}


class FunctionBody(Body):
    """The function that a tool is."""

    name: ToolName
    description: str = ""
    parameters: JsonObject = Field(default_factory=dict)

    passes = frozenset({"strict"})


class ToolBody(Body):
    """A tool that the model may use: a function."""

    type: Literal["function"]
    function: FunctionBody

    passes = frozenset({"strict", "cache_control", "defer_loading"})

    @property
    def for_template(self) -> Tool:
        """The tool as a chat template takes it."""
        function = self.function
        return tool_of(function.name, function.description, function.parameters)


def tool_of(name: str, description: str, parameters: Json) -> Tool:
    """Return a function as a chat template takes it."""
    function = {
        "name": name,
        "description": description,
        "parameters": parameters or NO_PARAMETERS,
    }
    return {"type": "function", "function": function}


def _is_deep(value: object) -> bool:
    """Return whether a value has more than ``DEEPEST`` objects and lists within each other."""
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for each in level for inner in _within(each)]
        if not level:
            return False
    return True


def _within(value: object) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def arguments_of(value: object) -> Json:
    """Return the arguments of a call that are given as an object, or as the JSON of one. Raises
    ``ValueError``."""
    # To refuse a call that was cut off would end the conversation: clients send it each time.
    if isinstance(value, str):
        try:
            read = json.loads(with_whole_characters(value).strip() or "{}")
        except (ValueError, RecursionError):
            read = value
        if _is_deep(read):
            read = value  # no template could write it
        value = {} if read is None else read if isinstance(read, dict) else {"arguments": value}
    if not isinstance(value, dict):
        raise ValueError("give an object, or its JSON")
    return value


class CalledBody(Body, extra="ignore"):
    """The function of a call, with its arguments: an object, or the JSON of one."""

    name: str
    arguments: Annotated[dict[str, Any], PlainValidator(arguments_of)] = Field(default_factory=dict)


class CallBody(Body, extra="ignore"):
    """A call of a tool, in an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledBody


def text_or_parts(value: object) -> str | list[Json]:
    """Return the content of a message; a text among its parts is one of them, as LangChain joins
    them. Raises ``ValueError``."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(part, dict | str) for part in value):
        raise ValueError("give a text, or a list of parts of type text")
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in value]


def content_of(value: object, where: str) -> str | list[Json]:
    """Return content as ``text_or_parts``, which is ``where`` in the request. Raises
    ``ApiError``."""
    try:
        return text_or_parts(value)
    except ValueError as error:
        raise refused(f"{where}: {error}", where) from None


Content = Annotated[str | list[Json], PlainValidator(text_or_parts)]


@dataclass(frozen=True, slots=True)
class Said:
    """The text of a message, and the thought before it."""

    text: str
    thought: str = ""


def read_parts(content: str | list[Json], where: str, role: str) -> Said:
    """Return what the content of a message says, which is ``where`` in the request. Raises as
    ``read_part``."""
    if isinstance(content, str):
        return Said(content)
    pieces: list[tuple[str, bool]] = []
    thoughts: list[str] = []
    for at, part in enumerate(content):
        if role == "assistant" and part.get("type") == "thinking":  # Mistral's servers write it
            thoughts.append(_thought(part))
        else:
            pieces.append(read_part(part, f"{where}.{at}", role))
    return Said(joined(pieces), all_thoughts(thoughts))


def read_part(part: Json, where: str, role: str) -> tuple[str, bool]:
    """Return the text of a part, which is ``where`` in the request, and whether it is a line in the
    place of what is not text: in the result of a tool and in an earlier answer.

    Raises ``ApiError`` for such a part of another message, and for a field that a part must not
    have.
    """
    kind = part.get("type")
    field = TEXTS.get(kind) if isinstance(kind, str) else None
    if field is not None:
        if part.get(field) is None and role in ("assistant", "tool"):
            return "", False
        if not isinstance(part.get(field), str):
            raise refused(f"{where}: a part of type {kind} has no text", f"{where}.{field}")
        if role != "assistant":
            refuse_other_keys(part, ("type", field), where, PASSED_IN_TEXTS)
        return part[field], False
    if role in ("assistant", "tool"):
        return as_text(part), True
    raise refused(
        f"{where}: a part is of type {shown(kind)}: only text is understood here", f"{where}.type"
    )


def _thought(part: Json) -> str:
    given = part.get("thinking")
    inner = given if isinstance(given, list) else [{"text": given}]
    texts = (each.get("text") for each in inner if isinstance(each, dict))
    return "".join(text for text in texts if isinstance(text, str))


def all_thoughts(thoughts: Iterable[str | None]) -> str:
    """Return the thoughts of an answer as one: templates take no several. Servers tell the same one
    under several names."""
    return "\n\n".join(dict.fromkeys(filter(None, thoughts)))


def call_of(call_id: str, name: str, arguments: Json) -> Json:
    """Return a call of a tool as a chat template takes it."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


@dataclass(slots=True)
class History:
    """The messages of a chat as a template takes them, in the order in which they are added.

    The next one stands ``beside_result`` after the result of a tool and until the next answer:
    clients write there, as the user, what a tool has read.
    """

    messages: list[Json] = field(default_factory=list)
    beside_result: bool = False

    def add(self, role: str, content: str, **more: Any) -> Json:
        """Add a message, with what it has of ``more``, and return it."""
        # Templates know no role "developer", OpenAI's newer name of "system".
        message = {"role": "system" if role == "developer" else role, "content": content}
        message |= {name: value for name, value in more.items() if value}
        self.messages.append(message)
        self.beside_result = role == "tool" or (self.beside_result and role != "assistant")
        return message

    def read_as(self, role: str) -> str:
        """Return the role whose rules hold for the parts of the next message, which is of this
        one."""
        return "tool" if self.beside_result and role == "user" else role


class MessageBody(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Listed[CallBody] | None = None
    tool_call_id: str | None = None

    passes = PASSED_IN_MESSAGES

    def refuse_unknown(self, where: str = "") -> None:
        """Raise ``ApiError`` for a field that may change the answer."""
        if self.role != "assistant":
            super().refuse_unknown(where)
            return
        extra = self.model_extra or {}
        refuse_unknown({name: extra[name] for name in MEANINGFUL if name in extra}, where)

    def add_to(self, history: History, where: str) -> None:
        """Add the message, with lines in the place of what is not text if it stands beside a
        result. Raises ``ApiError``, which calls it ``where``."""
        extra = self.model_extra or {}
        content = self._content(extra, where)
        said = read_parts(content, f"{where}.content", history.read_as(self.role))
        more: Json = {
            "name": self.name,
            "tool_calls": [call.model_dump() for call in self.tool_calls or ()],
            "tool_call_id": self.tool_call_id,
        }
        text = said.text
        if self.role == "assistant":
            text = joined([(text, False), *_unread(extra)])
            told = (extra[name] for name in THOUGHTS if isinstance(extra.get(name), str))
            more["reasoning_content"] = all_thoughts([said.thought, *told])
        history.add(self.role, text, **more)

    def _content(self, extra: Mapping[str, Any], where: str) -> str | list[Json]:
        if self.content is not None:
            return self.content
        if self.role not in ("assistant", "tool"):
            raise refused(f"{where}.content is missing: give a text", f"{where}.content")
        refusal = extra.get("refusal")  # OpenAI's models say it instead
        return refusal if isinstance(refusal, str) else ""


def _unread(extra: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield lines in the place of what an earlier answer has beside its content."""
    for name in ("audio", "images"):
        given = extra.get(name)
        for each in given if isinstance(given, list) else [given]:
            if each:
                yield as_text({"type": name, **(each if isinstance(each, dict) else {})}), True
