"""The files of the chat page, and what a browser may do with them. No MLX, no MPI."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from http import HTTPStatus
from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

PAGE_PARTS = "/page/"
"""The beginning of the paths of the page's parts."""

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""The Content-Security-Policy of the page: nothing runs and nothing is loaded but its own files."""

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    etag: str
    media_type: str


class PageFiles:
    """The page and its parts, read once: answers to ``/`` and to ``/page/NAME``."""

    def __init__(self) -> None:
        shared = files("shardmlx.common").joinpath("page")
        own = files("shardmlx.server").joinpath("pages")
        self._files = {
            each.name: _read(each.name, each.read_bytes())
            for directory in (shared, own)
            for each in directory.iterdir()
        }

    async def answer(self, request: Request) -> Response:
        """Return the page, or the part of it that the path names. Raises ``HTTPException``."""
        file = self._files.get(request.path_params.get("name", "chat.html"))
        if file is None:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        headers = {
            "etag": file.etag,
            "cache-control": "no-cache",
            "content-security-policy": POLICY,
        }
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(None, HTTPStatus.NOT_MODIFIED, headers)
        return Response(file.body, headers=headers, media_type=file.media_type)


def _read(name: str, body: bytes) -> _File:
    ending = name[name.rindex(".") :]
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return _File(body, etag, f"{_TYPES[ending]}; charset=utf-8")
