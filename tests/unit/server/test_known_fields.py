"""One rule for objects at every depth of a request, in each API: a field is known, or asks for
nothing, or is refused by its path."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from functools import reduce
from typing import Any

import pytest

from shardmlx.server.anthropic_api import read_message
from shardmlx.server.chat_request import ApiRequest, ServedModel
from shardmlx.server.model_names import ModelNames
from shardmlx.server.openai_errors import ApiError
from shardmlx.server.openai_requests import read_chat, read_completion
from shardmlx.server.responses_api import read_response
from tests.helpers.http_serving import Agent

SCHEMA: Any = {"type": "object", "properties": {"zz": {"const": 7}}, "required": ["zz"]}
PARAMETERS: Any = {"type": "object", "properties": {"at": {"type": "string"}}}
FUNCTION: Any = {"name": "look", "description": "d", "parameters": PARAMETERS, "strict": True}
CACHED: Any = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}

CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief.", **CACHED}]},
        {"role": "user", "content": [{"type": "text", "text": "?"}], "name": "Ann"},
        {
            "role": "assistant",
            "content": "I look",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "fog"}]},
        {"role": "user", "content": "hi."},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "auto",
            "tools": [{"type": "function", "function": {"name": "look"}}],
        },
    },
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "x", "description": "d", "strict": True, "schema": SCHEMA},
    },
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "metadata": {"any": "thing"},
    "prediction": {"type": "content", "content": "any"},
}
COMPLETION: dict[str, Any] = {
    "prompt": "hi.",
    "structured_outputs": {"choice": ["a"], "disable_fallback": True},
    "stream": True,
    "stream_options": {"include_usage": True},
}
RESPONSE: dict[str, Any] = {
    "input": [
        {
            "type": "message",
            "role": "user",
            "status": "completed",
            "content": [{"type": "input_text", "text": "?"}],
        },
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "a",
            "output": [{"type": "input_text", "text": "fog"}],
        },
        {"role": "user", "content": "hi."},
    ],
    "tools": [
        {"type": "function", **FUNCTION, "allowed_callers": ["direct"]},
        {
            "type": "custom",
            "name": "patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
        },
        {"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTION}]},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "function", "name": "look"}, {"type": "custom", "name": "patch"},
    ]},
    "text": {
        "format": {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA},
        "verbosity": "low",
    },
    "reasoning": {"effort": "low", "summary": "auto"},
    "stream": True,
    "stream_options": {"include_obfuscation": False},
}  # fmt: skip
MESSAGE: dict[str, Any] = {
    "max_tokens": 9,
    "system": [{"type": "text", "text": "Be brief.", **CACHED}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "?", **CACHED}]},
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "a", "name": "look", "input": {}, **CACHED},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "a",
                    "content": [{"type": "text", "text": "fog", **CACHED}],
                    **CACHED,
                },
                {"type": "text", "text": "hi."},
            ],
        },
    ],
    "tools": [
        {
            "name": "look",
            "input_schema": PARAMETERS,
            "type": "custom",
            "eager_input_streaming": True,
            "defer_loading": True,
            "allowed_callers": ["direct"],
            **CACHED,
        }
    ],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "output_config": {
        "effort": "low",
        "format": {"type": "json_schema", "schema": SCHEMA},
        "task_budget": {"type": "tokens", "total": 9000},
    },
    "metadata": {"user_id": "any"},
}

Read = Callable[[bytes, ServedModel], ApiRequest]
APIS: dict[str, tuple[Read, dict[str, Any]]] = {
    "chat": (read_chat, CHAT),
    "completion": (read_completion, COMPLETION),
    "response": (read_response, RESPONSE),
    "message": (read_message, MESSAGE),
}

OPAQUE = {
    "chat": (
        "messages.2", "messages.2.tool_calls.0", "messages.2.tool_calls.0.function", "metadata",
        "prediction",
    ),
    "completion": (),
    "response": ("input.1",),
    "message": (
        "messages.1", "messages.1.content.0", "messages.1.content.0.input", "metadata",
        "output_config.task_budget",
    ),
}  # fmt: skip
"""Objects that may have any field: what a server has said, and what is ignored as a whole."""

WHOLE = ("cache_control", "schema", "parameters", "input_schema")
"""Objects whose fields are no affair of the server, or another's."""


def terms(encoder: Agent) -> ServedModel:
    return ServedModel(
        names=ModelNames(("ours",)),
        encoder=encoder,
        most_tokens=600,
        most_requests=8,
        complaint=lambda grammar: "",
    )


def read(api: str, body: Any) -> ApiRequest:
    return APIS[api][0](json.dumps(body).encode(), terms(Agent()))


def places(value: Any, where: str = "") -> list[str]:
    """The paths of all objects in a body."""
    if isinstance(value, list):
        return [e for at, each in enumerate(value) for e in places(each, f"{where}.{at}")]
    if not isinstance(value, dict):
        return []
    inner = (
        place
        for name, each in value.items()
        if name not in WHOLE
        for place in places(each, f"{where}.{name}" if where else name)
    )
    return [where, *inner]


def with_field(body: Any, place: str, name: str, value: Any) -> Any:
    changed = deepcopy(body)
    steps = (int(each) if each.isdecimal() else each for each in filter(None, place.split(".")))
    reduce(lambda inner, step: inner[step], steps, changed)[name] = value
    return changed


ALL = [(api, place) for api, (_, body) in APIS.items() for place in places(body)]


def test_bodies_as_clients_send_them_are_read() -> None:
    for api, (_, body) in APIS.items():
        assert read(api, body).stream == bool(body.get("stream")), api
    assert len(ALL) > 50


@pytest.mark.parametrize(("api", "place"), ALL)
def test_an_unknown_field_is_refused_by_its_path_in_the_api_that_was_called(
    api: str, place: str
) -> None:
    body = APIS[api][1]
    empty: list[Any] = [None, False, 0, "", [], {}]
    for nothing in empty:
        read(api, with_field(body, place, "of_tomorrow", nothing))
    asking = with_field(body, place, "of_tomorrow", {"a": 1})
    if place in OPAQUE[api]:
        read(api, asking)
        return
    with pytest.raises(ApiError) as caught:
        read(api, asking)
    path = f"{place}.of_tomorrow" if place else "of_tomorrow"
    assert (caught.value.status, caught.value.code) == (400, "unsupported_parameter")
    assert caught.value.param == path
    assert str(caught.value).startswith(f"{path} is not supported")


@pytest.mark.parametrize(
    ("api", "fields", "path"),
    [
        ("chat", {"structured_outputs": {"choices": ["a"]}}, "structured_outputs.choices"),
        ("chat", {"structured_outputs": {"structural_tag": "{}"}}, ".structural_tag"),
        ("chat", {"response_format": {"type": "json_object", "grammar": "x"}}, ".grammar"),
        ("chat", {"stream_options": {"continuous_usage_stats": True}}, ".continuous_usage_stats"),
        ("response", {"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens"),
        ("response", {"text": {"stop": ["a"]}}, "text.stop"),
        ("response", {"text": {"format": {"type": "json_object", "regex": "a"}}}, ".format.regex"),
        ("message", {"thinking": {"type": "enabled", "effort": "low"}}, "thinking.effort"),
        ("message", {"thinking": {"type": "perhaps"}}, "thinking.type"),
        ("message", {"output_config": {"temperature": 1}}, "output_config.temperature"),
        ("message", {"tools": [{"name": "a", "input_examples": [{}]}]}, "tools.0.input_examples"),
        (
            "message",
            {"tools": [{"name": "a", "allowed_callers": ["code_execution_20250825"]}]},
            "tools.0.allowed_callers",
        ),
    ],
)
def test_fields_that_ask_for_something(api: str, fields: dict[str, Any], path: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(api, {**APIS[api][1], **fields})
    assert caught.value.param is not None
    assert caught.value.param.endswith(path)


NEUTRAL: dict[str, Any] = {
    "top_p": 0, "typical": 1.0, "typical_p": 1, "tfs": 1, "tfs_z": 1.0, "logit_bias": [],
    "top_n_sigma": -1, "adaptive_target": -1, "adaptive_decay": 0.9, "dynatemp_low": 1,
    "mirostat": 0, "mirostat_mode": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
    "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n", ":"], "dynatemp_range": 0, "dynatemp_exponent": 1,
    "smoothing_factor": 0, "smoothing_curve": 1, "top_a": 0, "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0, "guidance_scale": 1, "num_beams": 1, "early_stopping": False,
    "ignore_eos": False, "min_tokens": 0, "stop_token_ids": [], "bad_words": [],
    "include_stop_str_in_output": False, "detokenize": True, "return_token_ids": False,
    "use_beam_search": False, "lora": [], "n_probs": 0, "add_bos_token": True,
}  # fmt: skip
"""What clients of text-generation-webui, llama.cpp and vLLM send though all of it is off."""


@pytest.mark.parametrize("api", APIS)
def test_neutral_values_pass(api: str) -> None:
    (asked,) = read(api, {**APIS[api][1], **NEUTRAL}).requests
    (plain,) = read(api, APIS[api][1]).requests
    assert (asked.sampling.top_p, asked.sampling.logit_bias) == (1.0, ())
    assert asked.sampling == plain.sampling


@pytest.mark.parametrize(
    "name",
    [
        "typical",
        "tfs",
        "mirostat",
        "dry_multiplier",
        "top_a",
        "top_n_sigma",
        "adaptive_target",
        "guidance_scale",
    ],
)
def test_other_values_of_these_are_refused(name: str) -> None:
    for api, (_, body) in APIS.items():
        with pytest.raises(ApiError) as caught:
            read(api, {**body, name: 0.5})
        assert caught.value.param == name, api


@pytest.mark.parametrize(
    ("api", "asked"),
    [
        ("chat", {"type": "custom", "custom": {"name": "x"}}),
        ("response", {"type": "mcp", "server_label": "x"}),
        ("response", {"type": "web_search"}),
    ],
)
def test_of_a_choice_that_is_not_understood_the_type_is_told(api: str, asked: Any) -> None:
    with pytest.raises(ApiError, match=f"tool_choice '{asked['type']}' is not supported") as caught:
        read(api, {**APIS[api][1], "tool_choice": asked})
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("name", ["passes", "neutral", "refuse_unknown", "model_extra", "copy"])
def test_a_field_may_have_a_name_of_our_own(name: str) -> None:
    for api, (_, body) in APIS.items():
        with pytest.raises(ApiError) as caught:
            read(api, {**body, name: {"a": 1}})
        assert caught.value.param == name, api


# What the fields that are known do.

HEAR: Any = {"type": "function", "function": {"name": "hear"}}
LOOK: Any = {"type": "function", "function": FUNCTION}


def choice(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def told(asked: Any, *names: str) -> ApiRequest:
    """A chat with two tools of which the model is told of these."""
    encoder = Agent()
    served = terms(encoder)
    body = {"messages": [{"role": "user", "content": "hi."}], "tools": [LOOK, HEAR]}
    request = read_chat(json.dumps({**body, "tool_choice": asked}).encode(), served)
    assert [tool["function"]["name"] for tool in encoder.tools] == list(names)
    return request


def test_allowed_tools_are_all_of_which_the_model_is_told() -> None:
    assert told(choice("auto", "hear", "look"), "look", "hear") == told("auto", "look", "hear")
    (request,) = told(choice("auto", "hear"), "hear").requests
    assert request.sampling.grammar is None
    (request,) = told(choice("required", "hear"), "hear").requests
    assert '\\"hear\\"' in str(request.sampling.grammar)
    assert '\\"look\\"' not in str(request.sampling.grammar)
    for asked, named in ((choice("auto", "see"), "'see'"), (choice("required"), "no tools")):
        with pytest.raises(ApiError, match=named):
            told(asked)


@pytest.mark.parametrize("word", ["auto", "none", "required"])
def test_a_choice_may_be_a_word_or_an_object(word: str) -> None:
    names = () if word == "none" else ("look", "hear")
    assert told({"type": word}, *names) == told(word, *names)


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_object", "json_schema": {"name": "x", "schema": SCHEMA}},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": SCHEMA},
    ],
)
def test_a_schema_counts_wherever_a_form_has_it(form: Any) -> None:
    body = {"messages": [{"role": "user", "content": "hi."}]}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    wanted = read("chat", {**body, "response_format": named})
    assert '"const": 7' in str(wanted.requests[0].sampling.grammar)
    assert read("chat", {**body, "response_format": form}) == wanted
    if "json_schema" not in form:
        (response,) = read("response", {"input": "hi.", "text": {"format": form}}).requests
        assert response.sampling == wanted.requests[0].sampling


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "json_object", "schema": 123}, "response_format.schema"),
        ({"type": "text", "schema": SCHEMA}, "response_format.type"),
        (
            {"type": "json_schema", "schema": SCHEMA, "json_schema": {"schema": {"type": "null"}}},
            "response_format.schema",
        ),
        ({"type": "json_schema"}, "response_format"),
    ],
)
def test_a_schema_in_the_wrong_place_is_refused(form: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read("chat", {"messages": [{"role": "user", "content": "hi."}], "response_format": form})
    assert caught.value.param == param


def test_two_structures_of_an_answer_are_refused() -> None:
    first, second = ({"type": "json_schema", "schema": {"const": each}} for each in "ab")
    asked = {"output_config": {"format": first}, "output_format": second}
    with pytest.raises(ApiError) as caught:
        read("message", {**MESSAGE, **asked})
    assert caught.value.param == "output_format"
    assert read("message", {**MESSAGE, **asked, "output_format": first}).requests


def test_what_a_response_may_include_though_there_is_none_is_let_pass() -> None:
    wanted = ["reasoning.encrypted_content", "web_search_call.action.sources"]
    for include in ([], wanted[:1], wanted):
        assert read("response", {**RESPONSE, "include": include}).requests
    reasoning = {"effort": "low", "summary": "auto", "context": "auto", "mode": "standard"}
    assert read("response", {**RESPONSE, "reasoning": reasoning}).requests
