"""The first rank of a server: requests come in over HTTP, and go through the pipeline."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import socket

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from starlette.routing import BaseRoute

from shardmlx.common.environment import signal_name
from shardmlx.common.http_listener import trusted_hosts
from shardmlx.common.reporter import Reporter
from shardmlx.common.uvicorn_thread import HttpServer
from shardmlx.config.options import split_names
from shardmlx.config.serve import KEY_VARIABLE, ServeConfig
from shardmlx.distributed.transport import Transport
from shardmlx.errors import Stopped, one_line
from shardmlx.inference.detokenize import IncrementalDetokenizer
from shardmlx.inference.drafts import DraftCounts
from shardmlx.inference.pipeline import FirstStage
from shardmlx.inference.prompts import PromptEncoder
from shardmlx.inference.sampling_params import BROKEN, SampledToken, SamplingParams
from shardmlx.server.answer_parser import AnswerParser
from shardmlx.server.answer_parts import AnswerPart
from shardmlx.server.app import make_app
from shardmlx.server.chat_request import ServedModel
from shardmlx.server.metrics import Metrics
from shardmlx.server.model_names import names_of
from shardmlx.server.openai_errors import NO_HTTP
from shardmlx.server.request_queue import Delta, GenerationRequest, RequestQueue

SECONDS_TO_TELL = 0.15  # for the server to tell its clients why the job ends
SECONDS_TO_SEND = 5.0  # for clients to take what is left for them
SECONDS_OF_A_STEP = 25.0  # to wait for another rank before no new requests are taken


@dataclass
class TextInMaking:
    """An answer for a client of this server, token by token."""

    answer: IncrementalDetokenizer
    parser: AnswerParser

    @classmethod
    def of(cls, request: GenerationRequest, tokenizer: TokenizerWrapper) -> TextInMaking:
        """Return the answer to a request before its first token."""
        before = request.tokens if request.continues else ()
        answer = IncrementalDetokenizer.of(tokenizer, request.max_tokens, None, before)
        return cls(answer, AnswerParser(request.syntax, request.stop))

    def take(self, sampled: SampledToken, cached: int, drafts: DraftCounts) -> Delta:
        """Take in a token, and return what it adds."""
        answer, parser = self.answer, self.parser
        begins = parser.characters
        parts: tuple[AnswerPart, ...] = ()
        try:
            text = answer.take(sampled.token)
            parts = tuple(parser.take(text, is_last=answer.finish_reason is not None))
            if parser.stop is not None:
                answer.finish_reason = "stop"
        except Exception:  # a fault in reading one answer ends that one alone
            traceback.print_exc()
            answer.finish_reason = "error"
        is_end = sampled.token == BROKEN or sampled.token in answer.eos
        told = () if is_end else (sampled,)
        reason = answer.finish_reason
        return Delta(parts, told, answer.count, cached, reason, parser.stop, drafts, begins)


@dataclass
class PipelineGenerator:
    """The generator of a ``RequestQueue``; ``check_signals`` is called between any two steps."""

    tokenizer: TokenizerWrapper
    first_stage: FirstStage
    check_signals: Callable[[], None]
    _texts: dict[int, TextInMaking] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        """True while no answer is under way."""
        return self.first_stage.is_idle

    @property
    def kept_tokens(self) -> int:
        """Tokens in the prefix cache."""
        return self.first_stage.kept_tokens

    def add(self, number: int, request: GenerationRequest) -> None:
        """Begin the answer ``number``."""
        context = len(request.tokens) + request.max_tokens
        self.first_stage.add(number, request.tokens, request.sampling, context)
        self._texts[number] = TextInMaking.of(request, self.tokenizer)

    def cancel(self, number: int) -> None:
        """Give up an answer that has not ended."""
        del self._texts[number]
        self.first_stage.cancel(number)

    def step(self) -> Sequence[tuple[int, Delta]]:
        """Do the pipeline's next step, and return the deltas that have come, by number."""
        self.check_signals()
        if self.is_idle:
            self.first_stage.keep_alive()
            return []
        deltas = []
        for number, sampled in self.first_stage.step():
            cached = self.first_stage.cached(number)
            drafts = self.first_stage.drafts(number)
            delta = self._texts[number].take(sampled, cached, drafts)
            if delta.finish_reason is not None:
                del self._texts[number]
                self.first_stage.finish(number)
            deltas.append((number, delta))
        return deltas


def key_of(config: ServeConfig) -> str | None:
    """Return the key that requests need, if they need one."""
    return config.api_key or os.environ.get(KEY_VARIABLE) or None


Generate = Callable[[RequestQueue, Callable[[], None]], None]
"""Function that generates what a queue asks for until it is closed; it calls the other argument,
which looks for signals, between any two steps."""


@dataclass
class RequestServer:
    """The server on the first rank: HTTP on a thread of its own, the ranks' commands on this one.

    A prompt and its answer have ``most_tokens`` together at most; ``complaint`` says what is wrong
    with a grammar, if answers may keep to one. ``tell_others`` tells clients of another API why
    this process is about to end, on any thread.
    """

    config: ServeConfig
    transport: Transport
    reporter: Reporter
    encoder: PromptEncoder
    sampling: SamplingParams
    most_tokens: int
    complaint: Callable[[str], str] | None = None
    tell_others: Callable[[str], None] = lambda reason: None

    def __post_init__(self) -> None:
        self.names = names_of(
            self.config.source.model,
            self.config.served_model_name,
            any_name=self.config.any_model_name,
        )
        most_open = self.config.batch_size + self.config.max_queue
        self._queue = RequestQueue(most_open, self._unavailable_reason)
        self._http_error: BaseException | None = None
        self.stopped_by: int | None = None
        """The signal that asked it to stop, if one did."""

    def run(
        self,
        listeners: Sequence[socket],
        generate: Generate,
        other_routes: Sequence[BaseRoute] = (),
    ) -> None:
        """Serve until a signal comes, or the ranks or the HTTP server fail, which is raised."""
        config = self.config
        queue = self._queue
        key = key_of(config)
        names = self.names
        served = ServedModel(
            names=names,
            # Its path is shown to nobody.
            adapter=None
            if config.adapter_path is None
            else Path(config.adapter_path).resolve().name,
            encoder=replace(self.encoder, most_tokens=self.most_tokens),
            most_tokens=self.most_tokens,
            most_requests=queue.most_open,
            max_tokens=config.max_tokens,
            sampling=self.sampling,
            complaint=self.complaint,
        )
        app = make_app(
            queue,
            served,
            api_key=key,
            hosts=trusted_hosts(listeners[0], split_names(config.allow_host)),
            origins=split_names(config.allow_origin),
            max_body_bytes=config.max_body,
            metrics=Metrics(queue, mx.get_peak_memory),
            other_routes=other_routes,
        )
        server = HttpServer(
            app, *listeners, no_http=NO_HTTP, access_log=config.access_log, on_end=self._http_ended
        )
        if trusted_hosts(listeners[0]) is None and key is None:
            self.reporter.warn(
                f"everyone who reaches {server.address} may use it: set --api-key or "
                f"${KEY_VARIABLE}"
            )
        self._check_signals()  # from now on a signal lets open requests come to their end
        server.start()
        self.transport.on_abort = self._tell_clients
        self.reporter.say(f"Serving {names.first} at {server.address}")
        if (command := self.transport.stop_command()) is not None:
            self.reporter.say(f"To stop it in order: {command}")
        try:
            generate(queue, self._check_signals)
        finally:
            self.transport.on_abort = lambda text: None
            server.stop(SECONDS_TO_SEND)
        if self._http_error is not None:
            raise RuntimeError(f"the HTTP server ended: {one_line(self._http_error)}")

    def end(self) -> None:
        """Raise ``Stopped`` if it was stopped because its terminal was closed."""
        if self.stopped_by == signal.SIGHUP:
            # Nobody asked it to end.
            raise Stopped(signal.SIGHUP, "stopped by SIGHUP: its terminal was closed")

    def _check_signals(self) -> None:
        """Begin to stop if a signal has come. Called between two steps."""
        number = self.transport.stop_requested()
        if number is None or self._queue.ended is not None:
            return
        self.stopped_by = number
        name = signal_name(number)
        grace = self.config.grace
        if number != signal.SIGUSR1 and self.transport.stop_command() is not None:
            # mpirun kills at once after the others.
            self._queue.fail(f"interrupted by {name}")
            return
        self.reporter.say(f"Stopping after {name}: open requests have {grace:g} s")
        self._queue.close(grace)

    def _unavailable_reason(self) -> str | None:
        """Return which rank does not answer, if one does not. Called on any thread."""
        seconds = self._queue.stalled
        activity = self.transport.activity
        quiet = self.transport.quiet_rank()
        if quiet is None and seconds > SECONDS_OF_A_STEP and activity.is_waiting:
            return f"{activity.where()}: nothing has come for {seconds:.0f} s"
        return quiet

    def _http_ended(self, error: BaseException | None) -> None:
        """Close the queue. Called on the thread of the HTTP server."""
        self._http_error = error
        self._queue.close(0.0)

    def _tell_clients(self, reason: str) -> None:
        """Tell all clients why this process is about to be ended. Called on any thread."""
        self._queue.fail(reason)
        self.tell_others(reason)
        time.sleep(SECONDS_TO_TELL)
