"""Errors as OpenAI's API has them. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any


class ApiError(Exception):
    """An error that is the answer to a request: one line, and the HTTP ``status``.

    ``param`` names what in the body is wrong; ``code`` is for programs to read.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of a response, and of the event that ends a stream."""
        return {
            "error": {
                "message": str(self),
                "type": _type(self.status),
                "param": self.param,
                "code": self.code,
            }
        }


def _type(status: int) -> str:
    if status == HTTPStatus.UNAUTHORIZED:
        return "authentication_error"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for a request that asks for what cannot be done (status 400)."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def shown(value: object) -> str:
    """Return a value as an error message shows it: in ASCII, at most 80 characters."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-15:]}"
