"""A request as all APIs ask for it, and what is generated for it. No MLX, no MPI.

Each API has a reader that fills a ``ChatRequest``: errors have the path of its own fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from shardmlx.errors import PromptTooLong, UserError
from shardmlx.inference.answer_format import AnswerFormat, Tool
from shardmlx.inference.prompts import PromptEncoder
from shardmlx.inference.sampling_params import SamplingParams
from shardmlx.server.accepted_fields import Json
from shardmlx.server.answer_parser import AnswerSyntax
from shardmlx.server.call_ids import with_short_ids
from shardmlx.server.client_tools import ClientTool
from shardmlx.server.model_names import ModelNames
from shardmlx.server.openai_errors import ApiError, refused, shown
from shardmlx.server.request_bodies import ALL_THAT_FIT, MOST, SamplingBody
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
    grammar, empty if nothing is; it is None where answers cannot keep to one. ``adapter`` is the
    name of the one that the model was loaded with.
    """

    names: ModelNames
    adapter: str | None = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """The answers that a request asks for: ``n`` to each prompt.

    ``most`` are the tokens of one, if the request says it, in the field ``most_field``; prompts are
    in the field ``prompt_field``.
    """

    sampling: SamplingBody
    prompt_field: str = "messages"
    most: int | None = None
    most_field: str = "max_tokens"
    n: int = 1
    stop: Sequence[str] = ()
    logprobs: int | None = None
    stream: bool = False
    include_usage: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """A choice of tools: the model is told of ``only`` those of these names, or of all; it ``must``
    call one, or may; if one is ``named``, it must call that one."""

    only: Sequence[str] | None = None
    must: bool = False
    named: str | None = None

    def offered(self, tools: Sequence[Tool]) -> Sequence[Tool]:
        """Return the tools of which the model is told. Raises ``ApiError``."""
        if self.only is None:
            return tools
        for name in self.only:
            _tool_called(tools, name)
        return [tool for tool in tools if tool["function"]["name"] in self.only]

    def forced(self, tools: Sequence[Tool]) -> Sequence[Tool]:
        """Return the tools of which the answer must call one, if it must. Raises ``ApiError``."""
        if self.named is not None:
            return [_tool_called(tools, self.named)]
        if self.must and not tools:
            raise refused("tool_choice asks for a call, and there are no tools", "tool_choice")
        return tools if self.must else []


CHOICES: Mapping[str, ToolChoice] = {
    "auto": ToolChoice(),
    "none": ToolChoice(only=()),
    "required": ToolChoice(must=True),
}
"""OpenAI's words for choices."""


def choice_refused(kind: str) -> ApiError:
    """Return the error for a choice of tools that OpenAI's APIs have, and this server has not."""
    return refused(
        f"tool_choice {shown(kind)} is not supported by this server: give 'auto', 'none', "
        "'required', a function or allowed_tools",
        "tool_choice",
        "unsupported_parameter",
    )


def _tool_called(tools: Sequence[Tool], name: str) -> Tool:
    """Return the tool of this name. Raises ``ApiError``."""
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    raise refused(f"tool_choice: {shown(name)} is none of the tools", "tool_choice")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request for an answer to a chat, whichever API asked for it.

    ``messages`` and ``tools`` are as a chat template takes them, ``arguments`` what it is given
    beside them. If the chat ``goes_on``, so does the answer from its last message. Calls of tools
    may be ``parallel``; a stream has their arguments ``in_pieces``, or whole.
    """

    options: AnswerOptions
    messages: Sequence[Json]
    tools: Sequence[Tool] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    parallel: bool = True
    arguments: Json = field(default_factory=dict)
    goes_on: bool = False
    structure: Structure | None = None
    in_pieces: bool = True

    def read(self, served: ServedModel) -> ApiRequest:
        """Return the requests for generation. Raises ``ApiError``."""
        if not self.messages:
            where = self.options.prompt_field
            raise refused(f"{where}: give at least one message", where)
        known = served.encoder.answer_format
        tools = self.choice.offered(self.tools)
        tokens = tokens_of(partial(self._tokens, served.encoder, tools), self.options.prompt_field)
        thought_end = None
        if known.thought is not None and served.encoder.opens_thought(tokens):
            thought_end = known.thought.end
        structure = self._structure(tools, known)
        grammar = None
        if structure is not None:
            grammar = structure.grammar(served.complaint, thought_end, known.special)
        # An answer with a structure is said to the letter.
        continues = self.goes_on or (structure is not None and not tools)
        has_parts = (
            thought_end is not None or tools or (known.thought is not None and not continues)
        )
        syntax = AnswerSyntax(
            format=known,
            tools=tools,
            is_thinking=thought_end is not None,
            parallel=self.parallel and known.takes_several,
            continues=continues,
            in_pieces=self.in_pieces and self.options.stream,
        )
        return requests_of(
            self.options,
            [tokens],
            served,
            grammar=grammar,
            syntax=syntax if has_parts else None,
            continues=continues,
        )

    def _tokens(self, encoder: PromptEncoder, tools: Sequence[Tool]) -> tuple[int, ...]:
        """Return the tokens of the chat, with other ids of calls where the template does not take
        those of another server. Raises ``UserError``."""
        arguments = self.arguments
        if self.goes_on:
            arguments = {**arguments, "continue_final_message": True}
        try:
            return encoder.chat(self.messages, tools=tools, **arguments)
        except PromptTooLong:
            raise
        except UserError as error:
            renamed = with_short_ids(self.messages)
            if renamed == self.messages:
                raise
            try:
                return encoder.chat(renamed, tools=tools, **arguments)
            except PromptTooLong:
                raise
            except UserError:
                raise error from None

    def _structure(self, tools: Sequence[Tool], known: AnswerFormat) -> Structure | None:
        """Return the structure that an answer must have; None if any will do. Raises
        ``ApiError``."""
        if forced := self.choice.forced(tools):
            return Structure("tool_choice", self._call_rules(forced, known))
        if self.structure is None or not tools:
            return self.structure
        return self.structure.or_body(self._call_rules(tools, known))

    def _call_rules(self, tools: Sequence[Tool], known: AnswerFormat) -> list[str]:
        """Return the rules of an answer that calls one of these tools."""
        assert known.calls is not None, "a model with a chat template has a format"
        parallel = self.parallel and self.choice.named is None
        return call_rules(tools, known.calls, known.special, parallel=parallel)


def tokens_of(read: Callable[[], tuple[int, ...]], param: str) -> tuple[int, ...]:
    """Return the tokens of the field that the body calls ``param``. Raises ``ApiError``."""
    try:
        return read()
    except UserError as error:
        code = TOO_LONG if isinstance(error, PromptTooLong) else None
        raise refused(str(error), param, code) from None


def requests_of(
    options: AnswerOptions,
    prompts: Sequence[tuple[int, ...]],
    served: ServedModel,
    *,
    grammar: str | None = None,
    syntax: AnswerSyntax | None = None,
    continues: bool = False,
) -> ApiRequest:
    """Return the requests for answers to these prompts. Raises ``ApiError``."""
    served.check_number(len(prompts) * options.n)
    check_bias = partial(served.encoder.checked, options.sampling.logit_bias, "logit_bias")
    tokens_of(check_bias, "logit_bias")
    requests = [
        GenerationRequest(
            tokens=tokens,
            max_tokens=_answer_tokens(options, len(tokens), served),
            sampling=replace(
                _sampling(options.sampling, number, tokens, served),
                logprobs=options.logprobs,
                grammar=grammar,
            ),
            stop=tuple(filter(None, options.stop)),
            syntax=syntax,
            continues=continues,
        )
        for tokens in prompts
        for number in range(options.n)
    ]
    return ApiRequest(
        requests=tuple(requests),
        n=options.n,
        stream=options.stream,
        include_usage=options.include_usage,
        logprobs=options.logprobs,
    )


def _answer_tokens(options: AnswerOptions, prompt: int, served: ServedModel) -> int:
    left = served.left(prompt, options.prompt_field)
    asked = options.most
    if asked is None:
        return min(served.max_tokens, left)
    if asked == ALL_THAT_FIT:
        return left
    if asked > left:  # in the words by which agents know that they must shorten their history
        raise refused(
            f"input length and `max_tokens` exceed context limit: {prompt} + {asked} > "
            f"{served.most_tokens}: ask for {left}, or -1 for as many as fit",
            options.most_field,
            TOO_LONG,
        )
    return asked


def _sampling(
    body: SamplingBody, number: int, prompt: tuple[int, ...], served: ServedModel
) -> SamplingParams:
    params = replace(served.sampling, **body.sampling)
    looked_back = params.looked_back
    vocabulary = served.encoder.vocabulary
    return replace(
        params,
        temp=params.temp if params.temp >= COLDEST else 0.0,
        # mlx-lm calls all tokens 0.
        top_k=params.top_k if 0 < params.top_k < (vocabulary or MOST) else 0,
        context=prompt[-looked_back:] if looked_back else (),
        seed=None if body.seed is None else body.seed % 2**64,
        stream=next(served.streams) if body.seed is None else number,
    )
