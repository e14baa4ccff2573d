"""The files of the chat page, and what a browser may do with them. No MLX, no MPI."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response
from starlette.staticfiles import StaticFiles

PAGE_PARTS = "/page/"

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


class PageFiles(StaticFiles):
    def __init__(self) -> None:
        super().__init__(packages=[("shardmlx.common", "page"), ("shardmlx.server", "pages")])

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers["cache-control"] = "no-cache"
        response.headers["content-security-policy"] = POLICY
        return response
