"""Requests that turn text into tokens, or tokens into text, in vLLM's form. No MLX, no MPI."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from typing import Annotated

from pydantic import Field

from shardmlx.server.accepted_fields import Json, Listed
from shardmlx.server.chat_request import ServedModel, tokens_of
from shardmlx.server.openai_errors import refused
from shardmlx.server.openai_requests import ChatBody, chat_request
from shardmlx.server.request_bodies import MOST, ModelBody, read_body


class PromptBody(ModelBody):
    """The body of a request to /tokenize with a prompt."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizedChatBody(ChatBody):
    """The body of a request to /tokenize with messages."""

    add_special_tokens: bool = False
    return_token_strs: bool | None = None


class TokensBody(ModelBody):
    """The body of a request to /detokenize."""

    tokens: Listed[Annotated[int, Field(ge=0, le=MOST)]]


def tokenized(body: bytes, served: ServedModel) -> Json:
    """Answer a request to /tokenize: the tokens of a prompt, or of a chat up to its answer. Raises
    ``ApiError``."""
    asked: PromptBody | TokenizedChatBody
    if _is_chat(body):
        asked = read_body(TokenizedChatBody, body, served.names)
        if asked.add_special_tokens:
            raise refused(
                "the chat template writes special tokens itself: leave add_special_tokens out",
                "add_special_tokens",
            )
        tokens = chat_request(asked).read(served).requests[0].tokens
    else:
        asked = read_body(PromptBody, body, served.names)
        encoder = served.encoder
        encode = encoder.text if asked.add_special_tokens else encoder.answer
        tokens = tokens_of(partial(encode, asked.prompt), "prompt")
    texts = [served.encoder.untokenized(token) for token in tokens]
    return {
        "count": len(tokens),
        "max_model_len": served.most_tokens,
        "tokens": list(tokens),
        "token_strs": texts if asked.return_token_strs else None,
    }


def _is_chat(body: bytes) -> bool:
    """Return whether a body has messages. A body that is not a JSON object has none."""
    with suppress(ValueError, RecursionError):
        parsed = json.loads(body)
        return isinstance(parsed, dict) and "messages" in parsed
    return False


def detokenized(body: bytes, served: ServedModel) -> Json:
    """Answer a request to /detokenize: the text of tokens. Raises ``ApiError``."""
    asked = read_body(TokensBody, body, served.names)
    tokens = tokens_of(partial(served.encoder.checked, asked.tokens, "tokens"), "tokens")
    return {"prompt": served.encoder.untokenized(*tokens)}
