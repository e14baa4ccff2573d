"""Deltas of texts in the forms of OpenAI's API."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from shardmlx.inference.drafts import DraftCounts
from shardmlx.inference.sampling_params import SampledToken
from shardmlx.server.answer_parts import AnswerPart
from shardmlx.server.chat_request import ApiRequest
from shardmlx.server.openai_responses import ChatReply, CompletionReply
from shardmlx.server.request_queue import Delta, GenerationRequest

WORDS: Mapping[int, str] = {1: "Hi", 2: " there", 3: "\N{REPLACEMENT CHARACTER}", 4: "é", 5: "Hi"}


def said(text: str) -> tuple[AnswerPart, ...]:
    return (AnswerPart("said", text),)


def order(
    *, texts: int = 1, n: int = 1, include_usage: bool = False, logprobs: int | None = None
) -> ApiRequest:
    requests = [
        GenerationRequest(tokens=(number // n,) * (10 + number // n), max_tokens=9)
        for number in range(texts)
    ]
    return ApiRequest(
        requests=tuple(requests),
        n=n,
        stream=True,
        include_usage=include_usage,
        logprobs=logprobs,
    )


def chat(**options: Any) -> ChatReply:
    return ChatReply(order(**options), "ours", WORDS.__getitem__)


def completion(**options: Any) -> CompletionReply:
    return CompletionReply(order(**options), "ours", WORDS.__getitem__)


def chunks(reply: ChatReply, *deltas: tuple[int, Delta]) -> list[dict[str, Any]]:
    sent = [*reply.opening()]
    for index, delta in deltas:
        sent += reply.add(index, delta)
    sent += reply.closing()
    return [{name: chunk[name] for name in chunk.keys() - reply.head.keys()} for chunk in sent]


def delta(delta: dict[str, Any], reason: str | None = None, index: int = 0) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
    return {"object": "chat.completion.chunk", "choices": [choice]}


def test_a_completion_in_chunks() -> None:
    def part(text: str, reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        return {"object": "text_completion", "choices": [choice]}

    deltas = [Delta(said("Hi"), (), 1), Delta(said(" there"), (), 3, 0, "length")]
    assert chunks(completion(), *((0, delta) for delta in deltas)) == [
        part("Hi", None),
        part(" there", None),
        part("", "length"),
    ]


def test_several_texts_are_told_apart_by_their_index() -> None:
    deltas = [
        (1, Delta(said("b"), (), 1)),
        (0, Delta(said("a"), (), 1, 0, "stop")),
        (1, Delta(said("c"), (), 2, 0, "length")),
    ]
    assert chunks(chat(texts=2, n=2), *deltas) == [
        delta({"role": "assistant", "content": None}, index=0),
        delta({"role": "assistant", "content": None}, index=1),
        delta({"content": "b"}, index=1),
        delta({"content": "a"}, index=0),
        delta({}, "stop", index=0),
        delta({"content": "c"}, index=1),
        delta({}, "length", index=1),
    ]


def predictions(accepted: int, rejected: int) -> dict[str, int]:
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": rejected,
    }


def test_usage_comes_last_and_is_null_before() -> None:
    *before, last = chunks(completion(include_usage=True), (0, Delta(said("Hi"), (), 1, 8, "stop")))
    assert [chunk["usage"] for chunk in before] == [None, None]
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 1,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": predictions(0, 0),
    }


def test_a_prompt_counts_once_however_many_texts_are_made_of_it() -> None:
    reply = completion(texts=4, n=2)
    for index, cached in enumerate((3, 9, 5, 5)):
        drafts = DraftCounts(1, 4, index)
        list(reply.add(index, Delta(said("x"), (), 2 + index, cached, "stop", drafts=drafts)))
    assert reply.usage == {
        "prompt_tokens": 10 + 11,
        "completion_tokens": 2 + 3 + 4 + 5,
        "total_tokens": 35,
        "prompt_tokens_details": {"cached_tokens": 3 + 5},
        "completion_tokens_details": predictions(0 + 1 + 2 + 3, 4 + 3 + 2 + 1),
    }


def test_whole_replies() -> None:
    replies = [chat(), completion()]
    for reply in replies:
        for delta in (
            Delta(said("Hi"), (), 1),
            Delta(said(" there"), (), 2),
            Delta((), (), 3, 0, "stop"),
        ):
            list(reply.add(0, delta))
    of_chat, of_completion = (reply.whole for reply in replies)
    assert of_chat["object"] == "chat.completion"
    assert of_chat["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi there", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert of_chat["usage"]["completion_tokens"] == 3
    assert of_completion["object"] == "text_completion"
    assert of_completion["choices"] == [
        {"index": 0, "text": "Hi there", "logprobs": None, "finish_reason": "stop"}
    ]


def in_chat(chunk: dict[str, Any]) -> dict[str, Any]:
    """The log-probabilities in the form of a chat; completions have other fields beside."""
    logprobs = chunk["choices"][0]["logprobs"]
    return {"content": logprobs["content"]}


def test_logprobs_of_completions_are_four_lists_as_well() -> None:
    """A part of a character has no text yet: the next token begins where it does."""
    reply = completion(logprobs=2)
    sampled = (
        SampledToken(1, -0.25, ((1, -0.25), (4, -1.5))),
        SampledToken(3, -0.5, ((3, -0.5), (2, -2.0))),
        SampledToken(2, -3.0, ((5, -0.125), (1, -0.25))),
    )
    deltas = [
        Delta(said("Hi"), sampled[:1], 1, begins=0),
        Delta((), sampled[1:2], 2, begins=2),
        Delta(said("é there"), sampled[2:], 3, 0, "length", begins=2),
    ]
    sent = [chunk for each in deltas for chunk in reply.add(0, each)]
    told = [chunk["choices"][0]["logprobs"] for chunk in sent]
    lists: dict[str, list[Any]] = {
        "tokens": ["Hi", "\ufffd", " there"],
        "token_logprobs": [-0.25, -0.5, -3.0],
        "top_logprobs": [
            {"Hi": -0.25, "é": -1.5},
            {"\ufffd": -0.5, " there": -2.0},
            {"Hi": -0.125, " there": -3.0},  # two tokens have the first text
        ],
        "text_offset": [0, 2, 2],
    }
    whole = reply.whole["choices"][0]["logprobs"]
    for name, values in lists.items():
        assert whole[name] == values
        assert [each[name] for each in told if each is not None] == [[value] for value in values]


@pytest.mark.parametrize("kind", [chat, completion])
def test_logprobs(kind: Callable[..., ChatReply]) -> None:
    reply = kind(logprobs=2)
    sampled = SampledToken(1, -0.25, ((1, -0.25), (4, -1.5)))
    (chunk,) = reply.add(0, Delta(said("Hi"), (sampled,), 1))
    expected = {
        "content": [
            {
                "token": "Hi",
                "logprob": -0.25,
                "bytes": [72, 105],
                "top_logprobs": [
                    {"token": "Hi", "logprob": -0.25, "bytes": [72, 105]},
                    {"token": "é", "logprob": -1.5, "bytes": [195, 169]},
                ],
            }
        ]
    }
    assert in_chat(chunk) == expected
    list(reply.add(0, Delta((), (), 2, 0, "stop")))
    assert in_chat(reply.whole) == expected
    # A part of a character has no bytes and no text yet, and still its logprob.
    (chunk,) = kind(logprobs=0).add(0, Delta((), (SampledToken(3, -1.0),), 1))
    (token,) = chunk["choices"][0]["logprobs"]["content"]
    assert (token["bytes"], token["logprob"]) == (None, -1.0)


@pytest.mark.parametrize("impossible", [-math.inf, math.nan])
def test_json_has_no_infinity(impossible: float) -> None:
    (chunk,) = chat(logprobs=1).add(
        0, Delta(said("Hi"), (SampledToken(1, -0.5, ((4, impossible),)),), 1)
    )
    json.dumps(chunk, allow_nan=False)
    (token,) = chunk["choices"][0]["logprobs"]["content"]
    assert token["top_logprobs"][0]["logprob"] == -9999.0
