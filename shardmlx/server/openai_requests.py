"""Requests of OpenAI's API to requests for generation. No MLX, no MPI."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from shardmlx.errors import PromptTooLong, UserError
from shardmlx.inference.answer_format import AnswerFormat, Tool
from shardmlx.inference.prompts import PromptEncoder
from shardmlx.inference.sampling_params import SamplingParams
from shardmlx.server.accepted_fields import Body, Json
from shardmlx.server.answer_parser import AnswerSyntax
from shardmlx.server.call_ids import with_short_ids
from shardmlx.server.client_tools import ClientTool
from shardmlx.server.model_names import ModelNames
from shardmlx.server.openai_bodies import (
    ALL_THAT_FIT,
    MOST,
    ChatBody,
    CompletionBody,
    RequestBody,
    parse_body,
)
from shardmlx.server.openai_errors import ApiError, refused, shown
from shardmlx.server.openai_messages import follows_result
from shardmlx.server.request_queue import GenerationRequest
from shardmlx.server.structure import Structure, call_rules

COLDEST = 1e-3
"""Lower temperatures count as 0: logits divided by them would leave float16's range."""

TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that is served, and what a request may ask of it.

    Prompt and answer together have at most ``most_tokens``; one request makes at most
    ``most_requests`` for generation. ``max_tokens`` and ``sampling`` are defaults. ``streams``
    numbers the random streams of answers without a seed. ``complaint`` says what is wrong with a
    grammar, empty if nothing is; it is None where answers cannot keep to one.
    """

    names: ModelNames
    encoder: PromptEncoder
    most_tokens: int
    most_requests: int
    max_tokens: int = 512
    sampling: SamplingParams = field(default_factory=SamplingParams)
    streams: Iterator[int] = field(default_factory=count)
    complaint: Callable[[str], str] | None = None

    def check_number(self, requests: int) -> None:
        """Raise ``ApiError`` for more texts than are served at a time."""
        if requests > self.most_requests:
            raise refused(
                f"the request is for {requests} texts: "
                f"at most {self.most_requests} are served at a time",
                "n",
            )

    def left(self, prompt: int, param: str) -> int:
        """Return the tokens that are left to the answer to a prompt of so many."""
        most = self.most_tokens - 1
        if prompt > most:
            message = f"the prompt is too long: {prompt} tokens > {most} maximum"
            raise refused(message, param, TOO_LONG)
        return self.most_tokens - prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """A request of the API: ``n`` requests for generation for each of its prompts, in order.

    ``logprobs`` is the number of likeliest tokens to list, None for no log-probabilities.
    ``repeated`` are fields that the reply says again.
    """

    requests: tuple[GenerationRequest, ...]
    n: int
    stream: bool
    include_usage: bool
    logprobs: int | None
    repeated: Mapping[str, Any] = field(default_factory=dict)
    client_tools: Mapping[str, ClientTool] = field(default_factory=dict)


def read_chat(body: bytes, served: ServedModel) -> ApiRequest:
    """Read the body of a request to /v1/chat/completions. Raises ``ApiError``."""
    chat = parse_body(ChatBody, body, served.names)
    if chat.top_logprobs and not chat.logprobs:
        raise refused("top_logprobs is for requests with logprobs: true", "top_logprobs")
    arguments = chat.chat_template_kwargs or {}
    if chat.reasoning_effort == "none":
        arguments = {"enable_thinking": False, **arguments}
    elif chat.reasoning_effort is not None:
        arguments = {"reasoning_effort": chat.reasoning_effort, **arguments}
    if goes_on := chat.goes_on:
        arguments["continue_final_message"] = True
    messages = _for_template(chat)
    tools = _offered(chat)
    read = partial(_chat_tokens, served.encoder, messages, tools, arguments)
    tokens = tokens_of(read, "messages")
    known = served.encoder.answer_format
    thought_end = None
    if known.thought is not None and served.encoder.opens_thought(tokens):
        thought_end = known.thought.end
    structure = _structure(chat, tools, known)
    grammar = structure.grammar(served.complaint, thought_end, known.special) if structure else None
    # An answer with a structure is said to the letter.
    continues = goes_on or (structure is not None and not tools)
    has_parts = thought_end is not None or tools or (known.thought is not None and not continues)
    syntax = AnswerSyntax(
        format=known,
        tools=tools,
        is_thinking=thought_end is not None,
        parallel=chat.parallel_tool_calls is not False and known.takes_several,
        continues=continues,
    )
    logprobs = (chat.top_logprobs or 0) if chat.logprobs else None
    request = _api_request(chat, [tokens], logprobs, served, grammar, continues)
    each = [replace(one, syntax=syntax if has_parts else None) for one in request.requests]
    return replace(request, requests=tuple(each))


def _for_template(chat: ChatBody) -> list[Json]:
    """Return the messages for a chat template. Raises ``ApiError``."""
    told = []
    beside = False
    for number, message in enumerate(chat.messages):
        told.append(message.for_template(f"messages.{number}", beside_result=beside))
        beside = follows_result(beside, message.role)
    return told


def _chat_tokens(
    encoder: PromptEncoder,
    messages: Sequence[Json],
    tools: Sequence[Tool],
    arguments: Mapping[str, Any],
) -> tuple[int, ...]:
    """Return the tokens of a chat, with other ids of calls where the template does not take those
    of another server. Raises ``UserError``."""
    try:
        return encoder.chat(messages, tools=tools, **arguments)
    except PromptTooLong:
        raise
    except UserError as error:
        renamed = with_short_ids(messages)
        if renamed == messages:
            raise
        try:
            return encoder.chat(renamed, tools=tools, **arguments)
        except PromptTooLong:
            raise
        except UserError:
            raise error from None


def _offered(chat: ChatBody) -> list[Tool]:
    """Return the tools of which the model is told. Raises ``ApiError``."""
    tools = [each.for_template for each in chat.tools or ()]
    choice = chat.tool_choice
    if choice is None:
        return tools
    if choice.type == "none":
        return []
    if choice.type != "allowed_tools":
        return tools
    if choice.allowed_tools is None:
        raise refused("tool_choice.allowed_tools is missing", "tool_choice.allowed_tools")
    allowed = [each.function.name for each in choice.allowed_tools.tools]
    for name in allowed:
        _named(tools, name)
    return [tool for tool in tools if tool["function"]["name"] in allowed]


def _named(tools: Sequence[Tool], name: str) -> Tool:
    """Return the tool of this name. Raises ``ApiError``."""
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    raise refused(f"tool_choice: {shown(name)} is none of the tools", "tool_choice")


def _structure(chat: ChatBody, tools: Sequence[Tool], known: AnswerFormat) -> Structure | None:
    """Return the structure that an answer must have; None if any will do. Raises ``ApiError``."""
    if forced := _forced(chat, tools):
        return Structure("tool_choice", _call_rules(chat, forced, known))
    structure = chat.structure()
    if structure is None or not tools:
        return structure
    return structure.or_body(_call_rules(chat, tools, known))


def _forced(chat: ChatBody, tools: Sequence[Tool]) -> Sequence[Tool]:
    """Return the tools of which the answer must call one, if any. Raises ``ApiError``."""
    param, choice = "tool_choice", chat.tool_choice
    if choice is None or choice.type in ("auto", "none"):
        return []
    allowed = choice.allowed_tools if choice.type == "allowed_tools" else None
    if allowed is not None and allowed.mode == "auto":
        return []
    if choice.type == "required" or allowed is not None:
        if not tools:
            raise refused("tool_choice asks for a call, and there are no tools", param)
        return tools
    if choice.type != "function" or choice.function is None:
        raise refused(
            f"tool_choice {shown(choice.type)} is not supported by this server: give 'auto', "
            "'none', 'required', a function or allowed_tools",
            param,
            "unsupported_parameter",
        )
    return [_named(tools, choice.function.name)]


def _call_rules(chat: ChatBody, tools: Sequence[Tool], known: AnswerFormat) -> list[str]:
    """Return the rules of an answer that calls one of these tools."""
    assert known.calls is not None, "a model with a chat template has a format"
    is_one = chat.tool_choice is not None and chat.tool_choice.type == "function"
    parallel = chat.parallel_tool_calls is not False and not is_one
    return call_rules(tools, known.calls, known.special, parallel=parallel)


def read_completion(body: bytes, served: ServedModel) -> ApiRequest:
    """Read the body of a request to /v1/completions. Raises ``ApiError``."""
    completion = parse_body(CompletionBody, body, served.names)
    # Before work is done for them.
    served.check_number(len(completion.prompt) * (completion.n or 1))
    prompts = []
    for prompt in completion.prompt:
        if isinstance(prompt, str):
            tokens = tokens_of(partial(served.encoder.text, prompt), "prompt")
        else:
            served.left(len(prompt), "prompt")
            tokens = tokens_of(partial(served.encoder.checked, prompt), "prompt")
        prompts.append(tokens)
    structure = completion.structure()
    grammar = structure.grammar(served.complaint, None, {}) if structure else None
    return _api_request(completion, prompts, completion.logprobs, served, grammar, True)


def tokens_of(read: Callable[[], tuple[int, ...]], param: str) -> tuple[int, ...]:
    """Return the tokens of the field that the body calls ``param``. Raises ``ApiError``."""
    try:
        return read()
    except UserError as error:
        code = TOO_LONG if isinstance(error, PromptTooLong) else None
        raise refused(str(error), param, code) from None


def _api_request(
    body: RequestBody,
    prompts: Sequence[tuple[int, ...]],
    logprobs: int | None,
    served: ServedModel,
    grammar: str | None,
    continues: bool,
) -> ApiRequest:
    n = body.n or 1
    served.check_number(len(prompts) * n)
    check_bias = partial(served.encoder.checked, body.logit_bias, "logit_bias")
    tokens_of(check_bias, "logit_bias")
    param = "messages" if isinstance(body, ChatBody) else "prompt"
    requests = [
        GenerationRequest(
            tokens=tokens,
            max_tokens=_answer_tokens(body.most, len(tokens), param, served),
            sampling=replace(
                _sampling(body, number, tokens, served), logprobs=logprobs, grammar=grammar
            ),
            stop=tuple(filter(None, body.stop)),
            continues=continues,
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


def _answer_tokens(asked: int | None, prompt: int, param: str, served: ServedModel) -> int:
    left = served.left(prompt, param)
    if asked is None:
        return min(served.max_tokens, left)
    if asked == ALL_THAT_FIT:
        return left
    if asked > left:  # in the words by which agents know that they must shorten their history
        raise refused(
            f"input length and `max_tokens` exceed context limit: {prompt} + {asked} > "
            f"{served.most_tokens}: ask for {left}, or -1 for as many as fit",
            "max_tokens",
            TOO_LONG,
        )
    return asked


def _sampling(
    body: RequestBody, number: int, prompt: tuple[int, ...], served: ServedModel
) -> SamplingParams:
    params = replace(served.sampling, **body.sampling)
    looked_back, vocabulary = params.looked_back, served.encoder.vocabulary
    return replace(
        params,
        temp=params.temp if params.temp >= COLDEST else 0.0,
        # mlx-lm calls all tokens 0.
        top_k=params.top_k if 0 < params.top_k < (vocabulary or MOST) else 0,
        context=prompt[-looked_back:] if looked_back else (),
        seed=None if body.seed is None else body.seed % 2**64,
        stream=next(served.streams) if body.seed is None else number,
    )


@dataclass(slots=True)
class TranslatedChat:
    """A chat that asks for the same as a request of another API, which has other ``names`` for some
    fields. ``body`` are those beside ``messages`` and ``tools``."""

    body: Json
    names: Mapping[str, str]
    messages: list[Json] = field(default_factory=list)
    tools: list[Json] = field(default_factory=list)

    @classmethod
    def of(cls, asked: Body, same: Collection[str], names: Mapping[str, str]) -> TranslatedChat:
        """Begin with the fields that mean the ``same`` in both."""
        extra = asked.model_extra or {}
        return cls({name: value for name, value in extra.items() if name in same}, names)

    def add_call(self, call_id: Any, name: Any, arguments: Any) -> None:
        """Add a call to the last message."""
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def add_tool(self, function: Json) -> None:
        self.tools.append({"type": "function", "function": function})

    def read(self, served: ServedModel) -> ApiRequest:
        """Read the chat. Raises ``ApiError``, in which fields have the other API's names."""
        chat = {**self.body, "messages": self.messages, "tools": self.tools}
        try:
            return read_chat(json.dumps(chat).encode(), served)
        except ApiError as error:
            raise error.called(self.names) from None
