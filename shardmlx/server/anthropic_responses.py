"""Pieces of answers to the bodies and events of Anthropic's Messages API. No MLX, no MPI."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from shardmlx.server.answer_parser import AnswerParser
from shardmlx.server.answer_parts import Call, MoreArguments, Part, Thought
from shardmlx.server.openai_errors import ApiError
from shardmlx.server.openai_requests import ApiRequest
from shardmlx.server.replies import Body, Reply, TokenText
from shardmlx.server.request_queue import Piece


class MessageReply(Reply):
    """The reply to one request to /v1/messages."""

    sign_of_life = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, request: ApiRequest, model: str, token_text: TokenText) -> None:
        super().__init__(request, model, token_text)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._content: list[Body] = []
        self._arguments = ""
        self._reason: str | None = None
        self._stop: str | None = None

    def event(self, body: Body) -> bytes:
        return f"event: {body['type']}\ndata: {json.dumps(body)}\n\n".encode()

    def failure(self, error: ApiError) -> Body:
        return error.anthropics

    def opening(self) -> Iterator[Body]:
        yield {"type": "message_start", "message": self.whole}

    def _add(self, index: int, piece: Piece, parser: AnswerParser) -> Iterator[Body]:
        for part in parser.take(piece.text, is_last=piece.finish_reason is not None):
            yield from self._take(part)
        if piece.finish_reason is not None:
            yield from self._end_block()
            self._reason, self._stop = self._ended(piece)
            yield {
                "type": "message_delta",
                "delta": {"stop_reason": self._reason, "stop_sequence": self._stop},
                "usage": self._usage,
            }

    def closing(self) -> Iterator[Body]:
        yield {"type": "message_stop"}

    @property
    def whole(self) -> Body:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": list(self._content),
            "stop_reason": self._reason,
            "stop_sequence": self._stop,
            "usage": self._usage,
        }

    @property
    def _usage(self) -> Body:
        (cached,), (generated,) = self.cached, self.generated
        return {
            "input_tokens": self.prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": generated,
        }

    def _take(self, part: Part) -> Iterator[Body]:
        if isinstance(part, Call):
            yield from self._end_block()
            empty = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            self._content.append(dict(empty))
            self._arguments = ""
            yield self._block("start", content_block=empty)
        if isinstance(part, Call | MoreArguments):
            text = part.arguments if isinstance(part, Call) else part.text
            self._arguments += text
            delta = {"type": "input_json_delta", "partial_json": text}
            yield self._block("delta", delta=delta)
            return
        kind = "thinking" if isinstance(part, Thought) else "text"
        if not self._content or self._content[-1]["type"] != kind:
            yield from self._end_block()
            # Nobody signs the thoughts of a model of one's own.
            block = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            self._content.append(dict(block))
            yield self._block("start", content_block=block)
        self._content[-1][kind] += part.text
        yield self._block("delta", delta={"type": f"{kind}_delta", kind: part.text})

    def _end_block(self) -> Iterator[Body]:
        if not self._content:
            return
        if self._content[-1]["type"] == "tool_use":
            try:
                self._content[-1]["input"] = json.loads(self._arguments)
            except ValueError:  # it was cut off: nobody shall take it for a call without arguments
                self._content[-1] = {"type": "text", "text": self._arguments}
        yield self._block("stop")

    def _block(self, what: str, **more: Any) -> Body:
        return {"type": f"content_block_{what}", "index": len(self._content) - 1, **more}

    def _ended(self, piece: Piece) -> tuple[str, str | None]:
        """Return why the answer ended, and with which stop sequence, if with one."""
        if piece.finish_reason == "length":
            return "max_tokens", None
        if any(block["type"] == "tool_use" for block in self._content):
            return "tool_use", None
        return ("end_turn" if piece.stop is None else "stop_sequence"), piece.stop
