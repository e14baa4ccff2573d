"""Bodies of OpenAI's API: what a request may say, as pydantic models. No MLX, no MPI."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationError,
)

from shardmlx.server.accepted_fields import IGNORED, NEUTRAL, Body, Listed, refuse_unknown
from shardmlx.server.json_texts import bytes_with_whole_characters
from shardmlx.server.model_names import ModelNames
from shardmlx.server.openai_errors import ApiError, refused, shown
from shardmlx.server.openai_messages import MessageBody, ToolBody
from shardmlx.server.structure import StructuredBody

LIKELIEST = Field(None, ge=0, le=20)
"""The number of log-probabilities at each token."""

MOST = 2**31 - 1
"""Upper bound of any number of tokens or texts."""

TOKENIZERS_OWN = """
    chat_template conversation messages tools documents tokenize add_generation_prompt
    continue_final_message padding truncation max_length return_tensors return_dict
    return_assistant_tokens_mask tokenizer_kwargs
"""
"""Refused in a chat template: one of the client's own could keep the server busy for ever."""

# Fields whose type pydantic does not know.


def _in_a_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST


def _number_or_no(value: object) -> object:
    return None if value is False else value  # false is what chats say


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(isinstance(each, str) for each in value):
            return tuple(value)
        lists = [value] if all(_is_integer(each) for each in value) else value
        if all(isinstance(each, list) and each and all(map(_is_integer, each)) for each in lists):
            return tuple(map(tuple, lists))
    raise ValueError("give a text, a list of texts, a list of token ids, or a list of such lists")


def _plain(arguments: dict[str, Any] | None) -> dict[str, Any] | None:
    for name, value in (arguments or {}).items():
        if isinstance(value, dict | list):
            raise ValueError(f"{shown(name)}: give a text, a number, true, false or null")
        if name in TOKENIZERS_OWN.split():
            raise ValueError(f"{name} is no variable of a chat template: leave it out")
    return arguments


ALL_THAT_FIT = -1
"""The ``max_tokens`` of llama.cpp's clients that want no limit but the model's."""


def _not_zero(limit: int | None) -> int | None:
    if limit == 0:
        raise ValueError("give 1 or more, or -1 for as many as fit")
    return limit


TokenLimit = Annotated[int | None, Field(ge=ALL_THAT_FIT, le=MOST), AfterValidator(_not_zero)]


def _another(seed: int | None) -> int | None:
    return None if seed == -1 else seed  # llama.cpp's and vLLM's clients want another each time


TokenId = Annotated[int, Field(strict=False)]
"""A key of an object, and so a text."""

Bias = Annotated[float, Field(ge=-100, le=100)]


def _no_limit(share: float | None) -> float | None:
    return share or (None if share is None else 1.0)  # mlx_lm's 0, and others', means all


def _no_list(bias: object) -> object:
    return {} if bias == [] else bias  # PHP's empty object


class StreamOptions(Body):
    """The ``stream_options`` of a request."""

    include_usage: bool | None = None

    passes = frozenset({"include_obfuscation"})


class NameBody(Body):
    """A function in a choice of tools."""

    name: str = ""


class AllowedTool(Body):
    type: Literal["function"]
    function: NameBody


class AllowedTools(Body):
    """The tools of a request that an answer may call, or must."""

    mode: Literal["auto", "required"] = "auto"
    tools: Listed[AllowedTool]


class ToolChoice(Body):
    """The ``tool_choice`` of a request; a word alone is its ``type``."""

    type: str
    function: NameBody | None = None
    allowed_tools: AllowedTools | None = None

    def refuse_unknown(self, where: str = "") -> None:
        # Other types are refused.
        if self.type in CHOICES:
            super().refuse_unknown(where)


CHOICES = ("auto", "none", "required", "function", "allowed_tools")
"""Types of choices that are understood."""


def in_an_object(choice: object) -> object:
    """Return a choice that is a word as the object of that type."""
    return {"type": choice} if isinstance(choice, str) else choice


class SamplingBody(Body):
    """The sampling parameters of a request, under their names in ``SamplingParams``."""

    temp: float | None = Field(None, alias="temperature", ge=0, le=2)
    top_p: Annotated[float | None, Field(ge=0, le=1), AfterValidator(_no_limit)] = None
    min_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MOST)
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**64), AfterValidator(_another)] = None
    logit_bias: Annotated[dict[TokenId, Bias], BeforeValidator(_no_list)] = Field(
        default_factory=dict
    )
    xtc_probability: float | None = Field(None, ge=0, le=1)
    xtc_threshold: float | None = Field(None, ge=0, le=0.5)
    repetition_penalty: float | None = Field(None, ge=0, le=10)
    repetition_context_size: int | None = Field(None, ge=1, le=MOST)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    presence_context_size: int | None = Field(None, ge=1, le=MOST)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_context_size: int | None = Field(None, ge=1, le=MOST)

    @property
    def sampling(self) -> dict[str, Any]:
        """The parameters that the request names, with their values."""
        given = self.model_dump(include=set(SamplingBody.model_fields), exclude_none=True)
        return {**given, "logit_bias": tuple(sorted(self.logit_bias.items()))}


SAMPLING = tuple(each.alias or name for name, each in SamplingBody.model_fields.items())
"""Names of all parameters of sampling, which every API takes."""


class RequestBody(SamplingBody, StructuredBody):
    """The parameters that chats and completions share."""

    model: str | None = None
    max_tokens: TokenLimit = None
    max_completion_tokens: TokenLimit = None
    n: int | None = Field(None, ge=1, le=MOST)
    stop: Annotated[
        Listed[Annotated[str, Field(max_length=500)]],
        Field(max_length=16),
        BeforeValidator(_in_a_list),
    ] = Field(default_factory=list)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    passes = IGNORED
    neutral: ClassVar = NEUTRAL

    @property
    def most(self) -> int | None:
        """The tokens that an answer may have, if the request says it. Raises ``ApiError``."""
        first, second = self.max_tokens, self.max_completion_tokens
        if None not in (first, second) and first != second:
            raise refused(
                f"max_tokens is {first} and max_completion_tokens {second}: give one of them",
                "max_tokens",
            )
        return first or second


class ChatBody(RequestBody):
    messages: Listed[MessageBody] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = LIKELIEST
    tools: Listed[ToolBody] | None = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(in_an_object)] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, AfterValidator(_plain)] = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @property
    def goes_on(self) -> bool:
        """True if the answer goes on from the last message. Raises ``ApiError``."""
        last = self.messages[-1]
        goes_on = bool(self.continue_final_message)
        if goes_on and last.role != "assistant":
            raise refused(
                f"the last message is of role {last.role!r}: an answer goes on from one of the "
                "assistant alone",
                "messages",
            )
        if self.add_generation_prompt is False and not goes_on:
            refuse_unknown({"add_generation_prompt": False}, neutral=NEUTRAL)
        return goes_on


class CompletionBody(RequestBody):
    """The body of a request to /v1/completions; each prompt is a text, or token ids. ``logprobs``
    is the number of likeliest tokens to list beside each."""

    prompt: Annotated[tuple[str | tuple[int, ...], ...], PlainValidator(_prompts)]
    logprobs: Annotated[int | None, BeforeValidator(_number_or_no)] = LIKELIEST


# From bytes to a model.

KIND = re.compile(r"str|(list|dict|json)\[.*|\[key\]")
"""A step in pydantic's path to a fault that is no field, but a type that a field may have, or that
a key is at fault."""

_AnyModel = TypeVar("_AnyModel", bound=Body)
_AnyBody = TypeVar("_AnyBody", bound=RequestBody)


def validated(kind: type[_AnyModel], body: bytes) -> _AnyModel:
    """Read the JSON of a body of this ``kind``. Raises ``ApiError`` for what is no such body, and
    for a field, at any depth, that is not known."""
    try:
        parsed = _parsed(kind, body)
    except ValidationError as error:
        raise _explained(error) from None
    parsed.refuse_unknown()
    return parsed


def _parsed(kind: type[_AnyModel], body: bytes) -> _AnyModel:
    """Return a body without halves of characters. Raises ``ValidationError``."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        whole = bytes_with_whole_characters(body) if _is_no_json(error) else body
        if whole == body:
            raise
    return kind.model_validate_json(whole)


def _is_no_json(error: ValidationError) -> bool:
    return bool(error.errors(include_url=False)[0]["type"] == "json_invalid")


def parse_body(kind: type[_AnyBody], body: bytes, names: ModelNames) -> _AnyBody:
    """Read a body of this ``kind`` for the model with these ``names``. Raises ``ApiError``."""
    parsed = validated(kind, body)
    names.check(parsed.model or None)
    options = parsed.stream_options
    if options is not None and options.include_usage and not parsed.stream:
        raise refused("stream_options is for requests with stream: true", "stream_options")
    return parsed


def _explained(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if _is_no_json(error):
        return refused(f"the body is no JSON: {message.removeprefix('Invalid JSON: ')}")
    path = map(str, first["loc"])
    # A path may end in a key of the client's own.
    param = ".".join(each for each in path if not KIND.fullmatch(each))[:100] or None
    if first["type"] == "missing":
        return refused(f"{param} is missing", param)
    if param is None:
        return refused("the body is no JSON object")
    given = first["input"]
    is_plain = given is None or isinstance(given, bool | int | float | str)
    value = f" (it is {shown(given)})" if is_plain else ""
    return refused(f"{param}: {message[:1].lower()}{message[1:]}{value}", param)
