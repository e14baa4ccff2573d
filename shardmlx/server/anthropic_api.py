"""Anthropic's Messages API: requests, said in OpenAI's words, and replies. No MLX, no MPI.

``openai_requests`` reads and checks all that the two APIs share.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from shardmlx.server.accepted_fields import CALLERS, IGNORED, NEUTRAL, Body, Json, Listed
from shardmlx.server.answer_parser import AnswerPart
from shardmlx.server.openai_bodies import SAMPLING, validated
from shardmlx.server.openai_errors import ApiError, refused, shown
from shardmlx.server.openai_messages import (
    PASSED_IN_MESSAGES,
    PASSED_IN_TEXTS,
    all_thoughts,
    content_of,
    follows_result,
    read_part,
)
from shardmlx.server.openai_requests import ApiRequest, ServedModel, TranslatedChat
from shardmlx.server.other_blocks import as_text, joined
from shardmlx.server.replies import BlockReply
from shardmlx.server.request_queue import Delta
from shardmlx.server.structure import SchemaBody

SAME = frozenset({"model", "stream", "chat_template_kwargs", *SAMPLING})
"""Fields that mean the same in both APIs."""

NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "tools": "tools",
}
"""Anthropic's names for other fields of a chat."""

BILLING = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n?")
"""A line of Claude Code, different in every request: no prefix could be found again."""


def _in_blocks(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Block(Body):
    """A block of a message: what each type has is in other fields. ``content`` is that of a result:
    a text, or blocks."""

    type: str
    text: str = ""
    thinking: str | None = None
    id: str = ""
    name: str = ""
    input: Json | None = None
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool = False

    passes = PASSED_IN_TEXTS | {"caller", "toolset_name"}

    def refuse_unknown(self, where: str = "") -> None:
        # Other types are refused, or have a line in their place.
        if self.type in KNOWN["user"]:
            super().refuse_unknown(where)


Blocks = Annotated[Listed[Block], BeforeValidator(_in_blocks)]

KNOWN = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
"""The types of blocks in the messages of each role."""


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: Blocks

    passes = PASSED_IN_MESSAGES

    def refuse_unknown(self, where: str = "") -> None:
        if self.role != "assistant":  # which has what a server has told
            super().refuse_unknown(where)


class AnthropicFormat(SchemaBody):
    type: Literal["json_schema"]


class OutputBody(Body):
    """The ``output_config`` of a request."""

    effort: str | None = None
    format: AnthropicFormat | None = None

    passes = frozenset({"task_budget"})


class ThinkingBody(Body):
    """The ``thinking`` of a request."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]

    passes = frozenset({"budget_tokens", "display", "block_binding"})


class AnthropicChoice(Body):
    """The ``tool_choice`` of a request."""

    type: str = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicTool(Body):
    """A tool; its fields are checked as those of a chat's."""

    type: Any = None
    name: Any = None
    description: Any = None
    input_schema: Any = None

    passes = frozenset({"cache_control", "strict", "defer_loading", "eager_input_streaming"})
    neutral: ClassVar = CALLERS

    def refuse_unknown(self, where: str = "") -> None:
        # Other types are refused.
        if self.type in OWN_TOOLS:
            super().refuse_unknown(where)


OWN_TOOLS = (None, "custom")
"""Types of tools that the client describes."""


class MessagesBody(Body):
    """The body of a request to /v1/messages, as far as it is not passed on as it is."""

    messages: Listed[AnthropicMessage]
    max_tokens: int | None = None
    system: Blocks = Field(default_factory=list)
    stop_sequences: Listed[str] | None = None
    tools: Listed[AnthropicTool] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputBody | None = None
    output_format: AnthropicFormat | None = None  # its name before there was an output_config

    passes = IGNORED | SAME
    neutral: ClassVar = NEUTRAL


def read_message(body: bytes, served: ServedModel) -> ApiRequest:
    """Read the body of a request to /v1/messages. Raises ``ApiError``."""
    asked = validated(MessagesBody, body)
    if asked.max_tokens is None:
        raise refused("max_tokens is missing", "max_tokens")
    return as_chat(asked).read(served)


def counted(body: bytes, served: ServedModel) -> Json:
    """Answer a request to /v1/messages/count_tokens. Raises ``ApiError``."""
    (request,) = as_chat(validated(MessagesBody, body)).read(served).requests
    return {"input_tokens": len(request.tokens)}


def as_chat(asked: MessagesBody) -> TranslatedChat:
    """Return the chat that asks for the same. Raises ``ApiError``."""
    chat, output = TranslatedChat.of(asked, SAME, NAMES), asked.output_config or OutputBody()
    thinks = asked.thinking is None or asked.thinking.type != "disabled"
    chat.body |= {
        "max_tokens": asked.max_tokens,
        "stop": asked.stop_sequences,
        "reasoning_effort": output.effort if thinks else "none",
        **_choice(asked.tool_choice or AnthropicChoice()),
    }
    forms = output.format, asked.output_format
    if None not in forms and forms[0] != forms[1]:
        raise refused(
            "output_config.format and output_format both ask for a structure: give one of them",
            "output_format",
        )
    if (form := forms[0] or forms[1]) is not None:
        schema = {"schema": form.json_schema}
        chat.body["response_format"] = {"type": "json_schema", "json_schema": schema}
    _add_message(chat, "system", "system", asked.system)
    beside = False
    for at, message in enumerate(asked.messages):
        has_result = any(block.type == "tool_result" for block in message.content)
        is_result = has_result and message.role == "user"
        beside = follows_result(beside, "tool" if is_result else message.role)
        _add_message(
            chat, f"messages.{at}.content", message.role, message.content, beside_result=beside
        )
    for at, tool in enumerate(asked.tools or ()):
        _add_tool(chat, f"tools.{at}", tool)
    last = chat.messages[-1] if chat.messages else {}
    if last.get("role") == "assistant" and not last.get("tool_calls"):
        # The answer goes on from this message, unless it says nothing.
        if last["content"].strip() or last.get("reasoning_content"):
            chat.body["continue_final_message"] = True
        else:
            chat.messages.pop()
    return chat


def _add_message(
    chat: TranslatedChat, where: str, role: str, blocks: list[Block], *, beside_result: bool = False
) -> None:
    """Add what blocks say: a message, and one for each result of a tool. Other blocks than texts
    have lines in their place, if they are the user's and stand ``beside_result``, as files that a
    tool has read. Raises ``ApiError``."""
    if role == "assistant":
        _add_answer(chat, blocks)
        return
    texts = []
    for at, block in enumerate(blocks):
        if block.type == "text":
            texts.append(BILLING.sub("", block.text) if role == "system" else block.text)
        elif block.type == "tool_result" and role == "user":
            _add_result(chat, f"{where}.{at}", block)
        elif role == "user" and beside_result:
            texts.append(as_text(block.model_dump()))
        else:
            raise refused(
                f"{where}.{at}: a block of type {shown(block.type)} is not understood here",
                f"{where}.{at}.type",
            )
    if role == "system":
        texts = list(filter(None, texts))
    if texts:
        chat.messages.append({"role": role, "content": "\n".join(texts)})


def _add_answer(chat: TranslatedChat, blocks: list[Block]) -> None:
    """Add an earlier answer. Blocks of Anthropic's own servers have lines in their place."""
    message: Json = {"role": "assistant"}
    chat.messages.append(message)
    pieces = []
    for block in blocks:
        if block.type == "text":
            pieces.append((block.text, False))
        elif block.type == "tool_use":
            chat.add_call(block.id, block.name, block.input)
        elif block.type not in KNOWN["assistant"]:
            pieces.append((as_text(block.model_dump()), True))
    message["content"] = joined(pieces)
    if thought := all_thoughts(block.thinking for block in blocks):
        message["reasoning_content"] = thought


def _add_result(chat: TranslatedChat, where: str, block: Block) -> None:
    """Add the result of a tool. Raises ``ApiError``."""
    place = f"{where}.content"
    content = content_of(block.content or [], place)
    if isinstance(content, str):
        texts = [content]
    else:
        texts = [read_part(each, f"{place}.{at}", "tool")[0] for at, each in enumerate(content)]
    said = "Error: " * block.is_error + "\n".join(texts)
    chat.messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": said})


def _add_tool(chat: TranslatedChat, where: str, tool: AnthropicTool) -> None:
    if tool.type not in OWN_TOOLS:
        raise refused(
            f"{where}: tools of type {shown(tool.type)} are Anthropic's own: leave it out, or give "
            "its name and an input_schema, and no type",
            f"{where}.type",
        )
    function = {"name": tool.name, "description": tool.description}
    chat.add_tool({**function, "parameters": tool.input_schema})


def _choice(choice: AnthropicChoice) -> Json:
    function = {"type": "function", "function": {"name": choice.name}}
    names = {"auto": "auto", "none": "none", "any": "required", "tool": function}
    kind = choice.type
    if kind not in names:
        raise refused(
            f"tool_choice.type is {shown(kind)}: give auto, any, tool or none", "tool_choice.type"
        )
    chat: Json = {"tool_choice": names[kind]}
    if choice.disable_parallel_tool_use:
        chat["parallel_tool_calls"] = False
    return chat


# Replies.

KINDS = {"thought": "thinking", "said": "text", "call": "tool_use"}


class MessageReply(BlockReply):
    sign_of_life = b'event: ping\ndata: {"type": "ping"}\n\n'

    _reason: Mapping[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def failure(self, error: ApiError) -> Json:
        return error.anthropics

    def opening(self) -> Iterator[Json]:
        yield {"type": "message_start", "message": self.whole}

    def closing(self) -> Iterator[Json]:
        yield {"type": "message_stop"}

    @property
    def whole(self) -> Json:
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": list(map(_content, self.blocks[0])),
            **self._reason,
            "usage": self._usage,
        }

    @property
    def _usage(self) -> Json:
        (last,) = self.last
        return {
            "input_tokens": self.prompt_tokens - last.cached,
            "cache_read_input_tokens": last.cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": last.generated,
        }

    def _begun(self, block: AnswerPart) -> Iterator[Json]:
        empty = _content(replace(block, text="{}" if block.kind == "call" else ""))
        yield self._block("start", content_block=empty)

    def _more(self, part: AnswerPart) -> Iterator[Json]:
        if part.kind == "call":
            delta = {"type": "input_json_delta", "partial_json": part.text}
        else:
            kind = KINDS[part.kind]
            delta = {"type": f"{kind}_delta", kind: part.text}
        yield self._block("delta", delta=delta)

    def _ended(self, block: AnswerPart, *, is_cut: bool) -> Iterator[Json]:
        yield self._block("stop")

    def _block(self, what: str, **more: Any) -> Json:
        return {"type": f"content_block_{what}", "index": len(self.blocks[0]) - 1, **more}

    def _end(self, delta: Delta) -> Iterator[Json]:
        reason, stop = ("end_turn" if delta.stop is None else "stop_sequence"), delta.stop
        if delta.finish_reason == "length":
            reason, stop = "max_tokens", None
        elif any(block.kind == "call" for block in self.blocks[0]):
            reason, stop = "tool_use", None
        self._reason = {"stop_reason": reason, "stop_sequence": stop}
        yield {"type": "message_delta", "delta": self._reason, "usage": self._usage}


def _content(block: AnswerPart) -> Json:
    if block.kind == "call":
        given = json.loads(block.text)
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": given}
    kind = KINDS[block.kind]
    # Nobody signs the thoughts of a model of one's own.
    signature = {"signature": ""} if block.kind == "thought" else {}
    return {"type": kind, kind: block.text, **signature}
