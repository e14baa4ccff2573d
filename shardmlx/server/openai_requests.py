"""Requests of OpenAI's API to requests for generation. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from shardmlx.errors import PromptTooLong, UserError
from shardmlx.inference.answer_format import AnswerFormat, Tool
from shardmlx.inference.call_formats import KNOWN
from shardmlx.inference.prompts import PromptReader
from shardmlx.inference.sampling_params import SamplingParams
from shardmlx.server.answer_parts import AnswerSyntax
from shardmlx.server.client_tools import ClientTool
from shardmlx.server.forced_calls import call_rules
from shardmlx.server.model_names import ModelNames
from shardmlx.server.openai_bodies import (
    ALL_THAT_FIT,
    ChatBody,
    CompletionBody,
    RequestBody,
    parse_body,
)
from shardmlx.server.openai_errors import ApiError, refused, shown
from shardmlx.server.request_queue import GenerationRequest
from shardmlx.server.structure import Structure

COLDEST = 1e-3
"""Lower temperatures count as 0: logits divided by them would leave float16's range."""

TOKENIZERS_OWN = """
    chat_template conversation messages tools documents tokenize add_generation_prompt
    continue_final_message padding truncation max_length return_tensors return_dict
    return_assistant_tokens_mask tokenizer_kwargs
"""
"""Arguments of a tokenizer that are no variables of its chat template. They are refused: a template
of the client's own could keep the server busy for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Values of the parameters that a request does not name."""

    max_tokens: int = 512
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that is served, and what a request may ask of it.

    ``names`` are its names, ``vocabulary`` how many token ids it knows. Prompt and answer together
    have at most ``most_tokens``; one request of the API makes at most ``most_requests`` for
    generation. ``streams`` numbers the random streams of answers without a seed. ``complaint`` says
    what is wrong with a grammar, empty if nothing is; it is None where answers cannot keep to one.
    """

    names: ModelNames
    vocabulary: int
    most_tokens: int
    most_requests: int
    defaults: Defaults = field(default_factory=Defaults)
    streams: Iterator[int] = field(default_factory=count)
    complaint: Callable[[str], str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """A request of the API: ``n`` requests for generation for each of its prompts, in order.

    ``logprobs`` is the number of likeliest tokens to list, None for no log-probabilities.
    ``structure`` is the field that asks for one. ``repeated`` are fields that the reply says again.
    """

    requests: tuple[GenerationRequest, ...]
    n: int
    stream: bool
    include_usage: bool
    logprobs: int | None
    structure: str | None = None
    repeated: Mapping[str, Any] = field(default_factory=dict)
    client_tools: Mapping[str, ClientTool] = field(default_factory=dict)


def read_chat(body: bytes, reader: PromptReader, served: ServedModel) -> ApiRequest:
    """Read the body of a request to /v1/chat/completions. Raises ``ApiError``."""
    chat = parse_body(ChatBody, body, served.names)
    if chat.top_logprobs and not chat.logprobs:
        raise refused("top_logprobs is for requests with logprobs: true", "top_logprobs")
    arguments = chat.chat_template_kwargs or {}
    for name in sorted(arguments.keys() & set(TOKENIZERS_OWN.split())):
        raise refused(
            f"{name} is no variable of a chat template: leave it out",
            f"chat_template_kwargs.{name}",
        )
    messages = [
        message.for_template(f"messages.{number}") for number, message in enumerate(chat.messages)
    ]
    arguments = {**_effort(chat.reasoning_effort), **arguments}
    if goes_on := chat.goes_on:
        arguments["continue_final_message"] = True
    tools = [] if chat.tool_choice == "none" else [each.for_template for each in chat.tools or ()]
    tokens = tokens_of(partial(reader.chat, messages, tools=tools, **arguments), "messages")
    logprobs = (chat.top_logprobs or 0) if chat.logprobs else None
    thought = reader.answer_format.thought
    end = thought.end if thought is not None and reader.opens_thought(tokens) else None
    structure = chat.structure()
    is_exact = structure is not None and not tools
    if forced := _forced(chat, tools):
        structure = _call_structure(chat, forced, reader.answer_format)
    elif structure is not None and tools:
        structure = _structure_or_call(structure, chat, tools, reader.answer_format)
    special = reader.answer_format.special
    grammar = structure.grammar(served.complaint, end, special) if structure else None
    request = _api_request(chat, [tokens], chat.max_completion_tokens, logprobs, served, grammar)
    continues = goes_on or is_exact
    syntax = _syntax(chat, tools, reader, is_thinking=end is not None, continues=continues)
    each = [replace(one, syntax=syntax, continues=continues) for one in request.requests]
    param = structure.param if structure else None
    return replace(request, requests=tuple(each), structure=param)


def _forced(chat: ChatBody, tools: Sequence[Tool]) -> list[Tool]:
    """Return the tools of which the answer must call one; none if it need not. Raises
    ``ApiError``."""
    param, choice = "tool_choice", chat.tool_choice
    if choice in (None, "auto", "none"):
        return []
    if choice == "required":
        if not tools:
            raise refused("tool_choice asks for a call, and there are no tools", param)
        return list(tools)
    function = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(function, dict) or choice.get("type") != "function":
        raise refused(
            f"tool_choice {shown(choice)} is not supported by this server: give 'auto', 'none', "
            "'required' or a function",
            param,
            "unsupported_parameter",
        )
    named = [tool for tool in tools if tool["function"]["name"] == function.get("name")]
    if not named:
        raise refused(f"tool_choice: {shown(function.get('name'))} is none of the tools", param)
    return named[:1]


def _call_structure(chat: ChatBody, tools: Sequence[Tool], known: AnswerFormat) -> Structure:
    """Return the structure of an answer that calls one of these tools. Raises ``ApiError``."""
    if known.calls is None:
        raise refused(
            f"tool_choice {shown(chat.tool_choice)}: this model writes calls in a format that "
            f"cannot be asked for: give 'auto' (those of {', '.join(KNOWN)} can)",
            "tool_choice",
            "unsupported_parameter",
        )
    parallel = chat.parallel_tool_calls is not False and not isinstance(chat.tool_choice, dict)
    rules = call_rules(tools, known.calls, known.special, parallel=parallel)
    return Structure("tool_choice", rules)


def _structure_or_call(
    structure: Structure, chat: ChatBody, tools: Sequence[Tool], known: AnswerFormat
) -> Structure:
    """Return the structure of an answer that has one, or calls tools. Raises ``ApiError``."""
    try:
        return structure.or_body(_call_structure(chat, tools, known).rules)
    except ApiError as error:
        why = str(error).partition(": give")[0]
        raise refused(
            f"{structure.param} and tools in one request: {why}: give one of the two", "tools"
        ) from None


def _syntax(
    chat: ChatBody,
    tools: Sequence[Tool],
    reader: PromptReader,
    *,
    is_thinking: bool,
    continues: bool,
) -> AnswerSyntax | None:
    """Return how to read the answer; None if all of it is said."""
    known = reader.answer_format
    if chat.reasoning_format == "none":
        known = replace(known, thought=None)
    is_thinking = is_thinking and known.thought is not None
    if not (is_thinking or tools or (known.thought is not None and not continues)):
        return None
    return AnswerSyntax(
        format=known,
        tools=tools,
        is_thinking=is_thinking,
        parallel=chat.parallel_tool_calls is not False,
        continues=continues,
    )


def read_completion(body: bytes, reader: PromptReader, served: ServedModel) -> ApiRequest:
    """Read the body of a request to /v1/completions. Raises ``ApiError``."""
    completion = parse_body(CompletionBody, body, served.names)
    # Before work is done for them.
    _check_number(len(completion.prompt) * (completion.n or 1), served)
    prompts = []
    for prompt in completion.prompt:
        if isinstance(prompt, str):
            tokens = tokens_of(partial(reader.text, prompt), "prompt")
        else:
            tokens = prompt
            _left(len(tokens), "prompt", served)
            check_vocabulary(tokens, "prompt", served)
        prompts.append(tokens)
    structure = completion.structure()
    grammar = structure.grammar(served.complaint, None, {}) if structure else None
    request = _api_request(completion, prompts, None, completion.logprobs, served, grammar)
    return replace(request, structure=structure.param if structure else None)


def _effort(effort: str | None) -> dict[str, Any]:
    """Return the arguments by which a chat template knows how long to think, if it does."""
    if effort is None:
        return {}
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


def tokens_of(read: Callable[[], tuple[int, ...]], param: str) -> tuple[int, ...]:
    """Return what a reader reads, which the body calls ``param``. Raises ``ApiError``."""
    try:
        return read()
    except PromptTooLong as error:
        raise _too_long(str(error), param) from None
    except UserError as error:
        raise refused(str(error), param) from None


def check_vocabulary(tokens: Sequence[int], param: str, served: ServedModel) -> None:
    """Raise ``ApiError`` for what is no token of the model: another would be read from memory that
    is not the model's."""
    for token in tokens:
        if not 0 <= token < served.vocabulary:
            most = served.vocabulary - 1
            raise refused(f"{param}: token ids are from 0 to {most}, not {shown(token)}", param)


def _check_number(requests: int, served: ServedModel) -> None:
    if requests > served.most_requests:
        raise refused(
            f"the request is for {requests} texts: "
            f"at most {served.most_requests} are served at a time",
            "n",
        )


def _api_request(
    body: RequestBody,
    prompts: Sequence[tuple[int, ...]],
    max_completion_tokens: int | None,
    logprobs: int | None,
    served: ServedModel,
    grammar: str | None,
) -> ApiRequest:
    n = body.n or 1
    _check_number(len(prompts) * n, served)
    check_vocabulary([token for token, _ in body.logit_bias], "logit_bias", served)
    given = {body.max_tokens, max_completion_tokens} - {None}
    if len(given) > 1:
        raise refused(
            f"max_tokens is {body.max_tokens} and max_completion_tokens {max_completion_tokens}: "
            "give one of them",
            "max_tokens",
        )
    most = max_completion_tokens or body.max_tokens
    param = "messages" if isinstance(body, ChatBody) else "prompt"
    requests = [
        GenerationRequest(
            tokens=tokens,
            max_tokens=_answer_tokens(most, len(tokens), param, served),
            sampling=replace(_sampling(body, number, tokens, logprobs, served), grammar=grammar),
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


def _answer_tokens(asked: int | None, prompt: int, param: str, served: ServedModel) -> int:
    """Return the tokens that an answer may have at most.

    The default gives way to a long prompt, but what was asked for is kept, or refused: in the words
    by which agents know that they must ask for less, or shorten their history.
    """
    left = _left(prompt, param, served)
    if asked is None:
        return min(served.defaults.max_tokens, left)
    if asked == ALL_THAT_FIT:
        return left
    if asked > left:
        raise _too_long(
            f"input length and `max_tokens` exceed context limit: {prompt} + {asked} > "
            f"{served.most_tokens}: ask for {left}, or -1 for as many as fit",
            "max_tokens",
        )
    return asked


def _left(prompt: int, param: str, served: ServedModel) -> int:
    """Return the tokens that are left to the answer to a prompt of so many."""
    left = served.most_tokens - prompt
    if left < 1:
        raise _too_long(
            f"the prompt is too long: {prompt} tokens > {served.most_tokens - 1} maximum",
            param,
        )
    return left


def _too_long(message: str, param: str) -> ApiError:
    return refused(message, param, "context_length_exceeded")


def _sampling(
    body: RequestBody,
    number: int,
    prompt: tuple[int, ...],
    logprobs: int | None,
    served: ServedModel,
) -> SamplingParams:
    """Return the sampling parameters of answer ``number`` to one prompt."""
    params = replace(served.defaults.sampling, **body.sampling)
    looked_back = params.looked_back
    return replace(
        params,
        temp=params.temp if params.temp >= COLDEST else 0.0,
        # mlx-lm calls all tokens 0.
        top_k=params.top_k if 0 < params.top_k < served.vocabulary else 0,
        context=prompt[-looked_back:] if looked_back else (),
        seed=None if body.seed is None else body.seed % 2**64,
        stream=next(served.streams) if body.seed is None else number,
        logprobs=logprobs,
    )
