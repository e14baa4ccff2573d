"""What is read of a request's body, and what is refused."""

import json
import re
from itertools import count
from typing import Any

import pytest
from pydantic import ValidationError

from shardmlx.inference.sampling_params import SamplingParams
from shardmlx.server.answer_parser import AnswerParser
from shardmlx.server.answer_parts import AnswerPart
from shardmlx.server.chat_request import ApiRequest, ServedModel
from shardmlx.server.model_names import ModelNames
from shardmlx.server.openai_errors import ApiError
from shardmlx.server.openai_requests import ChatBody, read_chat, read_completion
from shardmlx.server.request_queue import GenerationRequest
from tests.helpers.http_serving import Agent, Letters

HELLO = tuple(map(ord, "hello"))


def terms(**changes: Any) -> ServedModel:
    return ServedModel(
        **{
            "names": ModelNames(("ours",)),
            "encoder": Letters(),
            "most_tokens": 600,
            "most_requests": 8,
            **changes,
        }
    )


def chat(body: dict[str, Any] | None = None, /, **parameters: Any) -> ApiRequest:
    messages = [{"role": "user", "content": "hello"}]
    whole = {"messages": messages, **(body or {}), **parameters}
    return read_chat(json.dumps(whole).encode(), terms())


def completion(**parameters: Any) -> ApiRequest:
    whole = {"prompt": "hello", **parameters}
    return read_completion(json.dumps(whole).encode(), terms())


def refusal(kind: Any, /, **parameters: Any) -> tuple[str | None, str]:
    with pytest.raises(ApiError) as caught:
        kind(**parameters)
    assert caught.value.status == 400
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 300
    return caught.value.param, message


def said_by(**message: Any) -> dict[str, Any]:
    return {"messages": [message]}


def only(order: ApiRequest) -> GenerationRequest:
    (request,) = order.requests
    return request


def test_a_request_that_says_nothing_gets_the_servers_defaults() -> None:
    body = b'{"messages": [{"role": "user", "content": "hello"}]}'
    sampling = SamplingParams(temp=0.7, top_p=0.9, min_p=0.1, top_k=40)
    order = read_chat(body, terms(max_tokens=99, sampling=sampling))
    request = GenerationRequest(tokens=HELLO, max_tokens=99, sampling=sampling)
    assert order == ApiRequest(
        requests=(request,), n=1, stream=False, include_usage=False, logprobs=None
    )


def test_all_that_is_understood() -> None:
    alike: dict[str, Any] = {
        "top_p": 0.5,
        "min_p": 0.25,
        "top_k": 3,
        "seed": 11,
        "repetition_penalty": 1.5,
        "repetition_context_size": 2,
        "presence_penalty": -1.0,
        "presence_context_size": 3,
        "frequency_penalty": 0.5,
        "frequency_context_size": 4,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
    }
    order = chat(
        model="ours",
        max_tokens=7,
        temperature=1,
        stop=["a", "b"],
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        logit_bias={"65": -100, "66": 2.5},
        logprobs=True,
        top_logprobs=5,
        **alike,
    )
    sampling = SamplingParams(
        temp=1.0,
        logit_bias=((65, -100.0), (66, 2.5)),
        context=tuple(map(ord, "ello")),
        logprobs=5,
        **alike,
    )
    assert only(order) == GenerationRequest(
        tokens=HELLO, max_tokens=7, stop=("a", "b"), sampling=sampling
    )
    assert order.stream
    assert order.include_usage
    assert order.logprobs == 5


def test_what_is_said_in_other_words() -> None:
    assert only(chat(max_completion_tokens=3, max_tokens=3)).max_tokens == 3
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert only(chat(messages=[{"role": "user", "content": parts}])).tokens == HELLO
    assert only(chat(temperature=1e-9)).sampling.temp == 0
    assert only(chat(chat_template_kwargs={"instead": "x"})).tokens == (ord("x"),)
    assert only(chat(logprobs=True)).sampling.logprobs == 0
    assert chat(seed=-1) == chat(logprobs=False, model="", stop=None, tools=None)
    (one, other) = chat(seed=-1, n=2).requests
    assert one.sampling.stream != other.sampling.stream


def test_penalties_look_back_into_the_prompt_as_far_as_mlx_lm_does() -> None:
    prompt = "0123456789abcdefghijklmnop"
    sampling = only(completion(prompt=prompt, presence_penalty=1)).sampling
    assert sampling.context == tuple(map(ord, prompt[-20:]))


def test_of_many_texts_each_has_a_random_stream_of_its_own() -> None:
    seeded = completion(prompt=["a", "b"], n=2, seed=5)
    assert [chr(each.tokens[0]) for each in seeded.requests] == ["a", "a", "b", "b"]
    assert [each.sampling.seed for each in seeded.requests] == [5, 5, 5, 5]
    assert [each.sampling.stream for each in seeded.requests] == [0, 1, 0, 1]
    assert seeded.n == 2


def test_requests_without_a_seed_share_no_random_stream() -> None:
    of_the_server = terms(streams=count())
    orders = [read_completion(b'{"prompt": "a", "n": 2}', of_the_server) for _ in range(2)]
    params = [each.sampling for order in orders for each in order.requests]
    assert [each.seed for each in params] == [None] * 4
    assert [each.stream for each in params] == [0, 1, 2, 3]


BEGUN = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "The answer is"}]


@pytest.mark.parametrize("more", [{}, {"add_generation_prompt": False}])
def test_an_answer_may_go_on_from_the_last_message(more: dict[str, Any]) -> None:
    encoder = Agent()
    body = {"messages": BEGUN, "continue_final_message": True, **more}
    (request,) = read_chat(json.dumps(body).encode(), terms(encoder=encoder)).requests
    assert encoder.goes_on
    assert encoder.messages == BEGUN
    assert request.continues
    assert list(AnswerParser(request.syntax).take(" yes", is_last=True)) == [
        AnswerPart("said", " yes")
    ]


def test_an_answer_with_a_structure_is_said_to_the_letter() -> None:
    body = {"messages": BEGUN[:1], "structured_outputs": {"choice": [" <think>a</think>"]}}
    served = terms(encoder=Agent(), complaint=lambda grammar: "")
    (request,) = read_chat(json.dumps(body).encode(), served).requests
    parts = AnswerParser(request.syntax)
    said = [AnswerPart("said", " <think>a</think>")]
    assert list(parts.take(" <think>a</think>", is_last=True)) == said
    assert request.continues


@pytest.mark.parametrize("top_k", [-1, 0, 128, 100_000])
def test_top_k_of_all_tokens_leaves_none_out(top_k: int) -> None:
    assert only(chat(top_k=top_k)).sampling.top_k == 0


def test_the_default_gives_way_to_a_long_prompt_but_not_what_was_asked_for() -> None:
    assert only(completion(prompt=500 * "a")).max_tokens == 100
    assert only(completion(prompt=500 * "a", max_tokens=100)).max_tokens == 100
    assert only(completion(prompt=500 * "a", max_tokens=-1)).max_tokens == 100


@pytest.mark.parametrize(
    ("kind", "parameters", "param", "numbers"),
    [
        (completion, {"prompt": 600 * "a"}, "prompt", "600 tokens > 599 maximum"),
        (completion, {"prompt": [10**9] * 600}, "prompt", "600"),  # before each is looked at
        (chat, said_by(role="user", content=700 * "a"), "messages", "700"),
        (completion, {"prompt": 500 * "a", "max_tokens": 101}, "max_tokens", "500 + 101 > 600"),
    ],
)
def test_what_can_never_be_served_is_refused_with_the_numbers(
    kind: Any, parameters: dict[str, Any], param: str, numbers: str
) -> None:
    with pytest.raises(ApiError, match=re.escape(numbers)) as caught:
        kind(**parameters)
    assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
def test_prompts_are_texts_or_tokens(prompt: Any, prompts: list[str]) -> None:
    order = completion(prompt=prompt)
    assert ["".join(map(chr, each.tokens)) for each in order.requests] == prompts


@pytest.mark.parametrize("prompt", [[], [[]], {}, 5, [1, "a"], [1.5], [True], [[1], []]])
def test_other_prompts_are_refused(prompt: Any) -> None:
    assert refusal(completion, prompt=prompt)[0] == "prompt"


def test_logprobs_of_completions_are_a_number() -> None:
    assert only(completion(logprobs=3)).sampling.logprobs == 3
    assert only(completion(logprobs=0)).sampling.logprobs == 0
    assert only(completion()).sampling.logprobs is None
    assert only(completion(logprobs=False)).sampling.logprobs is None


@pytest.mark.parametrize(
    ("parameters", "param", "named"),
    [
        ({"temperature": "hot"}, "temperature", "(it is 'hot')"),
        ({"temperature": -1}, "temperature", "(it is -1)"),
        ({"top_p": 1.5}, "top_p", "(it is 1.5)"),
        ({"top_p": -0.5}, "top_p", "(it is -0.5)"),
        ({"logit_bias": [[5, 1]]}, "logit_bias", ""),
        ({"max_tokens": 0}, "max_tokens", "(it is 0)"),
        ({"max_tokens": "5"}, "max_tokens", "(it is '5')"),
        ({"stream": "yes"}, "stream", "(it is 'yes')"),
        ({"stop": 5}, "stop", "(it is 5)"),
        ({"stop": [5]}, "stop.0", "(it is 5)"),
        ({"stop": 17 * ["a"]}, "stop", "at most 16 items"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a", "(it is 'a')"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "(it is 101)"),
        ({"logit_bias": {"128": 1}}, "logit_bias", "token 128"),
        ({"n": 9}, "n", "9 texts: at most 8"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"messages": []}, "messages", "messages: "),
        ({"messages": None}, "messages", "missing"),
        (said_by(role="user"), "messages.0.content", "missing"),
        (said_by(role="function", content="x"), "messages.0.role", "(it is 'function')"),
        (
            said_by(role="user", content=[{"type": "image_url"}]),
            "messages.0.content.0.type",
            "image_url",
        ),
        (said_by(role="user", content=[{"type": "text"}]), "messages.0.content.0.text", "no text"),
        (said_by(role="user", content=[5]), "messages.0.content", "parts"),
        (said_by(role="assistant", content="x"), "messages", "begin with a user"),
        (said_by(role="user", content=""), "messages", "no tokens"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"max_completion_tokens": 3, "max_tokens": 4}, "max_tokens", "4"),
        ({"continue_final_message": True}, "messages", "'user'"),
        ({"add_generation_prompt": False}, "add_generation_prompt", "not supported"),
        ({"chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs", "tokenize is no"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "tools is no"),
        ({"prompt": [5, 128]}, "prompt", "token 128"),
        ({"prompt": [-1]}, "prompt", "token -1"),
        ({"prompt": ["a", "b", "c"], "n": 3}, "n", "9 texts: at most 8"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "logprobs"),
        ({"prompt": "a", "echo": True}, "echo", "echo"),
    ],
)
def test_one_line_says_what_is_wrong(parameters: dict[str, Any], param: str, named: str) -> None:
    where, said = refusal(completion if "prompt" in parameters else chat, **parameters)
    assert where == param
    assert named in said


@pytest.mark.parametrize(
    "parameters",
    [
        {"modalities": ["text", "audio"]},
        {"best_of": 3},
        {"a_parameter_of_tomorrow": 1},
        {"temp": 1},
        {"do_sample": False},
        {"skip_special_tokens": False},
        {"think": False},
    ],
)
def test_what_would_change_the_text_is_refused_by_name(parameters: dict[str, Any]) -> None:
    (name,) = parameters
    assert refusal(chat, **parameters)[0] == name


def test_also_within_messages_and_stream_options() -> None:
    for name in ("function_call", "prefix", "partial"):
        message = {"role": "assistant", "content": "x", name: ["y"]}
        assert refusal(chat, messages=[message])[0] == f"messages.0.{name}"
    options = {"continuous_usage_stats": True}
    param, _ = refusal(chat, stream=True, stream_options=options)
    assert param == "stream_options.continuous_usage_stats"


@pytest.mark.parametrize(
    "parameters",
    [
        {"user": "ann", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}},
        {"modalities": ["text"], "best_of": 1, "n": 1, "do_sample": True},
        {"stop": "", "top_logprobs": 0, "logprobs": False},
        {"stop": ["", ""], "stream_options": {}, "presence_penalty": 0},
        {"a_switch_of_tomorrow": False, "its_list": [], "its_map": {}, "its_text": "", "its_0": 0},
        {"a_parameter_of_tomorrow": None, "stream_options": {"include_usage": False}},
    ],
)
def test_what_changes_nothing_is_let_pass(parameters: dict[str, Any]) -> None:
    assert only(chat(**parameters)) == GenerationRequest(tokens=HELLO, max_tokens=512)


def test_whole_numbers_may_have_a_point() -> None:
    order = chat(max_tokens=8.0, top_k=40.0, seed=1.0, n=2.0, top_logprobs=2.0, logprobs=True)
    (first, _) = order.requests
    assert (first.max_tokens, first.sampling.top_k, first.sampling.seed) == (8, 40, 1)
    assert refusal(chat, max_tokens=8.5)[0] == "max_tokens"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe{}",
        b'"text"',
        b"[" * 100_000,
        b'{"prompt": "a", "max_tokens": 1' + 9999 * b"0" + b"}",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "logit_bias": {"1": 1e999}}',
        b'{"prompt": "a", "logit_bias": {"' + 9999 * b"9" + b'": 1}}',
        b'{"prompt": [' + 400 * b"9" + b"]}",
        b'{"prompt": "a", "' + 9999 * b"x" + b'": 1}',
    ],
)
def test_bodies_that_mean_no_good_are_refused_in_a_line(body: bytes) -> None:
    refusal(lambda: read_completion(body, terms()))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", 1000 * [{}]),
        ("messages", [{"role": "assistant", "content": "a", "tool_calls": 1000 * [{}]}]),
        ("tools", 1000 * [{"type": "function"}]),
        ("structured_outputs", {"choice": 1000 * [1]}),
        ("chat_template_kwargs", {f"a{n}": [] for n in range(1000)}),
    ],
)
def test_of_many_faults_the_first_is_enough(field: str, value: Any) -> None:
    """Each takes time in which no other thread runs."""
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}], field: value})
    assert caught.value.error_count() == 1
