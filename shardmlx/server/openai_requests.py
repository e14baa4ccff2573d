"""Requests of OpenAI's older APIs: chat completions, and completions. No MLX, no MPI."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from shardmlx.server.accepted_fields import NEUTRAL, Body, Listed, refuse_unknown
from shardmlx.server.chat_request import (
    CHOICES,
    AnswerOptions,
    ApiRequest,
    ChatRequest,
    ServedModel,
    ToolChoice,
    choice_refused,
    requests_of,
    tokens_of,
)
from shardmlx.server.openai_errors import refused
from shardmlx.server.openai_messages import History, MessageBody, ToolBody
from shardmlx.server.request_bodies import (
    MOST,
    AskedBody,
    AskedChat,
    StopStrings,
    StreamOptions,
    TokenLimit,
    in_an_object,
    read_body,
)
from shardmlx.server.structure import StructuredBody

LIKELIEST = Field(None, ge=0, le=20)
"""The number of log-probabilities at each token."""


class NameBody(Body):
    """A function in a choice of tools."""

    name: str = ""


class AllowedTool(Body):
    """A tool that an answer may call."""

    type: Literal["function"]
    function: NameBody


class AllowedTools(Body):
    """The tools of a request that an answer may call, or must."""

    mode: Literal["auto", "required"] = "auto"
    tools: Listed[AllowedTool]


class ChoiceBody(Body):
    """The ``tool_choice`` of a request; a word alone is its ``type``."""

    type: str
    function: NameBody | None = None
    allowed_tools: AllowedTools | None = None

    def refuse_unknown(self, where: str = "") -> None:
        """Raise ``ApiError``, for a field at any depth that is not known, or another type."""
        if self.type in (*CHOICES, "function", "allowed_tools"):
            super().refuse_unknown(where)

    def choice(self) -> ToolChoice:
        """Return what is chosen. Raises ``ApiError`` for another type."""
        if self.type == "allowed_tools":
            if self.allowed_tools is None:
                raise refused("tool_choice.allowed_tools is missing", "tool_choice.allowed_tools")
            names = [each.function.name for each in self.allowed_tools.tools]
            return ToolChoice(only=names, must=self.allowed_tools.mode == "required")
        if self.type == "function" and self.function is not None:
            return ToolChoice(named=self.function.name)
        if self.type not in CHOICES:
            raise choice_refused(self.type)
        return CHOICES[self.type]


class RequestBody(AskedBody, StructuredBody):
    """The parameters that chats and completions share."""

    max_tokens: TokenLimit = None
    max_completion_tokens: TokenLimit = None
    n: int | None = Field(None, ge=1, le=MOST)
    stop: StopStrings = Field(default_factory=list)
    stream_options: StreamOptions | None = None

    def options(self, prompt_field: str, logprobs: int | None) -> AnswerOptions:
        """Return what is asked of the answers. Raises ``ApiError``."""
        first, second = self.max_tokens, self.max_completion_tokens
        if None not in (first, second) and first != second:
            raise refused(
                f"max_tokens is {first} and max_completion_tokens {second}: give one of them",
                "max_tokens",
            )
        counts = self.stream_options is not None and bool(self.stream_options.include_usage)
        if counts and not self.stream:
            raise refused("stream_options is for requests with stream: true", "stream_options")
        return AnswerOptions(
            sampling=self,
            prompt_field=prompt_field,
            most=first or second,
            n=self.n or 1,
            stop=self.stop,
            logprobs=logprobs,
            stream=bool(self.stream),
            include_usage=counts,
        )


class ChatBody(RequestBody, AskedChat):
    """The body of a request to /v1/chat/completions."""

    messages: Listed[MessageBody]
    logprobs: bool | None = None
    top_logprobs: int | None = LIKELIEST
    tools: Listed[ToolBody] = Field(default_factory=list)
    tool_choice: Annotated[ChoiceBody | None, BeforeValidator(in_an_object)] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @property
    def goes_on(self) -> bool:
        """True if the answer goes on from the last message. Raises ``ApiError``."""
        goes_on = bool(self.continue_final_message)
        if goes_on and self.messages and self.messages[-1].role != "assistant":
            raise refused(
                f"the last message is of role {self.messages[-1].role!r}: an answer goes on from "
                "one of the assistant alone",
                "messages",
            )
        if self.add_generation_prompt is False and not goes_on:
            refuse_unknown({"add_generation_prompt": False}, neutral=NEUTRAL)
        return goes_on


def read_chat(body: bytes, served: ServedModel) -> ApiRequest:
    """Read the body of a request to /v1/chat/completions. Raises ``ApiError``."""
    return chat_request(read_body(ChatBody, body, served.names)).read(served)


def chat_request(chat: ChatBody) -> ChatRequest:
    """Return what a body asks for, in the form of all APIs. Raises ``ApiError``."""
    if chat.top_logprobs and not chat.logprobs:
        raise refused("top_logprobs is for requests with logprobs: true", "top_logprobs")
    logprobs = (chat.top_logprobs or 0) if chat.logprobs else None
    history = History()
    for number, message in enumerate(chat.messages):
        message.add_to(history, f"messages.{number}")
    return ChatRequest(
        options=chat.options("messages", logprobs),
        messages=history.messages,
        tools=[each.for_template for each in chat.tools],
        choice=ToolChoice() if chat.tool_choice is None else chat.tool_choice.choice(),
        parallel=chat.parallel_tool_calls is not False,
        arguments=chat.template_arguments(chat.reasoning_effort),
        goes_on=chat.goes_on,
        structure=chat.structure(),
    )


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


class CompletionBody(RequestBody):
    """The body of a request to /v1/completions; each prompt is a text, or token ids. ``logprobs``
    is the number of likeliest tokens to list beside each."""

    prompt: Annotated[tuple[str | tuple[int, ...], ...], PlainValidator(_prompts)]
    logprobs: Annotated[int | None, BeforeValidator(_number_or_no)] = LIKELIEST


def read_completion(body: bytes, served: ServedModel) -> ApiRequest:
    """Read the body of a request to /v1/completions. Raises ``ApiError``."""
    completion = read_body(CompletionBody, body, served.names)
    options = completion.options("prompt", completion.logprobs)
    # Before work is done for them.
    served.check_number(len(completion.prompt) * options.n)
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
    return requests_of(options, prompts, served, grammar=grammar, continues=True)
