"""Requests that only turn text into tokens, or tokens into text. No MLX, no MPI."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import Field

from shardmlx.server.accepted_fields import Body, Listed, refuse_unknown
from shardmlx.server.openai_bodies import MOST, validated
from shardmlx.server.openai_errors import refused
from shardmlx.server.openai_requests import ServedModel, read_chat, tokens_of


class TextBody(Body):
    """The body of a request to /tokenize with a prompt; one with messages is that of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool = True


class TokensBody(Body):
    model: str | None = None
    tokens: Listed[Annotated[int, Field(le=MOST)]]


def tokenized(body: bytes, served: ServedModel) -> dict[str, Any]:
    """Answer a request to /tokenize. Raises ``ApiError``."""
    asked = validated(TextBody, body)
    if (asked.prompt is None) == (asked.messages is None):
        raise refused("give either a prompt or messages", "prompt")
    if asked.prompt is None:
        (request,) = read_chat(body, served).requests
        tokens = request.tokens
    else:
        served.names.check(asked.model or None)
        refuse_unknown(asked.model_extra)
        if not asked.add_special_tokens:
            raise refused(
                "add_special_tokens is false: tokens are those of /v1/completions, leave it out",
                "add_special_tokens",
                "unsupported_parameter",
            )
        tokens = tokens_of(partial(served.encoder.text, asked.prompt), "prompt")
    return {"count": len(tokens), "max_model_len": served.most_tokens, "tokens": list(tokens)}


def detokenized(body: bytes, served: ServedModel) -> dict[str, Any]:
    """Answer a request to /detokenize. Raises ``ApiError``."""
    asked = validated(TokensBody, body)
    served.names.check(asked.model or None)
    refuse_unknown(asked.model_extra)
    tokens = tokens_of(partial(served.encoder.checked, asked.tokens, "tokens"), "tokens")
    return {"prompt": served.encoder.untokenized(*tokens)}
