"""Errors as OpenAI's API has them, Anthropic's and Tinker's. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

INVALID = "invalid_request_error"

TYPES = {
    401: ("authentication_error", "authentication_error"),
    404: (INVALID, "not_found_error"),
    413: (INVALID, "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    503: ("server_error", "overloaded_error"),
}
"""The types of errors in OpenAI's API and in Anthropic's, by their status."""


@dataclass(eq=False)
class ApiError(Exception):
    """An error that answers a request with this HTTP ``status``; ``param`` is what is wrong."""

    status: int
    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of a response, and of the event that ends a stream."""
        return {
            "error": {
                "message": str(self),
                "type": self._types[0],
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def anthropics(self) -> dict[str, Any]:
        """The same as Anthropic's API has it."""
        return {"type": "error", "error": {"type": self._types[1], "message": str(self)}}

    @property
    def tinkers(self) -> dict[str, Any]:
        """The same as Tinker's API has it."""
        is_servers = self.status >= 500 or self.code == "started_anew"
        return {"error": str(self), "category": "server" if is_servers else "user"}

    @property
    def _types(self) -> tuple[str, str]:
        usual = ("server_error", "api_error") if self.status >= 500 else (INVALID, INVALID)
        return TYPES.get(self.status, usual)


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for a request that asks for what cannot be done (status 400)."""
    return ApiError(400, message, param=param, code=code)


NO_HTTP = refused("this is not an HTTP request, or its head is too long: the API is under /v1").body
"""Answers what is not HTTP."""


def server_fault() -> ApiError:
    """Return the error for what nobody foresaw, whose traceback is on stderr."""
    return ApiError(500, "a fault of the server: its log has more")


def shown(value: object) -> str:
    """Return a value as an error message shows it: in ASCII, at most 80 characters."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-15:]}"
