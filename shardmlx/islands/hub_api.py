"""The ASGI application of the hub: requests of islands, and its page. Bodies go to the disk as they
come, and only from islands with a token."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from shardmlx.common.http_listener import ANSWERED, FOR_PAGE, LOOPBACK, is_for
from shardmlx.errors import UserError, one_line
from shardmlx.islands.protocol import Join, Progress, Refusal
from shardmlx.islands.rounds import Rounds
from shardmlx.islands.store import CHANGE, PUBLISHED, FragmentStore, Report

MOST_JSON = 16 << 20
"""Bytes of a JSON body: a line for each of a hundred thousand tensors."""

SECONDS_OF_SILENCE = 30.0
"""Seconds that a body may stand still."""

SECONDS_TO_WAIT = 20.0
"""Seconds that a request may wait for a version, less than islands wait for an answer."""

SECONDS_TO_LOOK = 0.05
"""Seconds between two looks at a version: the thread that makes it needs no word to this one."""

MOST_BODIES = 8
"""Bodies of one island that may be on their way at a time."""

Handler = Callable[[Request, str], Awaitable[Response]]
"""A function that answers a request of an island, by its name."""


def make_app(rounds: Rounds, address: str) -> Starlette:
    """Return the application over the state of a hub, which islands reach at an ``address``."""
    api = _Api(rounds, address)
    number = "/fragments/{k}"
    report = f"{number}/reports/{{life}}-{{base}}"
    routes = [
        Route("/", api.page),
        Mount("/page", StaticFiles(packages=[("shardmlx.common", "page"), (__package__, "page")])),
        Route("/status", api.status),
        Route("/join", api.known(api.join), methods=["POST"]),
        Route("/progress", api.known(api.progress), methods=["POST"]),
        Route(number, api.known(api.version)),
        Route(f"{number}/seed", api.known(api.seed), methods=["PUT"]),
        Route(report, api.known(api.report), methods=["PUT"]),
        Route(report, api.known(api.secure), methods=["POST"]),
    ]
    errors = (UserError, HTTPException, ClientDisconnect, Exception)
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys(errors, api.answer_error))
    app.router.redirect_slashes = False
    return app


class _Api:
    def __init__(self, rounds: Rounds, address: str) -> None:
        self._rounds = rounds
        self._address = address
        self._bodies: Counter[str] = Counter()

    def known(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint that lets islands with their tokens in. An answer before the end of
        a body could get lost: its sender meets a closed connection while it still sends."""

        async def endpoint(request: Request) -> Response:
            try:
                return await self._answer(handler, request)
            except Exception as error:
                # A body that stood still has had its time.
                if not isinstance(error, Refusal) or error.status != HTTPStatus.REQUEST_TIMEOUT:
                    await _read_away(request)
                raise

        return endpoint

    async def _answer(self, handler: Handler, request: Request) -> Response:
        """Return what ``handler`` answers an island, and count what it refuses of each."""
        name = self._name_of(request)
        self._rounds.hear(name)
        try:
            response = await handler(request, name)
        except UserError as error:
            if not isinstance(error, Refusal) or not error.more:
                self._rounds.islands[name].refused += 1
            raise
        for header, value in ANSWERED.items():
            response.headers.setdefault(header, value)
        return response

    def _name_of(self, request: Request) -> str:
        """Return the name of the island whose token a request has. Raises ``Refusal``."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        found = ""
        for name, token in self._rounds.run.tokens.items():
            # All are compared, each in a time that does not tell how much agrees.
            if hmac.compare_digest(given.strip().encode("latin-1"), token.encode()):
                found = name
        if scheme.lower() != "bearer" or not found:
            raise Refusal(401, "the token is none of this hub's", "take the one in tokens/NAME")
        return found

    async def page(self, request: Request) -> Response:
        """Answer with the page of the hub."""
        page = Path(__file__).with_name("page") / "hub.html"
        return FileResponse(page, headers=FOR_PAGE)

    async def status(self, request: Request) -> Response:
        """Tell all to islands, and to whoever is on this machine."""
        host = request.client.host if request.client else ""
        proxied = {"forwarded", "x-forwarded-for", "via"} & {*request.headers.keys()}
        if host not in LOOPBACK or not is_for(request.headers.get("host", ""), LOOPBACK) or proxied:
            self._name_of(request)
        about_joining = {
            "address": self._address,
            "for_this_machine": urlsplit(self._address).hostname in LOOPBACK,
            "tokens_directory": str(self._rounds.run.directory.absolute() / "tokens"),
        }
        return JSONResponse({**self._rounds.status(), **about_joining}, headers=ANSWERED)

    async def join(self, request: Request, name: str) -> Response:
        """Let an island in."""
        message = Join.of_json(await self._json(request, name))
        joined = await asyncio.to_thread(self._rounds.join, name, message)
        return JSONResponse(joined.to_json())

    async def progress(self, request: Request, name: str) -> Response:
        """Take a heartbeat."""
        message = Progress.of_json(await self._json(request, name))
        return JSONResponse(self._rounds.progress(name, message))

    async def version(self, request: Request, name: str) -> Response:
        """Answer with a fragment's newest version, once it is above ``after``: with the encoded
        change if one leads there, or else with the weights. 204 says that none has come yet."""
        fragment = self._fragment(request)
        number = _number(request, "k")
        after = _number(request, "after") if "after" in request.query_params else -1
        until = time.monotonic() + SECONDS_TO_WAIT
        while True:
            ended = self._rounds.ended  # asked first: the version is then the last
            version = self._rounds.version_for(name, number, after)
            if version > after:
                break
            if ended:
                raise Refusal(410, "the run has ended", ended=True)
            if time.monotonic() >= until or await request.is_disconnected():
                return Response(status_code=204)
            await asyncio.sleep(SECONDS_TO_LOOK)
        has_change = version == after + 1 and fragment.path(CHANGE, version).exists()
        part = CHANGE if has_change else PUBLISHED
        etag = f'"{number}-{version}-{part}"'
        headers = {"x-version": str(version), "x-part": part, "etag": etag}
        return FileResponse(fragment.path(part, version), headers=headers)

    async def seed(self, request: Request, name: str) -> Response:
        """Take the first weights of a fragment."""
        fragment = self._fragment(request)
        number = _number(request, "k")
        take = partial(self._rounds.seed, name, number)
        await self._upload(request, name, fragment, fragment.seed_bytes, take)
        return JSONResponse({"version": 0})

    async def report(self, request: Request, name: str) -> Response:
        """Take a report of a fragment."""
        fragment = self._fragment(request)
        report = _report_of(request, name)
        take = partial(self._rounds.take, report, _number(request, "k"))
        length = fragment.report_bytes
        if self._rounds.secure is not None:
            take = partial(self._rounds.secure.put, report)
            length = fragment.masked_bytes
        await self._upload(request, name, fragment, length, take)
        return JSONResponse({"version": fragment.version, "ended": self._rounds.ended})

    async def secure(self, request: Request, name: str) -> Response:
        """Take what a report to a secure sum needs beside its numbers, and answer what is next."""
        if self._rounds.secure is None:
            raise Refusal(422, "this hub makes no secure sums", "use the same shardmlx")
        message = await self._json(request, name)
        tell = self._rounds.secure.tell
        answer = await asyncio.to_thread(tell, _report_of(request, name), message)
        return JSONResponse(answer)

    def _fragment(self, request: Request) -> FragmentStore:
        return self._rounds.fragment(_number(request, "k"))

    async def _upload(
        self,
        request: Request,
        name: str,
        fragment: FragmentStore,
        length: int,
        take: Callable[[Path], None],
    ) -> None:
        """Write a body of so many bytes to the disk as it comes, and let ``take`` have it."""
        given = request.headers.get("content-length")
        if given != str(length):
            problem = f"the body should have {length} bytes, and Content-Length is {given}"
            raise Refusal(400, problem, "send that many")
        body = fragment.new_file()

        def finish() -> None:
            # The thread goes on if the server stops: nobody else may remove what it uses.
            try:
                take(body)
            finally:
                body.unlink(missing_ok=True)

        try:
            with body.open("wb") as file:
                await self._receive(request, name, file.write, length)
        except BaseException:
            body.unlink(missing_ok=True)
            raise
        await asyncio.to_thread(finish)

    async def _json(self, request: Request, name: str) -> Any:
        """Return a JSON body. Raises ``Refusal``."""
        body = bytearray()
        await self._receive(request, name, body.extend, MOST_JSON)
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise Refusal(400, "the body is not JSON") from None

    async def _receive(
        self, request: Request, name: str, take: Callable[[bytes], object], most: int
    ) -> None:
        """Give a body to ``take``, piece by piece. Raises ``Refusal`` if it is too long or slow, or
        one of too many of this island."""
        count = 0
        stream = request.stream()
        if self._bodies[name] >= MOST_BODIES:
            raise Refusal(429, f"{MOST_BODIES} bodies of {name} are coming", "wait", retry=True)
        self._bodies[name] += 1
        try:
            while True:
                async with asyncio.timeout(SECONDS_OF_SILENCE):
                    piece = await anext(stream, b"")
                if not piece:
                    return
                count += len(piece)
                if count > most:
                    raise Refusal(413, f"the body is longer than {most} bytes", "send no more")
                await asyncio.to_thread(take, piece)  # a slow disk stops nobody else
        except TimeoutError:
            raise Refusal(408, "the body came too slowly", "send it again", retry=True) from None
        finally:
            self._bodies[name] -= 1

    async def answer_error(self, request: Request, error: Exception) -> Response:
        """Answer with an error as JSON."""
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)  # nobody reads it
        headers = {**ANSWERED}
        if isinstance(error, HTTPException):
            problem = f"{request.method} {request.url.path}: {error.detail}"
            error = Refusal(error.status_code, problem)
        elif not isinstance(error, UserError):
            problem = f"a fault of the hub: {one_line(error)}"
            error = Refusal(500, problem, "see what it printed", retry=True)
        elif not isinstance(error, Refusal):
            error = Refusal(422, error.problem, error.remedy)
        if error.status == 401:
            self._rounds.strangers[error.problem] += 1
            headers["www-authenticate"] = "Bearer"
        answer = {"error": error.problem, "remedy": error.remedy, **error.more}
        return JSONResponse(answer, error.status, headers)


async def _read_away(request: Request) -> None:
    """Read what is left of a body, for at most ``SECONDS_OF_SILENCE``."""
    try:
        async with asyncio.timeout(SECONDS_OF_SILENCE), aclosing(request.stream()) as pieces:
            async for _ in pieces:
                pass
    except (TimeoutError, ClientDisconnect, RuntimeError):
        pass  # it is too long, its sender is gone, or Starlette says that all was read


def _report_of(request: Request, name: str) -> Report:
    """Return the report that a request is about. Raises ``Refusal``."""
    counts = {each: _number(request, each) for each in ("life", "base", "rows", "tokens")}
    return Report(island=name, **counts)


def _number(request: Request, name: str) -> int:
    """Return a number of the path or the query. Raises ``Refusal``."""
    text = request.path_params.get(name) or request.query_params.get(name, "")
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise Refusal(400, f"{name} is {text!r}", "give a whole number")
    return int(text)
