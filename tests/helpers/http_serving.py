"""A whole server, but for the model: what is generated repeats the prompt."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from shardmlx.common.http_listener import bind, trusted_hosts
from shardmlx.common.uvicorn_thread import HttpServer
from shardmlx.errors import UserError
from shardmlx.inference.answer_format import AnswerFormat, Marks, Tool, json_calls
from shardmlx.inference.drafts import DraftCounts
from shardmlx.inference.prompts import PromptEncoder
from shardmlx.inference.sampling_params import SampledToken
from shardmlx.server.answer_parser import AnswerParser
from shardmlx.server.app import make_app
from shardmlx.server.chat_request import ServedModel
from shardmlx.server.model_names import ModelNames
from shardmlx.server.openai_errors import NO_HTTP
from shardmlx.server.request_queue import Delta, FinishReason, GenerationRequest, RequestQueue
from testbed.jobs import patience

VOCABULARY = 128
MODEL = "parrot"
KEY = "sesame"
MOST_TOKENS = 1000
OF_MODEL = ("max_tokens", "sampling", "complaint", "adapter")
END = "."
"""The last token of a sequence."""


LOOK: Any = {
    "name": "look",
    "description": "Look at something",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
"""A tool, as templates and OpenAI's APIs have it."""

CALL = '<think>Hm</think>I look<tool_call>{"name": "look", "arguments": {"at": "sea"}}</tool_call>.'
"""A prompt, and so an answer, with a thought, a text and a call."""


class Letters(PromptEncoder):
    """An encoder of prompts to whom a character is a token. A chat is its last message."""

    def __init__(self) -> None:
        """It has no tokenizer."""

    def text(self, prompt: str) -> tuple[int, ...]:
        if not prompt:
            raise UserError("the prompt has no tokens: give a longer text")
        return tuple(map(ord, prompt))

    def answer(self, text: str) -> tuple[int, ...]:
        return self.text(text)

    answer_format = AnswerFormat()
    vocabulary = VOCABULARY

    def opens_thought(self, tokens: Sequence[int]) -> bool:
        return False

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] = (), **arguments: Any
    ) -> tuple[int, ...]:
        if messages[0]["role"] == "assistant":
            raise UserError("the chat template does not take it: begin with a user")
        return self.text(arguments.get("instead", messages[-1]["content"]))

    def untokenized(self, *tokens: int) -> str:
        return "".join(map(chr, tokens))


class Agent(Letters):
    """An encoder for a model with thoughts and tools, which keeps what it was given."""

    answer_format = AnswerFormat(
        Marks("<think>", "</think>"),
        Marks("<tool_call>", "</tool_call>"),
        lambda text, tools: json.loads(text),
        json_calls(Marks("<tool_call>", "</tool_call>")),
    )

    def __init__(self) -> None:
        self.messages: list[Mapping[str, Any]] = []
        self.tools: Sequence[Tool] = ()
        self.goes_on = False

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] = (), **arguments: Any
    ) -> tuple[int, ...]:
        self.messages, self.tools = list(messages), tools
        self.goes_on = arguments.pop("continue_final_message", False)
        return super().chat(messages, **arguments)

    def opens_thought(self, tokens: Sequence[int]) -> bool:
        return chr(tokens[0]) == "~"


@dataclass
class Text:
    request: GenerationRequest
    parser: AnswerParser
    generated: int = 0


@dataclass
class Parrot:
    """A generator that repeats each prompt until it is told to stop, a token of each of ``at_once``
    texts a step, while it ``goes_on``; after ``steps`` it does not. A step ends when ``lasts`` is
    set. Of three drafts two are right."""

    at_once: int = 64
    steps: int | None = None
    goes_on: threading.Event = field(default_factory=threading.Event)
    fails: str | None = None
    lasts: threading.Event | None = None
    texts: dict[int, Text] = field(default_factory=dict)
    added: list[GenerationRequest] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    kept_tokens: int = 7

    def __post_init__(self) -> None:
        self.goes_on.set()

    def add(self, number: int, request: GenerationRequest) -> None:
        assert number not in self.texts
        self.threads.add(threading.get_ident())
        self.texts[number] = Text(request, AnswerParser(request.syntax, request.stop))
        self.added.append(request)

    def cancel(self, number: int) -> None:
        del self.texts[number]
        self.cancelled.append(number)

    def step(self) -> Sequence[tuple[int, Delta]]:
        if self.fails is not None:
            raise RuntimeError(self.fails)
        if self.is_idle:
            return []
        if self.lasts is not None:
            self.lasts.wait(30)
        if not self.goes_on.is_set():
            time.sleep(0.002)
            return []
        under_way = list(self.texts)[: self.at_once]
        deltas = [(number, self._next(self.texts[number])) for number in under_way]
        if self.steps is not None:  # at 0, it has made them, and stands still
            if self.steps == 1:
                self.goes_on.clear()
            self.steps -= 1
        for number, delta in deltas:
            if delta.finish_reason is not None:
                del self.texts[number]
        return deltas

    @property
    def is_idle(self) -> bool:
        return not self.texts

    def _next(self, text: Text) -> Delta:
        request = text.request
        token = request.tokens[text.generated % len(request.tokens)]
        text.generated += 1
        cached, rounds = len(request.tokens) // 2, text.generated // 3
        drafts = DraftCounts(rounds, 3 * rounds, 2 * rounds)
        if chr(token) == END:
            parts = tuple(text.parser.take("", is_last=True))
            return Delta(parts, (), text.generated, cached, "stop", drafts=drafts)
        most = request.sampling.logprobs
        sampled = SampledToken(token)
        if most is not None:
            top = tuple((token + place, -0.5 - place) for place in range(most))
            sampled = SampledToken(token, -0.5, top)
        reason: FinishReason | None = "length" if text.generated == request.max_tokens else None
        begins = text.parser.characters
        parts = tuple(text.parser.take(chr(token), is_last=reason is not None))
        if (stop := text.parser.stop) is not None:
            reason = "stop"
        return Delta(parts, (sampled,), text.generated, cached, reason, stop, drafts, begins)


@dataclass
class Serving:
    address: str
    service: RequestQueue
    parrot: Parrot
    server: HttpServer

    @property
    def port(self) -> int:
        return int(self.address.rsplit(":", 1)[1])

    def until(self, condition: Any) -> None:
        deadline = time.monotonic() + patience(30)
        while not condition():
            assert time.monotonic() < deadline, "it does not happen"
            time.sleep(0.002)


@contextmanager
def serving(
    *,
    most_open: int = 64,
    parrot: Parrot | None = None,
    encoder: Letters | None = None,
    unavailable_reason: Callable[[], str | None] = lambda: None,
    **options: Any,
) -> Iterator[Serving]:
    """Serve as the command does: the service on one thread, the server on another."""
    parrot = parrot or Parrot()
    service = RequestQueue(most_open, unavailable_reason)
    listener = bind("127.0.0.1", 0)
    of_model = {name: options.pop(name) for name in OF_MODEL if name in options}
    served = ServedModel(
        names=ModelNames((MODEL,)),
        encoder=encoder or Letters(),
        most_tokens=MOST_TOKENS,
        most_requests=most_open,
        **of_model,
    )
    options = {"hosts": trusted_hosts(listener), **options}
    app = make_app(service, served, **options)

    def generate() -> None:
        with suppress(RuntimeError):
            service.run(parrot)

    generating = threading.Thread(target=generate)
    server = HttpServer(app, listener, no_http=NO_HTTP)
    generating.start()
    server.start()
    try:
        yield Serving(server.address, service, parrot, server)
    finally:
        service.close(0)
        generating.join()
        server.stop(5)
