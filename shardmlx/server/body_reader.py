"""Read the bodies of requests, within bounds of bytes and of time. No MLX, no MPI."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import Request

from shardmlx.config.serve import MOST_BODIES
from shardmlx.server.openai_errors import ApiError
from shardmlx.server.request_queue import QueueFull

LONG_BODY_BYTES = 100_000
"""Bytes of a body that is read in hundredths of a second. Longer ones have turns of their own."""

SECONDS_FOR_BODY = 30.0

JSON = "application/json"

_T = TypeVar("_T")


class BodyReader:
    """Reads bodies of at most ``most_bytes``; only ``MOST_BODIES`` of these are held at once."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._held_bytes = 0
        # One thread is enough for long requests, and another for those that do not wait for them.
        self._turns = {True: asyncio.Lock(), False: asyncio.Lock()}

    async def read(
        self, request: Request, read: Callable[[bytes], _T], media_type: str = JSON
    ) -> _T:
        """Return what ``read`` makes of the body, on a thread of its own. Raises ``ApiError``."""
        body = await read_body(request, self.most_bytes, media_type)
        if self._held_bytes + len(body) > MOST_BODIES * self.most_bytes:
            raise QueueFull("too many long requests wait to be read: try again later")
        self._held_bytes += len(body)
        try:
            async with self._turns[len(body) > LONG_BODY_BYTES]:
                return await asyncio.to_thread(read, body)
        finally:
            self._held_bytes -= len(body)


async def read_body(request: Request, most: int, media_type: str = JSON) -> bytes:
    """Read a body of at most ``most`` bytes, and of this type. Raises ``ApiError``."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Any page can have a browser post a form or plain text anywhere, but no JSON.
    if kind != media_type:
        raise ApiError(
            415,
            f"the body is {ascii(kind)[:100] if kind else 'of no type'}: send it with "
            f"'Content-Type: {media_type}'",
        )
    too_large = ApiError(413, f"the body is larger than {most} bytes, the most that is read")
    if int(request.headers.get("content-length", 0)) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(SECONDS_FOR_BODY), aclosing(request.stream()) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        message = f"the body did not come within {SECONDS_FOR_BODY:g} seconds"
        raise ApiError(408, message, headers={"connection": "close"}) from None
    return bytes(body)
