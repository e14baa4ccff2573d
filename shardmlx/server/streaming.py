"""Send a reply while it is generated, and give it up when the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from shardmlx.server.metrics import RequestMeter
from shardmlx.server.openai_errors import ApiError
from shardmlx.server.replies import Body, Reply
from shardmlx.server.request_queue import Answer, Piece, ServiceEnded

SECONDS_OF_SILENCE = 15.0
"""Seconds after which a silent stream gives a sign of life, so that nobody closes it."""

SECONDS_TO_RESTART = 10
"""Seconds after which a client may ask again (``Retry-After``): ``launch`` restarts a server."""


class AnswerResponse(Response):
    """The HTTP response to one request of the API, made from its answers."""

    def __init__(
        self, reply: Reply, answers: Sequence[Answer], meters: Sequence[RequestMeter]
    ) -> None:
        super().__init__()
        self._reply = reply
        self._answers = answers
        self._meters = meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        make = (
            self._stream(send) if self._reply.request.stream else self._whole(scope, receive, send)
        )
        work = asyncio.create_task(make)
        gone = asyncio.create_task(_wait_until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            self._give_up()
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    def _give_up(self) -> None:
        """Cancel the answers that have not ended."""
        for answer, meter in zip(self._answers, self._meters, strict=True):
            answer.cancel()
            meter.end("cancelled")

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(merged(self._answers)) as pieces:
                async for each in pieces:
                    if each is not None:
                        self._take(*each)
        except (ApiError, ServiceEnded) as error:
            failed = self._failed(error)
            body = self._reply.failure(failed)
            response: Response = JSONResponse(body, failed.status, failed.headers)
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
        try:
            async with aclosing(merged(self._answers)) as pieces:
                async for each in pieces:
                    events = (
                        self._reply.sign_of_life
                        if each is None
                        else self._events(self._take(*each))
                    )
                    await _send(send, events)
        except (ApiError, ServiceEnded) as error:
            last = self._events([self._reply.failure(self._failed(error))])
        else:
            last = self._events(self._reply.closing()) + self._reply.done
        # In one with the end of the body: clients close the connection at what they know as last.
        await _send(send, last, more=False)

    def _events(self, bodies: Iterable[Body]) -> bytes:
        return b"".join(map(self._reply.event, bodies))

    def _take(self, index: int, piece: Piece) -> Iterable[Body]:
        self._meters[index].add(piece)
        if piece.finish_reason == "broken":
            param = self._reply.request.structure
            raise ApiError(
                500,
                f"{param}: the answer broke off in the middle of its structure: give a simpler one",
                param=param,
                code="broken_structure",
            )
        return list(self._reply.add(index, piece))

    def _failed(self, error: ApiError | ServiceEnded) -> ApiError:
        for meter in self._meters:
            meter.end("error")
        return error if isinstance(error, ApiError) else ended(str(error))


def ended(reason: str) -> ApiError:
    """Return the error for a server that generates nothing any more (status 503)."""
    return ApiError(
        503,
        f"no text is generated any more: {reason}",
        code="service_ended",
        headers={"retry-after": str(SECONDS_TO_RESTART)},
    )


async def merged(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, Piece] | None]:
    """Yield the pieces of all answers as they come, each with its answer's index, until all have
    ended; None after some silence. Raises ``ServiceEnded``."""
    queue: asyncio.Queue[tuple[int, Piece] | Exception] = asyncio.Queue()

    async def listen(index: int, answer: Answer) -> None:
        try:
            async for piece in answer:
                queue.put_nowait((index, piece))
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(listen(*each)) for each in enumerate(answers)]
    left = len(tasks)
    try:
        while left:
            if not queue.empty():
                # Pieces that are there already wait for nothing: without this, thousands would be
                # written before anybody else has a turn, also to a client who has gone.
                await asyncio.sleep(0)
            try:
                async with asyncio.timeout(SECONDS_OF_SILENCE):
                    each = await queue.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(each, Exception):
                raise each
            left -= each[1].finish_reason is not None
            yield each
    finally:
        for task in tasks:
            task.cancel()


async def _send(send: Send, body: bytes, *, more: bool = True) -> None:
    if body or not more:
        await send({"type": "http.response.body", "body": body, "more_body": more})


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
