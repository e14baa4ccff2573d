"""Hand requests from the server's event loop to the thread that generates, and answers back.

No MLX, no MPI: the ``Generator`` is called only on the thread of ``RequestQueue.run``.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from shardmlx.errors import one_line
from shardmlx.inference.detokenize import FinishReason as FinishReason
from shardmlx.inference.drafts import NO_DRAFTS, DraftCounts
from shardmlx.inference.sampling_params import SampledToken, SamplingParams
from shardmlx.server.answer_parser import AnswerSyntax
from shardmlx.server.answer_parts import AnswerPart
from shardmlx.server.openai_errors import ApiError

SOON: Mapping[str, str] = {"retry-after": "2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request for an answer, which ends before any of the ``stop`` strings: with a ``syntax``,
    of those in what is said. If it ``continues`` its prompt, it may begin with a space."""

    tokens: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    syntax: AnswerSyntax | None = None
    continues: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """A part of an answer: what the ``sampled`` tokens, and one that may have ended it, add.

    There are no ``parts`` while a character, a mark or a stop string may be incomplete.
    ``generated`` counts all tokens of the answer so far; ``cached`` those of its prompt that came
    from the prefix cache. ``stop`` is the stop string that ended it, ``drafts`` are all so far.
    The text of the sampled tokens begins at character ``begins`` of the answer's.
    """

    parts: tuple[AnswerPart, ...]
    sampled: tuple[SampledToken, ...]
    generated: int
    cached: int = 0
    finish_reason: FinishReason | None = None
    stop: str | None = None
    drafts: DraftCounts = NO_DRAFTS
    begins: int = 0


class QueueFull(ApiError):
    """An error: so much waits that nothing further is taken."""

    def __init__(self, message: str) -> None:
        super().__init__(429, message, code="queue_full", headers=SOON)


class ServiceEnded(ApiError):
    """An error: nothing is generated any more. ``launch`` restarts a server within 10 s."""

    def __init__(self, reason: str) -> None:
        message = f"no text is generated any more: {reason}"
        super().__init__(503, message, code="service_ended", headers={"retry-after": "10"})


class Generator(Protocol):
    """A generator of answers, a token at a time: a ``PipelineGenerator``. It is idle between
    answers: a step is then a sign of life to other ranks."""

    def add(self, number: int, request: GenerationRequest) -> None:
        """Begin the answer ``number``."""

    def cancel(self, number: int) -> None:
        """Give up an answer that has not ended."""

    def step(self) -> Sequence[tuple[int, Delta]]:
        """Generate further, and return the deltas that have come, by number."""

    @property
    def is_idle(self) -> bool:
        """True while no answer is under way."""

    @property
    def kept_tokens(self) -> int:
        """Tokens in the prefix cache."""


SECONDS_TOGETHER = 0.01
"""Seconds in which the deltas that come are told together. A fast model makes several: each alone
would wake the event loop, and cost a packet."""


MOST_TOGETHER = 32
"""Deltas that are told together at most: a slow reader is told no more before it reads these."""


@dataclass(frozen=True, slots=True)
class MadeDelta:
    """A delta of the answer ``index``, and the time at which it was made."""

    index: int
    delta: Delta
    at: float


class PendingAnswers:
    """The answers to requests that were submitted together, for the event loop that did so."""

    def __init__(self, queue: RequestQueue, numbers: range) -> None:
        self._queue = queue
        self._numbers = numbers
        self._loop = asyncio.get_running_loop()
        self._news: deque[MadeDelta | ServiceEnded] = deque()
        self._have_come = asyncio.Event()
        self._is_told = False

    def cancel(self) -> None:
        """Give up the answers that have not ended: their client has gone."""
        self._queue._cancel(self._numbers)

    async def news(self, silence: float) -> AsyncIterator[list[MadeDelta]]:
        """Yield the deltas that have come, until all answers have ended: the first at once, later
        ones together; none after so many seconds of ``silence``. Raises ``ServiceEnded``."""
        left = len(self._numbers)
        while left:
            try:
                async with asyncio.timeout(silence):
                    await self._have_come.wait()
            except TimeoutError:
                yield []
                continue
            come, ended = self._taken()
            if come:
                left -= sum(each.delta.finish_reason is not None for each in come)
                yield come
            if ended is not None and left:
                raise ended
            if left:
                # Others have a turn in any case, also while much waits for a slow reader.
                await asyncio.sleep(0 if self._news else SECONDS_TOGETHER)

    def _taken(self) -> tuple[list[MadeDelta], ServiceEnded | None]:
        """Take what has come, or the first of it, up to an end of the service, which is returned
        too."""
        self._have_come.clear()
        self._is_told = False  # first: what comes from now on is told again
        come: list[MadeDelta] = []
        while self._news and len(come) < MOST_TOGETHER:
            each = self._news.popleft()
            if isinstance(each, ServiceEnded):
                return come, each
            come.append(each)
        if self._news:
            self._have_come.set()
        return come, None

    def put(self, number: int, news: Delta | ServiceEnded) -> None:
        """Pass on a delta of an answer, or why no more comes. Called on any thread."""
        if isinstance(news, ServiceEnded):
            self._news.append(news)
        else:
            self._news.append(MadeDelta(number - self._numbers.start, news, time.monotonic()))
        if not self._is_told:
            self._is_told = True
            with suppress(RuntimeError):  # the loop is closed: nobody reads it
                self._loop.call_soon_threadsafe(self._have_come.set)


SECONDS_IDLE = 1.0
"""Seconds between two calls of ``Generator.step`` while nothing is generated."""


class RequestQueue:
    """The open requests: at most ``most_open`` at a time, and no new ones while there is an
    ``unavailable_reason``, which is asked for on any thread."""

    def __init__(
        self, most_open: int, unavailable_reason: Callable[[], str | None] = lambda: None
    ) -> None:
        self.most_open = most_open
        self._unavailable_reason = unavailable_reason
        self._changed = threading.Condition()
        # Requests, and None for one that is cancelled, since the generating thread last looked.
        self._news: list[tuple[int, GenerationRequest | None]] = []
        self._open: dict[int, PendingAnswers] = {}
        self._waiting: set[int] = set()
        self._next = 0
        self.ended: str | None = None
        """The reason why no more requests are taken; None while they are."""
        self._deadline: float | None = None
        self.on_news: Callable[[], None] = lambda: None
        """Called on any thread when there is something to take, for who waits for other things
        too."""
        self.kept_tokens = 0
        """Tokens in the prefix cache, after the last step."""
        self._looked: float | None = None

    # On the event loop of the server.

    def submit(self, requests: Sequence[GenerationRequest]) -> PendingAnswers:
        """Take in all of these requests, or none. Raises ``ApiError``."""
        if self.ended is None and (reason := self._unavailable_reason()) is not None:
            raise ApiError(503, f"no text is generated: {reason}", code="no_answer", headers=SOON)
        with self._changed:
            if self.ended is not None:
                raise ServiceEnded(self.ended)
            if len(self._open) + len(requests) > self.most_open:
                raise QueueFull(f"{len(self._open)} requests are open already: try again later")
            numbers = range(self._next, self._next + len(requests))
            self._next = numbers.stop
            answers = PendingAnswers(self, numbers)
            self._open |= dict.fromkeys(numbers, answers)
            self._waiting.update(numbers)
            self._news += zip(numbers, requests, strict=True)
            self._changed.notify()
        self.on_news()
        return answers

    @property
    def unavailable_reason(self) -> str | None:
        """The reason why requests are refused: for good if they have ``ended``; None if none is."""
        return self._unavailable_reason() if self.ended is None else self.ended

    @property
    def stalled(self) -> float:
        """Seconds for which the last step has lasted."""
        return 0.0 if self._looked is None else time.monotonic() - self._looked

    @property
    def load(self) -> tuple[int, int]:
        """The number of requests under way, and of those that wait for their turn."""
        with self._changed:
            return len(self._open) - len(self._waiting), len(self._waiting)

    def close(self, seconds: float) -> None:
        """Take no more requests, and have ``run`` return once the open ones have ended, or after
        ``seconds``. Called on any thread."""
        with self._changed:
            if self.ended is None:
                self.ended = "the server is stopping"
            self._deadline = min(self._deadline or float("inf"), time.monotonic() + seconds)
            self._changed.notify()

    def fail(self, reason: str) -> None:
        """End all open requests at once; ``run`` returns soon after. Called on any thread."""
        with self._changed:
            self.ended = reason
            self._deadline = time.monotonic()
            left, self._open = self._open, {}
            self._waiting.clear()
            self._changed.notify()
        for number, answers in left.items():
            answers.put(number, ServiceEnded(reason))

    def _cancel(self, numbers: range) -> None:
        with self._changed:
            self._news += [(number, None) for number in numbers if number in self._open]
            self._changed.notify()
        self.on_news()

    # On the thread that generates.

    def run(self, generator: Generator) -> None:
        """Generate until ``close`` or ``fail``. An error ends all open requests, and is raised."""
        try:
            while self.turn(generator):
                pass
        except BaseException as error:
            self.fail(one_line(error))
            raise
        self.fail(self.ended or "the server is stopping")

    def turn(self, generator: Generator) -> bool:
        """Give the generator what has come, and let it do a step. Return False once no more is to
        do, after ``close`` or ``fail``."""
        news = self._take(generator.is_idle)
        if news is None:
            return False
        for number, request in news:
            if request is not None:
                generator.add(number, request)
            elif self._close(number):
                generator.cancel(number)
        self.pass_on(generator.step())
        self.kept_tokens = generator.kept_tokens
        return True

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
        with self._changed:
            self._waiting.discard(number)
            return self._open.pop(number, None) is not None

    def pass_on(self, deltas: Sequence[tuple[int, Delta]]) -> None:
        """Tell clients what has come of their answers, by number."""
        for number, delta in deltas:
            with self._changed:
                self._waiting.discard(number)
                answers = self._open.get(number)
                if delta.finish_reason is not None:
                    self._open.pop(number, None)
            if answers is not None:
                answers.put(number, delta)
