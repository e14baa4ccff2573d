"""Requests as clients of several kinds send them.

Each is put together from the fields that its kind of client sends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from shardmlx.inference.answer_format import Tool
from shardmlx.server.chat_request import ServedModel
from shardmlx.server.model_names import ModelNames
from shardmlx.server.openai_errors import ApiError
from shardmlx.server.openai_requests import read_chat
from shardmlx.server.request_queue import GenerationRequest
from tests.helpers.http_serving import Letters

ASKED = {"role": "user", "content": "Ahoy!"}
AGAIN = {"role": "user", "content": "And now?"}
PLAIN = [ASKED, {"role": "assistant", "content": "Aye!"}, AGAIN]
"""What a template should be given of all of the histories below."""


class Template(Letters):
    """An encoder that keeps what it was given."""

    def __init__(self) -> None:
        self.messages: list[Mapping[str, Any]] = []
        self.arguments: dict[str, Any] = {}

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] = (), **arguments: Any
    ) -> tuple[int, ...]:
        self.messages, self.arguments = list(messages), arguments
        return (65,)


def read(body: Mapping[str, Any]) -> tuple[Template, GenerationRequest]:
    template = Template()
    served = ServedModel(
        names=ModelNames(("ours",), any_name=True),
        encoder=template,
        most_tokens=90,
        most_requests=8,
    )
    (request,) = read_chat(json.dumps(body).encode(), served).requests
    return template, request


OPENAI = {
    "model": "gpt-5-mini",
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        ASKED,
        {
            "role": "assistant",
            "content": "Aye!",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": None,
        },
        AGAIN,
    ],
    "max_completion_tokens": 7,
    "reasoning_effort": "low",
    "verbosity": "medium",
    "store": False,
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "parallel_tool_calls": True,
}

OLLAMA = {
    "model": "llama3.2:latest",
    "messages": [
        {"role": "user", "content": "Ahoy!", "images": []},
        {"role": "assistant", "content": "Aye!", "thinking": "They greet me.", "tool_calls": []},
        AGAIN,
    ],
    "stream": False,
    "format": "",
    "keep_alive": "5m",
    "options": {},
}

LLAMA_CPP = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        ASKED,
        {"role": "assistant", "content": "Aye!", "reasoning_content": "They greet me."},
        AGAIN,
    ],
    "stream": True,
    "return_progress": True,
    "reasoning_format": "auto",
    "temperature": 0.8,
    "max_tokens": -1,
    "cache_prompt": True,
    "id_slot": -1,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "xtc_probability": 0,
    "xtc_threshold": 0.1,
    "typical_p": 1,
    "repeat_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "dry_multiplier": 0,
    "mirostat": 0,
    "timings_per_token": True,
}  # fmt: skip

LIBRECHAT = {
    "model": "mistral",
    "user": "65f0c1",
    "stream": True,
    "temperature": 1,
    "top_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "stream_options": {"include_usage": True},
    "plugins": [],
    "stop_token_ids": [],
    "features": {},
    "params": None,
    "session_id": "wJ5P",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Ahoy!"}], "name": None},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Aye!", "cache_control": {"type": "ephemeral"}}],
            "tool_calls": [],
        },
        {"role": "user", "content": "And now?", "id": 1947269257, "opts": {"visible": True}},
    ],
}

CLIENTS = {
    "openai": OPENAI,
    "ollama": OLLAMA,
    "llama.cpp": LLAMA_CPP,
    "librechat": LIBRECHAT,
}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_history_reaches_the_template_as_it_was_said(client: str) -> None:
    template, _ = read(CLIENTS[client])
    said = [
        {"role": each["role"], "content": each["content"]}
        for each in template.messages
        if each["role"] != "system"
    ]
    assert said == PLAIN


@pytest.mark.parametrize("client", ["ollama", "llama.cpp"])
def test_what_was_thought_goes_to_templates_that_know_it(client: str) -> None:
    (answer,) = (m for m in read(CLIENTS[client])[0].messages if m["role"] == "assistant")
    assert answer["reasoning_content"] == "They greet me."


def test_developers_are_systems_to_templates() -> None:
    assert read(OPENAI)[0].messages[0] == {"role": "system", "content": "Be brief."}
    named = {"role": "user", "content": "hi", "name": "Ann"}
    assert read({"messages": [named]})[0].messages == [named]


def test_the_effort_of_thinking_is_the_templates() -> None:
    assert read(OPENAI)[0].arguments == {"reasoning_effort": "low"}
    none = {**OPENAI, "reasoning_effort": "none"}
    assert read(none)[0].arguments == {"enable_thinking": False}
    own = {**OPENAI, "chat_template_kwargs": {"reasoning_effort": "high"}}
    assert read(own)[0].arguments == {"reasoning_effort": "high"}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"content": None, "refusal": "I will not."}, "I will not."),
        ({"content": [{"type": "refusal", "refusal": "I will not."}]}, "I will not."),
        ({"content": None, "tool_calls": []}, ""),
        ({"tool_calls": []}, ""),
    ],
)
def test_answers_without_text(answer: Mapping[str, Any], said: str) -> None:
    history = [ASKED, {"role": "assistant", **answer}, AGAIN]
    assert read({"messages": history})[0].messages[1]["content"] == said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("typical_p", 0.9),
        ("mirostat", 2),
        ("dry_multiplier", 0.8),
        ("repeat_penalty", 1.1),
        ("options", {"num_ctx": 4096}),
        ("format", "json"),
        ("grammar", 'root ::= "a"'),
        ("stop_token_ids", [5]),
        ("plugins", [{"id": "web"}]),
        ("add_generation_prompt", False),
        ("min_tokens", 5),
    ],
)
def test_what_would_change_the_answer_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        read({"messages": [ASKED], name: value})
    assert (caught.value.status, caught.value.param) == (400, name)
