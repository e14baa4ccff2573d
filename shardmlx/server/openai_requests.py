"""Bodies of OpenAI's API to requests for texts. Pure.

What would change a text and is not done here is refused by name, never ignored in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from shardmlx.errors import UserError
from shardmlx.inference.sampling_params import SamplingParams
from shardmlx.server.openai_errors import ApiError, refused
from shardmlx.server.request_queue import GenerationRequest

COLDEST = 1e-3
"""Temperatures below take the likeliest token: logits divided by them leave float16's range."""

MOST_LIKELIEST = 20
"""Log-probabilities that may be asked for at each token."""

MOST_STOPS = 16
LONGEST_STOP = 500
"""Characters."""

MOST = 2**31 - 1
"""Of any number of tokens or texts."""

OTHER_NAMES = frozenset({"default", "default_model"})
"""Of the one model there is; the second is mlx_lm.server's."""

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)
"""Parameters that change no text."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
}
"""Parameters that are taken only with a value that changes nothing."""

NOT_FOR_TEMPLATES = frozenset(
    {
        "chat_template",
        "conversation",
        "messages",
        "tools",
        "documents",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""Arguments of a tokenizer that are no variables of its template. A template of the client's own
could keep the server busy for ever."""


class Reader(Protocol):
    """What makes tokens of prompts: ``prompts.PromptReader``."""

    def text(self, prompt: str) -> tuple[int, ...]: ...

    def chat(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> tuple[int, ...]: ...

    def token_text(self, token: int) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Where a request says nothing."""

    max_tokens: int = 512
    temp: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What is served: ``model`` by name, with so many tokens in its ``vocabulary``, of prompt and
    answer together (``most_tokens``), and so many texts for one request (``most_requests``)."""

    model: str
    vocabulary: int
    most_tokens: int
    most_requests: int
    defaults: Defaults = field(default_factory=Defaults)
    streams: Iterator[int] = field(default_factory=count)
    """Numbers for the random streams of texts without a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """A request of the API: its texts, ``n`` for the first prompt, ``n`` for the second ..."""

    requests: tuple[GenerationRequest, ...]
    n: int
    stream: bool
    include_usage: bool
    logprobs: int | None


def read_chat(body: bytes, reader: Reader, served: ServedModel) -> ApiRequest:
    """Of /v1/chat/completions. Raises ``ApiError``."""
    chat = _parse(ChatBody, body, served)
    if chat.top_logprobs is not None and not chat.logprobs:
        raise refused("top_logprobs is for requests with logprobs: true", "top_logprobs")
    arguments = chat.chat_template_kwargs or {}
    for name in sorted(arguments.keys() & NOT_FOR_TEMPLATES):
        raise refused(
            f"{name} is no variable of a chat template: leave it out",
            f"chat_template_kwargs.{name}",
        )
    messages = [message.as_template_wants for message in chat.messages]
    tokens = _tokens(partial(reader.chat, messages, **arguments), "messages")
    logprobs = (chat.top_logprobs or 0) if chat.logprobs else None
    return _api_request(chat, [tokens], chat.max_completion_tokens, logprobs, served)


def read_completion(body: bytes, reader: Reader, served: ServedModel) -> ApiRequest:
    """Of /v1/completions. Raises ``ApiError``."""
    completion = _parse(CompletionBody, body, served)
    # Before work is done for them.
    _check_texts(len(completion.prompt) * (completion.n or 1), served)
    prompts = []
    for prompt in completion.prompt:
        if isinstance(prompt, str):
            tokens = _tokens(partial(reader.text, prompt), "prompt")
        else:
            tokens = prompt
            _check_vocabulary(tokens, "prompt", served)
        prompts.append(tokens)
    return _api_request(completion, prompts, None, completion.logprobs, served)


# What bodies look like. None is as good as nothing.


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise ValueError("give a text, or a list of texts, that are not empty")
    if len(stops) > MOST_STOPS or any(len(each) > LONGEST_STOP for each in stops):
        raise ValueError(f"at most {MOST_STOPS} texts of {LONGEST_STOP} characters are looked for")
    return tuple(stops)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bias(value: object) -> tuple[tuple[int, float], ...]:
    given = {} if value is None else value
    try:
        items = [(int(token), bias) for token, bias in given.items()]  # type: ignore[attr-defined]
    except (AttributeError, ValueError):
        raise ValueError('give an object of token ids and numbers, like {"42": -100}') from None
    for _, bias in items:
        if not (_is_integer(bias) or isinstance(bias, float)) or not -100 <= bias <= 100:
            raise ValueError(f"a bias is a number from -100 to 100, not {_shown(bias)}")
    return tuple((token, float(bias)) for token, bias in sorted(items))


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


def _content(value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("give a text, or a list of parts of type text")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"a part is of type {_shown(kind)}: only text is understood here")
        if not isinstance(part.get("text"), str):
            raise ValueError("a part of type text has no text")
        texts.append(part["text"])
    return "".join(texts)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Obfuscation hides lengths from who reads the network; it changes no text."""


class MessageBody(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, PlainValidator(_content)]
    name: str | None = None

    @property
    def as_template_wants(self) -> dict[str, str]:
        """Templates know no developers: that is what OpenAI calls systems today."""
        role = "system" if self.role == "developer" else self.role
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": self.content, **named}


class _Body(_Strict):
    """What both kinds of request have."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, le=MOST)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MOST)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    n: int | None = Field(None, ge=1, le=MOST)
    stop: Annotated[tuple[str, ...], PlainValidator(_stops)] = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[tuple[tuple[int, float], ...], PlainValidator(_bias)] = ()
    repetition_penalty: float | None = Field(None, ge=0, le=10)
    repetition_context_size: int | None = Field(None, ge=1, le=MOST)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    presence_context_size: int | None = Field(None, ge=1, le=MOST)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_context_size: int | None = Field(None, ge=1, le=MOST)


class ChatBody(_Body):
    messages: list[MessageBody] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LIKELIEST)
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None


class CompletionBody(_Body):
    prompt: Annotated[tuple[str | tuple[int, ...], ...], PlainValidator(_prompts)]
    logprobs: int | None = Field(None, ge=0, le=MOST_LIKELIEST)


# From a body to texts.

_AnyBody = TypeVar("_AnyBody", bound=_Body)


def _parse(kind: type[_AnyBody], body: bytes, served: ServedModel) -> _AnyBody:
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        raise _explained(error) from None
    if parsed.model not in {None, served.model} | OTHER_NAMES:
        raise ApiError(
            404,
            f"the model {_shown(parsed.model)} is not served here: ask for {served.model!r}",
            param="model",
            code="model_not_found",
        )
    _refuse_unknown(parsed)
    if isinstance(parsed, ChatBody):
        for number, message in enumerate(parsed.messages):
            _refuse_unknown(message, f"messages.{number}.")
    if parsed.stream_options is not None:
        _refuse_unknown(parsed.stream_options, "stream_options.")
        if not parsed.stream:
            raise refused("stream_options is for requests with stream: true", "stream_options")
    return parsed


def _explained(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return refused(f"the body is no JSON: {message.removeprefix('Invalid JSON: ')}")
    param = ".".join(map(str, first["loc"])) or None
    if first["type"] == "missing":
        return refused(f"{param} is missing", param)
    if param is None:
        return refused("the body is no JSON object")
    given = first["input"]
    is_plain = given is None or isinstance(given, bool | int | float | str)
    shown = f" (it is {_shown(given)})" if is_plain else ""
    return refused(f"{param}: {message[:1].lower()}{message[1:]}{shown}", param)


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-15:]}"


def _refuse_unknown(body: _Strict, prefix: str = "") -> None:
    for name, value in (body.model_extra or {}).items():
        is_harmless = value is None or (not prefix and name in IGNORED)
        if not is_harmless and value not in NEUTRAL.get(name, ()):
            name = f"{prefix}{name}"
            raise refused(
                f"{_shown(name)[1:-1]} is not supported by this server: leave it out",
                name[:200],
                "unsupported_parameter",
            )


def _tokens(read: Callable[[], tuple[int, ...]], param: str) -> tuple[int, ...]:
    try:
        return read()
    except UserError as error:
        raise refused(str(error), param) from None


def _check_vocabulary(tokens: Sequence[int], param: str, served: ServedModel) -> None:
    for token in tokens:
        if not 0 <= token < served.vocabulary:
            most = served.vocabulary - 1
            raise refused(f"{param}: token ids are from 0 to {most}, not {_shown(token)}", param)


def _check_texts(texts: int, served: ServedModel) -> None:
    if texts > served.most_requests:
        raise refused(
            f"the request is for {texts} texts: "
            f"at most {served.most_requests} are served at a time",
            "n",
        )


def _api_request(
    body: _Body,
    prompts: Sequence[tuple[int, ...]],
    max_completion_tokens: int | None,
    logprobs: int | None,
    served: ServedModel,
) -> ApiRequest:
    n = body.n or 1
    _check_texts(len(prompts) * n, served)
    _check_vocabulary([token for token, _ in body.logit_bias], "logit_bias", served)
    given = {body.max_tokens, max_completion_tokens} - {None}
    if len(given) > 1:
        raise refused(
            f"max_tokens is {body.max_tokens} and max_completion_tokens {max_completion_tokens}: "
            "give one of them",
            "max_tokens",
        )
    most = max_completion_tokens or body.max_tokens
    requests = [
        GenerationRequest(
            tokens=tokens,
            # The default gives way to a long prompt, but what was asked for is kept or refused.
            max_tokens=most
            or max(1, min(served.defaults.max_tokens, served.most_tokens - len(tokens))),
            sampling=_sampling(body, number, tokens, logprobs, served),
            stop=body.stop,
            continues=isinstance(body, CompletionBody),
        )
        for tokens in prompts
        for number in range(n)
    ]
    options = body.stream_options
    return ApiRequest(
        requests=tuple(requests),
        n=n,
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        logprobs=logprobs,
    )


def _sampling(
    body: _Body, number: int, prompt: tuple[int, ...], logprobs: int | None, served: ServedModel
) -> SamplingParams:
    """``number`` counts the texts of one prompt."""
    defaults = served.defaults

    def given(name: str, default: Any) -> Any:
        value = getattr(body, name)
        return default if value is None else value

    temp = given("temperature", defaults.temp)
    top_k = given("top_k", defaults.top_k)
    penalties = {
        f"{kind}_{what}": given(f"{kind}_{what}", default)
        for kind in ("repetition", "presence", "frequency")
        for what, default in (("penalty", 0.0), ("context_size", 20))
    }
    looked_back = max(
        (
            penalties[f"{kind}_context_size"]
            for kind in ("repetition", "presence", "frequency")
            if penalties[f"{kind}_penalty"] != 0
        ),
        default=0,
    )
    return SamplingParams(
        temp=temp if temp >= COLDEST else 0.0,
        top_p=given("top_p", defaults.top_p),
        min_p=given("min_p", defaults.min_p),
        # As many as there are is as good as all, which mlx-lm wants said as 0.
        top_k=top_k if 0 < top_k < served.vocabulary else 0,
        logit_bias=body.logit_bias,
        context=prompt[-looked_back:] if looked_back else (),
        seed=None if body.seed is None else body.seed % 2**64,
        stream=next(served.streams) if body.seed is None else number,
        logprobs=logprobs,
        **penalties,
    )
