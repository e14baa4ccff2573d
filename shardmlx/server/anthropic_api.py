"""Anthropic's Messages API: requests, said in OpenAI's words, and replies. No MLX, no MPI.

``openai_requests`` reads and checks all that the two APIs share.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from shardmlx.inference.prompts import PromptReader
from shardmlx.server.accepted_fields import Body, Listed, refuse_unknown
from shardmlx.server.answer_parts import Part
from shardmlx.server.openai_bodies import SAMPLING, validated
from shardmlx.server.openai_errors import ApiError, refused, shown
from shardmlx.server.openai_requests import ApiRequest, ServedModel, TranslatedChat
from shardmlx.server.replies import BlockReply, TokenText
from shardmlx.server.request_queue import Piece
from shardmlx.server.structure import SchemaBody

Json = dict[str, Any]

SAME = frozenset({"model", "stream", "chat_template_kwargs", *SAMPLING})
"""Fields that mean the same in both APIs."""

NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
"""Anthropic's names for other fields of a chat."""

BILLING = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n?")
"""A line that Claude Code writes before a system prompt. It says nothing to a model, and differs in
every request: no prefix could be found again."""


class FormatBody(SchemaBody):
    """The form of an answer: JSON of a schema."""

    type: Literal["json_schema"]


class OutputBody(Body):
    """The ``output_config`` of a request."""

    effort: str | None = None
    format: FormatBody | None = None
    task_budget: Any = None  # a task has many requests


class MessagesBody(Body):
    """The body of a request to /v1/messages, as far as it is not passed on as it is."""

    messages: Listed[Json]
    max_tokens: int | None = None
    system: str | Listed[Json] | None = None
    stop_sequences: Listed[str] | None = None
    tools: Listed[Json] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    output_config: OutputBody | None = None
    output_format: FormatBody | None = None  # its name before there was an output_config


def read_message(
    body: bytes, reader: PromptReader, served: ServedModel, *, counts: bool = False
) -> ApiRequest:
    """Read the body of a request to /v1/messages; one that only ``counts`` tokens names no
    ``max_tokens``. Raises ``ApiError``."""
    asked = validated(MessagesBody, body)
    if asked.max_tokens is None and not counts:
        raise refused("max_tokens is missing", "max_tokens")
    return as_chat(asked).read(reader, served)


def as_chat(asked: MessagesBody) -> TranslatedChat:
    """Return the chat that asks for the same. Raises ``ApiError``."""
    extra = asked.model_extra or {}
    output = asked.output_config or OutputBody()
    refuse_unknown({name: value for name, value in extra.items() if name not in SAME})
    refuse_unknown(output.model_extra, "output_config.")
    chat = TranslatedChat({name: extra[name] for name in SAME & extra.keys()}, dict(NAMES))
    thinks = (asked.thinking or {}).get("type") != "disabled"
    chat.body |= {
        "max_tokens": asked.max_tokens,
        "stop": asked.stop_sequences,
        "reasoning_effort": output.effort if thinks else "none",
        **_choice(asked.tool_choice or {}),
    }
    if (form := output.format or asked.output_format) is not None:
        schema = {"schema": form.json_schema}
        chat.body["response_format"] = {"type": "json_schema", "json_schema": schema}
    _add_system(chat, "system", asked.system or "")
    for at, message in enumerate(asked.messages):
        _add_message(chat, f"messages.{at}", message)
    for at, tool in enumerate(asked.tools or ()):
        _add_tool(chat, f"tools.{at}", tool)
    _go_on(chat)
    return chat


def _go_on(chat: TranslatedChat) -> None:
    """Have the answer go on from the last message, if it is the assistant's; take out one that says
    nothing."""
    last = chat.messages[-1] if chat.messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return
    if last["content"].strip() or last.get("reasoning_content"):
        chat.body["continue_final_message"] = True
    else:
        chat.messages.pop()


def _add_message(chat: TranslatedChat, where: str, message: Json) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise refused(f"{where}.role is {shown(role)}: give user or assistant", f"{where}.role")
    if not isinstance(content, str | list):
        raise refused(f"{where}.content: give a text, or a list of blocks", f"{where}.content")
    if role == "system":
        _add_system(chat, f"{where}.content", content)
    elif isinstance(content, str):
        chat.add(where, {"role": role, "content": content})
    elif role == "assistant":
        _add_answered(chat, where, content)
    else:
        _add_asked(chat, where, content)


def _add_system(chat: TranslatedChat, where: str, content: str | list[Json]) -> None:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [BILLING.sub("", _said(block, f"{where}.{at}")) for at, block in enumerate(blocks)]
    if text := "\n".join(filter(None, texts)):
        chat.add(where.removesuffix(".content"), {"role": "system", "content": text})


def _add_asked(chat: TranslatedChat, where: str, blocks: list[Any]) -> None:
    """Add what a user's blocks say: results of tools, each a message of its own, and text."""
    texts = []
    for at, block in enumerate(blocks):
        place = f"{where}.content.{at}"
        if _kind(block, ("text", "tool_result"), place) == "text":
            texts.append(_said(block, place))
            continue
        result = _text(block.get("content") or "", f"{place}.content")
        if block.get("is_error"):
            result = f"Error: {result}"
        message = {"tool_call_id": block.get("tool_use_id", ""), "content": result}
        chat.add(place, {"role": "tool", **message})
    if texts:
        chat.add(where, {"role": "user", "content": "\n".join(texts)})


def _add_answered(chat: TranslatedChat, where: str, blocks: list[Any]) -> None:
    """Add the message that an assistant's blocks are."""
    kinds = ("text", "thinking", "redacted_thinking", "tool_use")
    message: Json = {"role": "assistant", "content": ""}
    chat.add(where, message)
    for at, block in enumerate(blocks):
        place = f"{where}.content.{at}"
        match _kind(block, kinds, place):
            case "text":
                message["content"] += _said(block, place)
            case "thinking":
                message["reasoning_content"] = block.get("thinking")
            case "tool_use":
                called = (block.get("id"), block.get("name"), block.get("input"))
                chat.add_call(place, "input", *called)


def _kind(block: Any, known: tuple[str, ...], where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in known:
        raise refused(
            f"{where}: a block of type {shown(kind)} is not understood here", f"{where}.type"
        )
    return str(kind)


def _said(block: Any, where: str) -> str:
    """Return what a block of text says."""
    _kind(block, ("text",), where)
    if not isinstance(block.get("text"), str):
        raise refused(f"{where}.text: give a text", f"{where}.text")
    return str(block["text"])


def _text(content: Any, where: str) -> str:
    """Return a text, or that of a list of blocks of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(f"{where}: give a text, or a list of blocks", where)
    return "\n".join(_said(block, f"{where}.{at}") for at, block in enumerate(content))


def _add_tool(chat: TranslatedChat, where: str, tool: Mapping[str, Any]) -> None:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        runs_there = str(kind).startswith(ON_THE_SERVER)
        which = "run on Anthropic's own servers" if runs_there else "are known to its models alone"
        remedy = "leave it out" if runs_there else "give its name and an input_schema, and no type"
        raise refused(
            f"{where}: tools of type {shown(kind)} {which}: {remedy}",
            f"{where}.type",
        )
    function = {name: tool.get(name) for name in ("name", "description")}
    chat.add_tool(where, "input_schema", {**function, "parameters": tool.get("input_schema")})


ON_THE_SERVER = ("web_", "code_execution", "tool_search", "mcp", "advisor")
"""Beginnings of the types of tools that run on Anthropic's servers; the client runs the others."""


def _choice(choice: Mapping[str, Any]) -> Json:
    function = {"type": "function", "function": {"name": choice.get("name")}}
    names = {"auto": "auto", "none": "none", "any": "required", "tool": function}
    kind = str(choice.get("type", "auto"))
    if kind not in names:
        raise refused(
            f"tool_choice.type is {shown(kind)}: give auto, any, tool or none", "tool_choice.type"
        )
    chat: Json = {"tool_choice": names[kind]}
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    return chat


# Replies.

KINDS = {"thought": "thinking", "said": "text", "call": "tool_use"}


class MessageReply(BlockReply):
    """The reply to one request to /v1/messages."""

    sign_of_life = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, request: ApiRequest, model: str, token_text: TokenText) -> None:
        super().__init__(request, model, token_text)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._reason: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def event(self, body: Json) -> bytes:
        return f"event: {body['type']}\ndata: {json.dumps(body)}\n\n".encode()

    def failure(self, error: ApiError) -> Json:
        return error.anthropics

    def opening(self) -> Iterator[Json]:
        yield {"type": "message_start", "message": self.whole}

    def closing(self) -> Iterator[Json]:
        yield {"type": "message_stop"}

    @property
    def whole(self) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": list(map(_content, self.blocks[0])),
            **self._reason,
            "usage": self._usage,
        }

    @property
    def _usage(self) -> Json:
        (cached,), (generated,) = self.cached, self.generated
        return {
            "input_tokens": self.prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": generated,
        }

    def _begun(self, block: Part) -> Iterator[Json]:
        empty = _content(replace(block, text="{}" if block.kind == "call" else ""))
        yield self._block("start", content_block=empty)

    def _more(self, part: Part) -> Iterator[Json]:
        if part.kind == "call":
            delta = {"type": "input_json_delta", "partial_json": part.text}
        else:
            kind = KINDS[part.kind]
            delta = {"type": f"{kind}_delta", kind: part.text}
        yield self._block("delta", delta=delta)

    def _ended(self, block: Part) -> Iterator[Json]:
        yield self._block("stop")

    def _block(self, what: str, **more: Any) -> Json:
        return {"type": f"content_block_{what}", "index": len(self.blocks[0]) - 1, **more}

    def _end(self, piece: Piece) -> Iterator[Json]:
        reason, stop = ("end_turn" if piece.stop is None else "stop_sequence"), piece.stop
        if piece.finish_reason == "length":
            reason, stop = "max_tokens", None
        elif any(_content(block)["type"] == "tool_use" for block in self.blocks[0]):
            reason, stop = "tool_use", None
        self._reason = {"stop_reason": reason, "stop_sequence": stop}
        yield {"type": "message_delta", "delta": self._reason, "usage": self._usage}


def _content(block: Part) -> Json:
    if block.kind == "call":
        try:
            given = json.loads(block.text)
        except ValueError:  # it was cut off: nobody shall take it for a call without arguments
            return {"type": "text", "text": block.text}
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": given}
    kind = KINDS[block.kind]
    # Nobody signs the thoughts of a model of one's own.
    signature = {"signature": ""} if block.kind == "thought" else {}
    return {"type": kind, kind: block.text, **signature}
