"""Send a reply while it is generated, and give it up when the client has gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from shardmlx.server.accepted_fields import Json
from shardmlx.server.metrics import Metrics, RequestMeter
from shardmlx.server.openai_errors import ApiError, server_fault
from shardmlx.server.replies import Reply
from shardmlx.server.request_queue import MadeDelta, PendingAnswers

SECONDS_OF_SILENCE = 15.0
"""Seconds after which a silent stream gives a sign of life, so that nobody closes it."""


class AnswerResponse(Response):
    """The HTTP response to one request of the API, made from its answers."""

    def __init__(self, reply: Reply, answers: PendingAnswers, metrics: Metrics) -> None:
        super().__init__()
        self._reply = reply
        self._answers = answers
        self._meters = [RequestMeter(metrics, len(each.tokens)) for each in reply.request.requests]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streams = self._reply.request.stream
        make = self._stream(send) if streams else self._whole(scope, receive, send)
        work = asyncio.create_task(make)
        gone = asyncio.create_task(_wait_until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            # Answers that have not ended are given up.
            self._answers.cancel()
            for meter in self._meters:
                meter.end("cancelled")
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for come in self._answers.news(SECONDS_OF_SILENCE):
                for each in come:
                    self._take(each)
        except ApiError as error:
            response = JSONResponse(self._failure(error), error.status, error.headers)
        else:
            response = JSONResponse(self._reply.whole)
        await response(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"x-accel-buffering", b"no"),  # nginx passes the stream on at once
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send(send, self._events(self._reply.opening()))
        sent = time.monotonic()
        try:
            async for come in self._answers.news(SECONDS_OF_SILENCE):
                body = b"".join(self._events(self._take(each)) for each in come)
                # Also while tokens come of a call, which is told once it is whole.
                if not body and time.monotonic() - sent >= SECONDS_OF_SILENCE:
                    body = self._reply.sign_of_life
                if body:
                    await _send(send, body)
                    sent = time.monotonic()
        except ApiError as error:
            last = self._events([self._failure(error)])
        else:
            last = self._events(self._reply.closing()) + self._reply.done
        # In one with the end of the body: clients close the connection at what they know as last.
        await _send(send, last, more=False)

    def _events(self, bodies: Iterable[Json]) -> bytes:
        return b"".join(map(self._reply.event, bodies))

    def _take(self, news: MadeDelta) -> Iterable[Json]:
        delta = news.delta
        self._meters[news.index].add(delta, news.at)
        if delta.finish_reason == "error":
            raise server_fault()
        if delta.finish_reason == "broken":
            message = "the answer broke off in the middle of its structure: give a simpler one"
            raise ApiError(500, message, code="broken_structure")
        return list(self._reply.add(news.index, delta))

    def _failure(self, error: ApiError) -> Json:
        for meter in self._meters:
            meter.end("error")
        return self._reply.failure(error)


async def _send(send: Send, body: bytes, *, more: bool = True) -> None:
    if body or not more:
        await send({"type": "http.response.body", "body": body, "more_body": more})


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
