"""Check framing, host and key of every request, and set the headers of every answer."""

from __future__ import annotations

import hmac
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardmlx.common.http_listener import ANSWERED, FOR_PAGE, is_for
from shardmlx.server.openai_errors import ApiError

PAGE_PARTS = "/page/"

FILES = "/api/v1/files/"
"""Path of adapters, fetched by URLs that are a key by themselves."""


def error_response(error: ApiError, path: str) -> JSONResponse:
    """Return the response that tells an error as the API of the ``path`` does."""
    body = error.body
    if f"{path}/".startswith("/v1/messages/"):
        body = error.anthropics
    elif path.startswith("/api/"):
        body = error.tinkers
    return JSONResponse(body, error.status, error.headers)


class Guard:
    """ASGI middleware that wants the key, and one of ``hosts``; None takes any."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, hosts: Collection[str] | None) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        is_page = path == "/" or path.startswith(PAGE_PARTS)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in (FOR_PAGE if is_page else ANSWERED).items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            headers = Headers(scope=scope)
            _check_framing(headers)
            self._check_host(headers.get("host", ""))
            if not is_page and path != "/health" and not path.startswith(FILES):
                self._check_key(headers.get("authorization", ""), headers.get("x-api-key"))
        except ApiError as error:
            await error_response(error, path)(scope, receive, answer)
            return
        await self._app(scope, receive, answer)

    def _check_host(self, given: str) -> None:
        if not is_for(given, self._hosts):
            raise ApiError(
                421,
                f"the request is for host {ascii(given)[:200]}, but this server is for its own "
                "machine only: ask for localhost, or start it with --allow-host NAME",
                code="unknown_host",
            )

    def _check_key(self, given: str, anthropic: str | None) -> None:
        if self._key is None:
            return
        if not given and anthropic is not None:
            given = f"Bearer {anthropic}"
        scheme, _, key = given.partition(" ")
        # A comparison that ends at the first difference would tell how long the agreement is.
        is_right = hmac.compare_digest(key.strip().encode("latin-1"), self._key)
        if scheme.lower() != "bearer" or not is_right:
            what = "the API key is wrong" if given else "this server needs an API key"
            raise ApiError(
                401,
                f"{what}: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


def _check_framing(headers: Headers) -> None:
    """Refuse a body with two lengths: a proxy before this server may go by the other one, and take
    its rest for a request (RFC 9112, section 6.3)."""
    if "transfer-encoding" in headers and "content-length" in headers:
        raise ApiError(
            400,
            "the request has both Content-Length and Transfer-Encoding: send one of them",
            headers={"connection": "close"},
        )
