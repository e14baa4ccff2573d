"""The endpoints that sample, from the base or from snapshots of LoRAs. No MLX, no MPI."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from tinker import types
from tinker.types.create_sampling_session_request import CreateSamplingSessionRequest
from tinker.types.create_sampling_session_response import CreateSamplingSessionResponse
from tinker.types.future_completion import FutureCompletion, FutureFailed, FutureFinished
from tinker.types.futures_retrieve_request import FuturesRetrieveRequest
from tinker.types.futures_retrieve_response import FuturesRetrieveResponse
from tinker.types.join_sampling_session_request import JoinSamplingSessionRequest
from tinker.types.join_sampling_session_response import JoinSamplingSessionResponse

from shardmlx.api.requests import SamplePrompt, SampleResult
from shardmlx.errors import UserError
from shardmlx.server.openai_errors import ApiError
from shardmlx.server.tinker.answers import sample_answer
from shardmlx.server.tinker.checkpoints import path_of, state_of
from shardmlx.server.tinker.desk import MOST_OPEN, Desk, future_response, json_response
from shardmlx.server.tinker.promises import Promise
from shardmlx.server.tinker.reading import prompt_of
from shardmlx.server.tinker.sessions import HeldSnapshot, SamplingSession, StartedAnew

SECONDS_OF_POLL = 30.0
"""Seconds for which a question waits for an answer. The SDK gives up after 45."""

NUMBERS_OF_CLONE = 1_000_000_000
"""The SDK numbers the requests of each clone of a sampling client from a multiple of it."""

ALL_ENDED = 1 << 50
"""Cursor of a client that was told that all its requests of an earlier start have ended."""


class SamplingRoutes:
    """The endpoints of clients that sample."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    @property
    def routes(self) -> list[BaseRoute]:
        """The paths that are answered."""
        answers: dict[str, Callable[[HttpRequest], Awaitable[Response]]] = {
            "create_sampling_session": self._create,
            "join_sampling_session": self._join,
            "asample": self._sample,
            "retrieve_futures": self._completions,
        }
        posts = [
            Route(f"/api/v1/{path}", answer, methods=["POST"]) for path, answer in answers.items()
        ]
        return [*posts, Route("/api/v1/samplers/{name}", self._describe)]

    async def _create(self, request: HttpRequest) -> Response:
        asked, _ = await self._desk.read(request, CreateSamplingSessionRequest)
        registry = self._desk.registry
        registry.session(asked.session_id)
        name = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        if name not in registry.samplers:  # a repeated request has the sampler of the first
            try:
                base, snapshot = await self._source(asked.base_model, asked.model_path)
            except (UserError, StartedAnew) as error:
                raise ApiError(404, str(error)) from None
            registry.samplers.setdefault(
                name, SamplingSession(name, asked.session_id, base, snapshot)
            )
        return json_response(CreateSamplingSessionResponse(sampling_session_id=name))

    async def _source(self, base: str | None, path: str | None) -> tuple[str, HeldSnapshot | None]:
        """Return the base's name, and the snapshot of the saved state at ``path``, in memory.
        Raises ``UserError``."""
        name = self._desk.check_base(base)
        if path is None:
            if base is None:
                raise UserError("there is neither base_model nor model_path", "give one of them")
            return name, None
        saved = await self._desk.saved(state_of(path))
        # A state that is saved anew under the same name is another one.
        key = f"{path}, saved at {saved.saved_at!r}"
        snapshot = HeldSnapshot(key, saved.state, saved.saved_at)
        snapshot = self._desk.registry.snapshots.setdefault(key, snapshot)
        await self._desk.load(snapshot)
        return name, snapshot

    async def _join(self, request: HttpRequest) -> Response:
        asked, _ = await self._desk.read(request, JoinSamplingSessionRequest)
        sampler = self._sampler(asked.sampling_session_id)
        sampler.clones += 1
        return json_response(JoinSamplingSessionResponse(client_counter=sampler.clones))

    def _sampler(self, name: str) -> SamplingSession:
        try:
            return self._desk.registry.sampler(name)
        except UserError as error:
            raise ApiError(404, str(error)) from None
        except StartedAnew as error:
            raise ApiError(410, str(error), code="started_anew") from None

    async def _describe(self, request: HttpRequest) -> Response:
        sampler = self._sampler(request.path_params["name"])
        state = None if sampler.snapshot is None else sampler.snapshot.state
        return json_response(
            types.GetSamplerResponse(
                sampler_id=sampler.name,
                base_model=sampler.base_model,
                model_path=None if state is None else path_of(state),
            )
        )

    async def _sample(self, request: HttpRequest) -> Response:
        asked, digest = await self._desk.read(request, types.SampleRequest)
        if asked.sampling_session_id is None:
            return await self._sample_once(asked, digest)
        sampler = self._sampler(asked.sampling_session_id)
        if asked.seq_id is None:
            raise ApiError(400, "a sample with sampling_session_id needs a seq_id: number them")
        clone = asked.seq_id // NUMBERS_OF_CLONE
        promise = self._desk.promise(
            f"{sampler.name}:{asked.seq_id}",
            sampler.session,
            digest,
            partial(self._begin, asked, sampler.snapshot),
            partial(sample_answer, asked),
            lambda promise: sampler.complete(clone, promise.request_id),
            is_sample=True,
        )
        return _sample_response(promise, asked)

    async def _sample_once(self, asked: types.SampleRequest, digest: bytes) -> Response:
        """Answer with the future of a sample that has no session, but names its weights."""
        try:
            _, snapshot = await self._source(asked.base_model, asked.model_path)
        except (UserError, StartedAnew) as error:
            raise ApiError(404, str(error)) from None
        promise = self._desk.promise(
            f"sample:{secrets.token_hex(8)}",
            "",
            digest,
            partial(self._begin, asked, snapshot),
            partial(sample_answer, asked),
        )
        return _sample_response(promise, asked)

    def _begin(
        self, asked: types.SampleRequest, snapshot: HeldSnapshot | None
    ) -> Awaitable[SampleResult]:
        name = None if snapshot is None else snapshot.name
        prompt = prompt_of(asked, name, self._desk.most_tokens)
        return self._desk.submit(prompt) if snapshot is None else self._from(snapshot, prompt)

    async def _from(self, snapshot: HeldSnapshot, prompt: SamplePrompt) -> SampleResult:
        snapshot.samples += 1
        try:
            await self._desk.load(snapshot)
            result: SampleResult = await self._desk.submit(prompt)
            return result
        finally:
            snapshot.samples -= 1
            snapshot.last_used = time.monotonic()

    async def _completions(self, request: HttpRequest) -> Response:
        """Answer with the requests of a sampler that have ended since the last question."""
        asked, _ = await self._desk.read(request, FuturesRetrieveRequest)
        name = asked.target.sampling_session_id
        if self._desk.registry.is_earlier(name) and asked.prev_cursor < ALL_ENDED:
            return self._ended_earlier(asked)
        sampler = self._sampler(name)
        self._desk.registry.hear(sampler.session)
        for request_id in asked.retrieved_request_ids:
            self._desk.promises.forget(request_id)
        completions = sampler.completions[asked.target.cloned_sampler_id]
        ended = completions.after(asked.prev_cursor)
        if not ended:
            wish = SECONDS_OF_POLL if asked.timeout is None else asked.timeout
            try:
                async with asyncio.timeout(min(max(0.0, wish), SECONDS_OF_POLL)):
                    await sampler.changed.wait()
            except TimeoutError:
                pass
            ended = completions.after(asked.prev_cursor)
        answer = FuturesRetrieveResponse(
            completions=[self._completion(each) for each in ended], cursor=completions.cursor
        )
        return json_response(answer)

    def _ended_earlier(self, asked: FuturesRetrieveRequest) -> Response:
        """Answer that all requests have failed that a client may have open since an earlier start
        of the server. It then asks for each result, and is told why."""
        first = asked.target.cloned_sampler_id * NUMBERS_OF_CLONE
        seen = asked.prev_cursor
        numbers = range(first + max(0, seen - MOST_OPEN), first + seen + MOST_OPEN)
        ids = [f"{asked.target.sampling_session_id}:{number}" for number in numbers]
        failed: list[FutureCompletion] = [FutureFailed(request_id=each) for each in ids]
        return json_response(FuturesRetrieveResponse(completions=failed, cursor=ALL_ENDED))

    def _completion(self, request_id: str) -> FutureCompletion:
        promise = self._desk.promises.get(request_id)
        if promise is None or promise.answer is None or promise.answer.is_failure:
            return FutureFailed(request_id=request_id)
        return FutureFinished(
            request_id=request_id, response_payload_uncompressed_size=len(promise.answer.content)
        )


def _sample_response(promise: Promise, asked: types.SampleRequest) -> Response:
    sequences = [
        f"{promise.request_id}:{number}" for number in range(min(asked.num_samples, 10_000))
    ]
    return future_response(promise, sequences=sequences)
