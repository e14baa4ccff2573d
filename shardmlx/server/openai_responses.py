"""Deltas of answers to the bodies and events of OpenAI's API. No MLX, no MPI."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from shardmlx.inference.sampling_params import SampledToken
from shardmlx.server.accepted_fields import Json
from shardmlx.server.answer_parts import AnswerPart, Kind
from shardmlx.server.chat_request import ApiRequest
from shardmlx.server.replies import Reply, TokenText
from shardmlx.server.request_queue import Delta, FinishReason


class ChatReply(Reply):
    """The reply to one request of OpenAI's older APIs, with a choice for each answer: to a chat."""

    done = b"data: [DONE]\n\n"
    sign_of_life = b": still here\n\n"
    PREFIX: ClassVar = "chatcmpl"
    WHOLE: ClassVar = "chat.completion"
    CHUNK: ClassVar = "chat.completion.chunk"

    def __init__(self, request: ApiRequest, model: str, token_text: TokenText) -> None:
        super().__init__(request, model, token_text)
        self._tokens: list[list[Json]] = [[] for _ in request.requests]
        self._offsets: list[list[int]] = [[] for _ in request.requests]
        self._reasons: list[FinishReason | None] = [None for _ in request.requests]
        self.head: Json = {
            "id": f"{self.PREFIX}-{self.id}",
            "created": self.created,
            "model": model,
        }

    def event(self, body: Json) -> bytes:
        """Return a chunk as a server-sent event."""
        # ASCII only: some clients take U+2028 for the end of a line.
        return b"data: " + json.dumps(body).encode() + b"\n\n"

    def opening(self) -> Iterator[Json]:
        """Yield the first chunk of each answer, which has its role alone."""
        for index in range(len(self.blocks)):
            # Some clients open a text at an empty one, before there is any.
            begun = {"role": "assistant", "content": None}
            yield self._chunk(self._told(index, "delta", begun, None))

    def _add(self, index: int, delta: Delta) -> Iterator[Json]:
        logprobs = None
        if self.request.logprobs is not None:
            first = len(self._tokens[index])
            self._tokens[index] += map(self._of_token, delta.sampled)
            self._offsets[index] += [delta.begins] * len(delta.sampled)
            logprobs = self._logprobs(index, first)
            if delta.sampled and not delta.parts:
                yield self._chunk(self._part(index, None, logprobs))
        for part in delta.parts:
            yield self._chunk(self._part(index, part, logprobs))
            logprobs = None
        self._reasons[index] = delta.finish_reason
        if delta.finish_reason is not None:
            yield self._chunk(self._part(index, None, None))

    def closing(self) -> Iterator[Json]:
        """Yield the chunk with the numbers of tokens, if it was asked for."""
        if self.request.include_usage:
            yield {**self._chunk(), "usage": self.usage}

    @property
    def whole(self) -> Json:
        """The whole reply, as far as it has come: a choice for each answer."""
        choices = [
            self._choice(index, self._logprobs(index) if tokens else None)
            for index, tokens in enumerate(self._tokens)
        ]
        return {**self.head, "object": self.WHOLE, "choices": choices, "usage": self.usage}

    @property
    def usage(self) -> Json:
        """The numbers of tokens. Cached are those of a prompt for all of its answers; drafts are
        what OpenAI calls predictions, whoever made them."""
        n = self.request.n
        prompt = self.prompt_tokens
        generated = sum(each.generated for each in self.last)
        all_cached = [each.cached for each in self.last]
        cached = sum(min(all_cached[at : at + n]) for at in range(0, len(all_cached), n))
        accepted = sum(each.drafts.accepted for each in self.last)
        rejected = sum(each.drafts.drafted for each in self.last) - accepted
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            },
        }

    def _chunk(self, *choices: Json) -> Json:
        chunk = {**self.head, "object": self.CHUNK, "choices": list(choices)}
        return {**chunk, "usage": None} if self.request.include_usage else chunk

    def _text(self, index: int, kind: Kind) -> str:
        return "".join(block.text for block in self.blocks[index] if block.kind == kind)

    def _choice(self, index: int, logprobs: Json | None) -> Json:
        """Return a choice of the whole reply."""
        text = self._text(index, "said")
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if thought := self._text(index, "thought"):
            message["reasoning_content"] = thought
        if calls := self._calls(index):
            message["content"] = text or None
            message["tool_calls"] = [_call(call) for call in calls]
        return self._told(index, "message", message, logprobs)

    def _part(self, index: int, part: AnswerPart | None, logprobs: Json | None) -> Json:
        """Take in a part of an answer, and return the choice of a chunk with it, or of the last."""
        delta: Json = {}
        if part is not None:
            self._take(index, part)
            if part.kind == "call":
                more = _call(part) if part.id else {"function": {"arguments": part.text}}
                delta = {"tool_calls": [{"index": len(self._calls(index)) - 1, **more}]}
            else:
                delta = {"content" if part.kind == "said" else "reasoning_content": part.text}
        return self._told(index, "delta", delta, logprobs)

    def _calls(self, index: int) -> list[AnswerPart]:
        return [block for block in self.blocks[index] if block.kind == "call"]

    def _told(self, index: int, name: str, what: Any, logprobs: Json | None) -> Json:
        reason: str | None = self._reasons[index]
        if reason == "stop" and self._calls(index):
            reason = "tool_calls"
        return {"index": index, name: what, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, first: int = 0) -> Json:
        """Return the log-probabilities of an answer's tokens, from this one on."""
        return {"content": self._tokens[index][first:]}

    def _of_token(self, sampled: SampledToken) -> Json:
        likeliest = [self._token(token, logprob) for token, logprob in sampled.top]
        return {**self._token(sampled.token, sampled.logprob), "top_logprobs": likeliest}

    def _token(self, token: int, logprob: float | None) -> Json:
        text = self.token_text(token)
        # A part of a character has no text of its own.
        characters = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        # JSON has no infinity: OpenAI writes -9999.
        known = logprob if logprob is not None and math.isfinite(logprob) else -9999.0
        return {"token": text, "logprob": known, "bytes": characters}


class CompletionReply(ChatReply):
    """The reply to one request to /v1/completions: texts, without thoughts and calls."""

    PREFIX = "cmpl"
    WHOLE = "text_completion"
    CHUNK = "text_completion"

    def opening(self) -> Iterator[Json]:
        """Yield nothing: a text begins with its first piece."""
        yield from ()

    def _choice(self, index: int, logprobs: Json | None) -> Json:
        return self._told(index, "text", self._text(index, "said"), logprobs)

    def _logprobs(self, index: int, first: int = 0) -> Json:
        """Return them in OpenAI's four lists, beside the form of a chat. If several of the
        likeliest tokens have the same text, the first of them counts."""
        tokens = self._tokens[index][first:]
        return {
            "tokens": [each["token"] for each in tokens],
            "token_logprobs": [each["logprob"] for each in tokens],
            "top_logprobs": [_by_text([*each["top_logprobs"], each]) for each in tokens],
            "text_offset": self._offsets[index][first:],
            **super()._logprobs(index, first),
        }

    def _part(self, index: int, part: AnswerPart | None, logprobs: Json | None) -> Json:
        if part is not None:
            self._take(index, part)
        return self._told(index, "text", "" if part is None else part.text, logprobs)


def _by_text(tokens: Iterable[Json]) -> dict[str, float]:
    """Return the log-probability of each text; the first of a text counts."""
    known: dict[str, float] = {}
    for each in tokens:
        known.setdefault(each["token"], each["logprob"])
    return known


def _call(call: AnswerPart) -> Json:
    function = {"name": call.name, "arguments": call.text}
    return {"id": call.id, "type": "function", "function": function}
