"""Errors as OpenAI's API has them, and Anthropic's. No MLX, no MPI."""

from __future__ import annotations

import re
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

    @property
    def anthropics(self) -> dict[str, Any]:
        """The same as Anthropic's API has it."""
        usual = "api_error" if self.status >= 500 else "invalid_request_error"
        said = {"type": ANTHROPICS_TYPES.get(self.status, usual), "message": str(self)}
        return {"type": "error", "error": said}

    def called(self, names: Mapping[str, str]) -> ApiError:
        """Return the error for an API that has other ``names`` for fields and what is within."""
        path = (self.param or "").split(".")
        prefixes = [".".join(path[:length]) for length in range(len(path), 0, -1)]
        known = next((prefix for prefix in prefixes if prefix in names), None)
        if self.param is None or known is None:
            return self
        param = names[known] + self.param.removeprefix(known)
        # Where a message names its field: not within the words of a template.
        field = rf"(?:^|(?<=`)){re.escape(self.param)}(?!\w)"
        message = re.sub(field, lambda _: param, str(self), count=1)
        return ApiError(self.status, message, param=param, code=self.code, headers=self.headers)


ANTHROPICS_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
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
