"""Anthropic's Messages API: requests and replies. No MLX, no MPI."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from shardmlx.server.accepted_fields import CALLERS, Body, Json, JsonObject, Listed
from shardmlx.server.answer_parts import AnswerPart
from shardmlx.server.chat_request import (
    CHOICES,
    AnswerOptions,
    ApiRequest,
    ChatRequest,
    ServedModel,
    ToolChoice,
)
from shardmlx.server.openai_errors import ApiError, refused, shown
from shardmlx.server.openai_messages import (
    PASSED_IN_MESSAGES,
    PASSED_IN_TEXTS,
    History,
    all_thoughts,
    call_of,
    content_of,
    read_part,
    tool_of,
)
from shardmlx.server.other_blocks import as_text, joined
from shardmlx.server.replies import BlockReply
from shardmlx.server.request_bodies import AskedChat, StopStrings, TokenLimit, read_body
from shardmlx.server.request_queue import Delta
from shardmlx.server.structure import ResponseFormatBody, Structure

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
        """Raise ``ApiError`` for a field that is not known of a text or a result. Other types are
        refused, or have a line in their place."""
        if self.type in ("text", "tool_result"):
            super().refuse_unknown(where)


Blocks = Annotated[Listed[Block], BeforeValidator(_in_blocks)]


class AnthropicMessage(Body):
    """A message of the request."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    passes = PASSED_IN_MESSAGES

    def refuse_unknown(self, where: str = "") -> None:
        """Raise ``ApiError`` for a field that is not known. An answer has what a server told."""
        if self.role != "assistant":
            super().refuse_unknown(where)


class AnthropicFormat(ResponseFormatBody):
    """The structure that a request asks for."""

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

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str = ""
    disable_parallel_tool_use: bool | None = None

    @property
    def choice(self) -> ToolChoice:
        """The choice of tools that is asked for."""
        if self.type == "tool":
            return ToolChoice(named=self.name)
        return CHOICES["required" if self.type == "any" else self.type]


class AnthropicTool(Body):
    """A tool of the request."""

    type: str | None = None
    name: str = Field("", pattern=r"^[\w.:-]{0,128}$")
    description: str = ""
    input_schema: JsonObject = Field(default_factory=dict)

    passes = frozenset({"cache_control", "strict", "defer_loading", "eager_input_streaming"})
    neutral: ClassVar = CALLERS

    def refuse_unknown(self, where: str = "") -> None:
        """Raise ``ApiError`` for a field that is not known, and for a tool of another kind."""
        if self.type not in (None, "custom"):
            raise refused(
                f"{where}: tools of type {shown(self.type)} are Anthropic's own: leave it out, or "
                "give its name and an input_schema, and no type",
                f"{where}.type",
            )
        if not self.name:
            raise refused(f"{where}.name is missing", f"{where}.name")
        super().refuse_unknown(where)


class MessagesBody(AskedChat):
    """The body of a request to /v1/messages."""

    messages: Listed[AnthropicMessage]
    max_tokens: TokenLimit = None
    system: Blocks = Field(default_factory=list)
    stop_sequences: StopStrings = Field(default_factory=list)
    tools: Listed[AnthropicTool] = Field(default_factory=list)
    tool_choice: AnthropicChoice = Field(default_factory=AnthropicChoice)
    thinking: ThinkingBody | None = None
    output_config: OutputBody = Field(default_factory=OutputBody)
    output_format: AnthropicFormat | None = None  # its name before there was an output_config

    @property
    def structure(self) -> Structure | None:
        """The structure that an answer must have, if any. Raises ``ApiError``."""
        form = self.output_config.format
        former = self.output_format
        if None not in (form, former) and form != former:
            raise refused(
                "output_config.format and output_format both ask for a structure: give one of them",
                "output_format",
            )
        if form is not None:
            return form.structure("output_config.format")
        return None if former is None else former.structure("output_format")

    def chat(self) -> ChatRequest:
        """Return what is asked for. Raises ``ApiError``."""
        history = History()
        _add_blocks(history, "system", "system", self.system)
        for at, message in enumerate(self.messages):
            where = f"messages.{at}.content"
            if message.role == "assistant":
                _add_answer(history, message.content)
            else:
                _add_blocks(history, where, message.role, message.content)
        thinks = self.thinking is None or self.thinking.type != "disabled"
        return ChatRequest(
            options=AnswerOptions(
                sampling=self,
                most=self.max_tokens,
                stop=self.stop_sequences,
                stream=bool(self.stream),
            ),
            goes_on=_goes_on(history),
            messages=history.messages,
            tools=[tool_of(each.name, each.description, each.input_schema) for each in self.tools],
            choice=self.tool_choice.choice,
            parallel=not self.tool_choice.disable_parallel_tool_use,
            arguments=self.template_arguments(self.output_config.effort if thinks else "none"),
            structure=self.structure,
        )


def read_message(body: bytes, served: ServedModel) -> ApiRequest:
    """Read the body of a request to /v1/messages. Raises ``ApiError``."""
    asked = read_body(MessagesBody, body, served.names)
    if asked.max_tokens is None:
        raise refused("max_tokens is missing", "max_tokens")
    return asked.chat().read(served)


def counted(body: bytes, served: ServedModel) -> Json:
    """Answer a request to /v1/messages/count_tokens. Raises ``ApiError``."""
    (request,) = read_body(MessagesBody, body, served.names).chat().read(served).requests
    return {"input_tokens": len(request.tokens)}


def _goes_on(history: History) -> bool:
    """Return whether the answer goes on from the last message: it does from one of the assistant,
    and one that says nothing is taken away."""
    last = history.messages[-1] if history.messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return False
    if last["content"].strip() or last.get("reasoning_content"):
        return True
    history.messages.pop()
    return False


def _add_blocks(history: History, where: str, role: str, blocks: list[Block]) -> None:
    """Add what blocks say: a message, and one for each result of a tool. Other blocks than texts
    have lines in their place, if they are the user's and stand beside a result, as files that a
    tool has read. Raises ``ApiError``."""
    has_result = any(block.type == "tool_result" for block in blocks)
    beside = role == "user" and (history.beside_result or has_result)
    texts = []
    for at, block in enumerate(blocks):
        if block.type == "text":
            texts.append(BILLING.sub("", block.text) if role == "system" else block.text)
        elif block.type == "tool_result" and role == "user":
            _add_result(history, f"{where}.{at}", block)
        elif beside:
            texts.append(as_text(block.model_dump()))
        else:
            raise refused(
                f"{where}.{at}: a block of type {shown(block.type)} is not understood here",
                f"{where}.{at}.type",
            )
    if role == "system":
        texts = list(filter(None, texts))
    if texts:
        history.add(role, "\n".join(texts))


def _add_answer(history: History, blocks: list[Block]) -> None:
    """Add an earlier answer. Blocks of Anthropic's own servers have lines in their place."""
    calls = []
    pieces = []
    for block in blocks:
        if block.type == "text":
            pieces.append((block.text, False))
        elif block.type == "tool_use":
            calls.append(call_of(block.id, block.name, block.input or {}))
        elif block.type not in ("thinking", "redacted_thinking"):
            pieces.append((as_text(block.model_dump()), True))
    thought = all_thoughts(block.thinking for block in blocks)
    history.add("assistant", joined(pieces), tool_calls=calls, reasoning_content=thought)


def _add_result(history: History, where: str, block: Block) -> None:
    """Add the result of a tool. Raises ``ApiError``."""
    place = f"{where}.content"
    content = content_of(block.content or [], place)
    if isinstance(content, str):
        texts = [content]
    else:
        texts = [read_part(each, f"{place}.{at}", "tool")[0] for at, each in enumerate(content)]
    said = "Error: " * block.is_error + "\n".join(texts)
    history.add("tool", said, tool_call_id=block.tool_use_id)


# Replies.

KINDS = {"thought": "thinking", "said": "text", "call": "tool_use"}


class MessageReply(BlockReply):
    """The reply to one request to /v1/messages: each block is one of its content."""

    sign_of_life = b'event: ping\ndata: {"type": "ping"}\n\n'

    _reason: Mapping[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def failure(self, error: ApiError) -> Json:
        """Return the error in Anthropic's form: its body, or the event that ends a stream."""
        return error.anthropics

    def opening(self) -> Iterator[Json]:
        """Yield ``message_start``, with a message that is empty so far."""
        yield {"type": "message_start", "message": self.whole}

    def closing(self) -> Iterator[Json]:
        """Yield ``message_stop``."""
        yield {"type": "message_stop"}

    @property
    def whole(self) -> Json:
        """The message, as far as it has come."""
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
        if part.text:
            yield self._block("delta", delta=delta)

    def _ended(self, block: AnswerPart, *, is_cut: bool) -> Iterator[Json]:
        yield self._block("stop")

    def _block(self, what: str, **more: Any) -> Json:
        return {"type": f"content_block_{what}", "index": len(self.blocks[0]) - 1, **more}

    def _end(self, delta: Delta) -> Iterator[Json]:
        stop = None
        if delta.finish_reason == "length":
            reason = "max_tokens"
        elif any(block.kind == "call" for block in self.blocks[0]):
            reason = "tool_use"
        else:
            stop = delta.stop
            reason = "end_turn" if stop is None else "stop_sequence"
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
