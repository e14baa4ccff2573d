"""Hand requests from the server's event loop to the thread that generates, and answers back.

No MLX, no MPI: the ``Generator`` is called only on the thread of ``RequestQueue.run``.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shardmlx.errors import one_line
from shardmlx.inference.detokenize import FinishReason as FinishReason
from shardmlx.inference.sampling_params import SampledToken, SamplingParams
from shardmlx.server.answer_parts import AnswerSyntax


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request to generate at most ``max_tokens`` after the prompt's ``tokens``.

    The text ends before any of the ``stop`` strings; in an answer with a ``syntax``, only those in
    what is said count. If it ``continues`` the text of its prompt, it may begin with a space.
    """

    tokens: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    syntax: AnswerSyntax | None = None
    continues: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer: what one or more further tokens have added to it.

    ``text`` is empty while a character, or what may become a stop string, is incomplete.
    ``sampled`` are the tokens, except one that ended the answer. ``generated`` counts all tokens of
    the answer so far; ``cached`` those of its prompt that came from the prefix cache. ``stop`` is
    the stop string that ended it.
    """

    text: str
    sampled: tuple[SampledToken, ...]
    generated: int
    cached: int = 0
    finish_reason: FinishReason | None = None
    stop: str | None = None


class QueueFull(Exception):
    """An error: so many requests wait that no further one is taken."""


class ServiceEnded(Exception):
    """An error: nothing is generated any more. The message says why."""


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """The number of requests under way and waiting, and of tokens in the prefix cache."""

    under_way: int = 0
    waiting: int = 0
    kept_tokens: int = 0


class Generator(Protocol):
    """A generator of answers, a token at a time."""

    def add(self, number: int, request: GenerationRequest) -> None:
        """Begin to answer a request; ``number`` is one that no other has had."""

    def cancel(self, number: int) -> None:
        """Give up an answer that has not ended."""

    def step(self) -> Sequence[tuple[int, Piece]]:
        """Do what is to be done next, and return the pieces that have come, by number. A piece with
        a ``finish_reason`` is the last of its answer."""

    @property
    def is_idle(self) -> bool:
        """True while no answer is under way."""

    @property
    def kept_tokens(self) -> int:
        """Tokens in the prefix cache."""

    def keep_alive(self) -> None:
        """Tell other ranks, while nothing is generated, that this one lives. Raises if one is
        lost."""


class Answer:
    """The pieces of one answer, for the event loop that asked for it.

    Iteration ends after the piece with a ``finish_reason``; it raises ``ServiceEnded`` if that will
    never come.
    """

    def __init__(self, queue: RequestQueue, number: int) -> None:
        self._queue = queue
        self._number = number
        self.has_begun = False
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece | ServiceEnded] = asyncio.Queue()

    def cancel(self) -> None:
        """Give up the answer: its client has gone. No effect on one that has ended."""
        self._queue._cancel(self._number)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while True:
            piece = await self._pieces.get()
            if isinstance(piece, ServiceEnded):
                raise piece
            yield piece
            if piece.finish_reason is not None:
                return

    def put(self, piece: Piece | ServiceEnded) -> None:
        """Pass a piece to the event loop. Called on the thread that generates."""
        try:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)
        except RuntimeError:
            return  # the loop is closed: nobody reads it


SECONDS_IDLE = 1.0
"""Seconds between two calls of ``Generator.keep_alive``."""


class RequestQueue:
    """The open requests: at most ``most_open`` at a time."""

    def __init__(self, most_open: int) -> None:
        self.most_open = most_open
        self._changed = threading.Condition()
        # Requests, and None for one that is cancelled, since the generating thread last looked.
        self._news: list[tuple[int, GenerationRequest | None]] = []
        self._open: dict[int, Answer] = {}
        self._next = 0
        self._ended: str | None = None
        self._deadline: float | None = None
        self._kept_tokens = 0
        self._looked: float | None = None

    # On the event loop of the server.

    def submit(self, request: GenerationRequest) -> Answer:
        """Take in a request. Raises ``QueueFull`` or ``ServiceEnded``."""
        with self._changed:
            if self._ended is not None:
                raise ServiceEnded(self._ended)
            if len(self._open) >= self.most_open:
                raise QueueFull(f"{len(self._open)} requests are open already: try again later")
            number = self._next
            self._next += 1
            answer = Answer(self, number)
            self._open[number] = answer
            self._news.append((number, request))
            self._changed.notify()
        return answer

    @property
    def ended(self) -> str | None:
        """The reason why no more requests are taken; None while they are."""
        return self._ended

    @property
    def stalled(self) -> float:
        """Seconds for which the last step has lasted."""
        return 0.0 if self._looked is None else time.monotonic() - self._looked

    def load(self) -> QueueLoad:
        """Return how much there is to do at this moment."""
        with self._changed:
            under_way = sum(each.has_begun for each in self._open.values())
            return QueueLoad(under_way, len(self._open) - under_way, self._kept_tokens)

    def close(self, seconds: float) -> None:
        """Take no more requests, and have ``run`` return once the open ones have ended, or after
        ``seconds``. May be called on any thread."""
        with self._changed:
            if self._ended is None:
                self._ended = "the server is stopping"
            self._deadline = min(self._deadline or float("inf"), time.monotonic() + seconds)
            self._changed.notify()

    def fail(self, reason: str) -> None:
        """End all open requests at once; ``run`` returns soon after. May be called on any
        thread."""
        with self._changed:
            self._ended = reason
            self._deadline = time.monotonic()
            left, self._open = self._open, {}
            self._changed.notify()
        for answer in left.values():
            answer.put(ServiceEnded(reason))

    def _cancel(self, number: int) -> None:
        with self._changed:
            if number in self._open:
                self._news.append((number, None))
                self._changed.notify()

    # On the thread that generates.

    def run(self, generator: Generator) -> None:
        """Generate until ``close`` or ``fail``. An error of the generator ends all open requests,
        and is raised again."""
        try:
            while (news := self._take(generator.is_idle)) is not None:
                for number, request in news:
                    if request is not None:
                        generator.add(number, request)
                    elif self._close(number):
                        generator.cancel(number)
                if generator.is_idle:
                    generator.keep_alive()
                else:
                    self._pass_on(generator.step())
                self._kept_tokens = generator.kept_tokens
        except BaseException as error:
            self.fail(one_line(error))
            raise
        self.fail(self._ended or "the server is stopping")

    def _take(self, is_idle: bool) -> list[tuple[int, GenerationRequest | None]] | None:
        """Return the news; None at the end. Waits a while if there is nothing to do."""
        self._looked = time.monotonic()
        with self._changed:
            if is_idle and not self._news and self._deadline is None:
                self._changed.wait(SECONDS_IDLE)
            if self._deadline is not None and (not self._open or time.monotonic() > self._deadline):
                return None
            news, self._news = self._news, []
            return news

    def _close(self, number: int) -> bool:
        """Close a request, and return whether it was still open."""
        with self._changed:
            return self._open.pop(number, None) is not None

    def _pass_on(self, pieces: Sequence[tuple[int, Piece]]) -> None:
        for number, piece in pieces:
            with self._changed:
                answer = self._open.get(number)
                if answer is None:
                    continue
                answer.has_begun = True
                if piece.finish_reason is not None:
                    del self._open[number]
            answer.put(piece)
