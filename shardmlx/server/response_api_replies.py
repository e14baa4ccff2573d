"""Pieces of answers to the bodies and events of OpenAI's Responses API. No MLX, no MPI."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardmlx.server.answer_parser import AnswerParser
from shardmlx.server.answer_parts import Call, MoreArguments, Part, Said, Thought
from shardmlx.server.client_tools import ClientTool
from shardmlx.server.openai_errors import ApiError
from shardmlx.server.openai_requests import ApiRequest
from shardmlx.server.replies import Body, Reply, TokenText
from shardmlx.server.request_queue import Piece

PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


class ResponseReply(Reply):
    """The reply to one request to /v1/responses."""

    def __init__(self, request: ApiRequest, model: str, token_text: TokenText) -> None:
        super().__init__(request, model, token_text)
        self._items: list[Body] = []
        self._status = "in_progress"
        self._pending: tuple[ClientTool, Call] | None = None
        self._events = 0
        self._thought = 0
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
        }

    def event(self, body: Body) -> bytes:
        numbered = {"sequence_number": self._events, **body}
        self._events += 1
        return f"event: {body['type']}\ndata: {json.dumps(numbered)}\n\n".encode()

    @property
    def sign_of_life(self) -> bytes:
        # An event that tells nothing new: Codex counts no comments, and some clients refuse events
        # that they do not know.
        return self.event(
            {"type": "response.in_progress", "response": {**self.whole, "output": []}}
        )

    def failure(self, error: ApiError) -> Body:
        if not self.request.stream:
            return error.body
        return {"type": "error", "code": error.code, "message": str(error), "param": error.param}

    def opening(self) -> Iterator[Body]:
        yield {"type": "response.created", "response": self.whole}
        yield {"type": "response.in_progress", "response": self.whole}

    def _add(self, index: int, piece: Piece, parser: AnswerParser) -> Iterator[Body]:
        is_last = piece.finish_reason is not None
        for part in parser.take(piece.text, is_last=is_last):
            if isinstance(part, Thought):
                self._thought = piece.generated
            yield from self._take(part)
        if is_last:
            yield from self._end_item()
            self._status = "incomplete" if piece.finish_reason == "length" else "completed"

    def closing(self) -> Iterator[Body]:
        yield {"type": f"response.{self._status}", "response": self.whole}

    @property
    def whole(self) -> Body:
        is_cut = self._status == "incomplete"
        return {
            **self._head,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": list(self._items),
            **self.request.repeated,
            "store": False,
            "usage": None if self._status == "in_progress" else self._usage,
        }

    @property
    def _usage(self) -> Body:
        (cached,), (generated,) = self.cached, self.generated
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": self._thought},
            "total_tokens": self.prompt_tokens + generated,
        }

    def _take(self, part: Part) -> Iterator[Body]:
        if isinstance(part, Call):
            yield from self._end_item()
            tool = self.request.client_tools.get(part.name) or ClientTool("function", part.name)
            if tool.kind != "function":
                self._pending = (tool, part)
                return
            fields = tool.called("{}") or {}
            yield self._begin_item("function_call", call_id=part.id, **{**fields, "arguments": ""})
        if isinstance(part, Call | MoreArguments):
            text = part.arguments if isinstance(part, Call) else part.text
            if self._pending is not None:
                tool, call = self._pending
                self._pending = (tool, replace(call, arguments=call.arguments + text))
                return
            self._items[-1]["arguments"] += text
            if text:
                yield self._of_item("response.function_call_arguments.delta", delta=text)
            return
        kind = "message" if isinstance(part, Said) else "reasoning"
        last = self._items[-1] if self._items and self._pending is None else {}
        if (last.get("type"), last.get("status")) != (kind, "in_progress"):
            yield from self._end_item()
            content: Body = (
                {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                if isinstance(part, Said)
                else {"type": "reasoning_text", "text": ""}
            )
            more: Body = {"role": "assistant"} if isinstance(part, Said) else {"summary": []}
            yield self._begin_item(kind, content=[], **more)
            self._items[-1]["content"] = [content]
            yield self._of_content("response.content_part.added", part=dict(content))
        content = self._items[-1]["content"][0]
        content["text"] += part.text
        more = {"logprobs": []} if isinstance(part, Said) else {}
        yield self._of_content(f"response.{content['type']}.delta", delta=part.text, **more)

    def _begin_item(self, kind: str, **more: Any) -> Body:
        item = {
            "id": f"{PREFIXES.get(kind, 'call')}_{uuid.uuid4().hex}",
            "type": kind,
            "status": "in_progress",
            **more,
        }
        self._items.append(dict(item))
        place = len(self._items) - 1
        return {"type": "response.output_item.added", "output_index": place, "item": item}

    def _end_item(self) -> Iterator[Body]:
        if self._pending is not None:
            tool, call = self._pending
            self._pending = None
            yield from self._whole_call(tool, call)
            return
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        item["status"] = "completed"
        if item["type"] == "function_call":
            if ClientTool("function", item["name"]).called(item["arguments"]) is None:
                item["status"] = "incomplete"  # it was cut off
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("response.function_call_arguments.done", **done)
        for content in item.get("content", []):
            more: Body = {"logprobs": []} if content["type"] == "output_text" else {}
            kind = f"response.{content['type']}.done"
            yield self._of_content(kind, text=content["text"], **more)
            yield self._of_content("response.content_part.done", part=dict(content))
        place = len(self._items) - 1
        yield {"type": "response.output_item.done", "output_index": place, "item": dict(item)}

    def _whole_call(self, tool: ClientTool, call: Call) -> Iterator[Body]:
        """Yield the events of a call that comes at once, as a client of its kind knows it. One that
        was cut off is text: nobody shall run it."""
        fields = tool.called(call.arguments)
        if fields is None:
            yield from self._take(Said(call.arguments))
        else:
            kind = "custom_tool_call" if tool.kind == "custom" else f"{tool.kind}_call"
            yield self._begin_item(kind, call_id=call.id, **fields)
            if tool.kind == "custom":
                yield self._of_item(f"response.{kind}_input.delta", delta=fields["input"])
                yield self._of_item(f"response.{kind}_input.done", input=fields["input"])
        yield from self._end_item()

    def _of_item(self, kind: str, **more: Any) -> Body:
        place = len(self._items) - 1
        return {"type": kind, "item_id": self._items[-1]["id"], "output_index": place, **more}

    def _of_content(self, kind: str, **more: Any) -> Body:
        return {**self._of_item(kind), "content_index": 0, **more}
