"""``shardmlx launch -n 2 serve``, asked by the ``openai`` package."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from testbed.jobs import Running, patience
from tests.helpers.mpirun import mlx_lm
from tests.helpers.ports import free_port
from tests.helpers.served_jobs import KEY, Served
from tests.helpers.shown import lacking

MANY = 32


TEMPLATE = """\
{% if tools %}{{ 's: ' + (tools | tojson) + eos_token }}{% endif %}\
{% for turn in messages %}{{ turn['role'][0] + ': ' + (turn['content'] or '') }}\
{% for call in turn['tool_calls'] or [] %}{% set tool_call = call['function'] %}\
{% if call['id'] | length != 9 %}{{ raise_exception('ids of calls have length 9') }}{% endif %}\
{{ '<tool_call>' + tool_call.name + (tool_call.arguments | tojson) + '</tool_call>' }}{% endfor %}\
{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'a: ' }}{% endif %}"""
"""The one of the small model, but that it knows tools, and takes ids of Mistral's form alone."""


@pytest.fixture(scope="module")
def model(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serve") / "model"
    shutil.copytree(small, path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    port = str(free_port())
    launch = [sys.executable, "-m", "shardmlx", "launch", "-n", "2", "serve"]
    options = ["--model", str(model), "--port", port, "--api-key", KEY, "--timeout", "20"]
    with Running([*launch, *options]) as running:
        yield Served(running)


def test_the_text_of_mlx_lm(served: Served, small: Path) -> None:
    said = "What is the colour of the sea?"
    wanted = mlx_lm("--model", small, "--prompt", said, "--max-tokens", "12")
    assert served.ask(said) + "\n" == wanted
    here = {"smollm2-135m-instruct": "model"}
    assert lacking("serve.md", "serving", served.running.job().stdout, here) == set()


def test_metrics_tell_what_the_first_rank_has_held(served: Served) -> None:
    served.ask("Ahoy!")
    assert served.metric("peak_memory_bytes") > 0


def test_an_answer_keeps_to_a_schema_on_the_last_rank(served: Served) -> None:
    """The model is random, and the temperature 1."""
    pytest.importorskip("llguidance", reason="needs llguidance: pip install llguidance")
    day = {"type": "object", "properties": {"day": {"enum": ["mon", "tue"]}}, "required": ["day"]}
    schema = {**day, "additionalProperties": False}
    answer = served.client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Which day?"}],
        response_format={"type": "json_schema", "json_schema": {"name": "day", "schema": schema}},
        temperature=1,
        n=3,
    )
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    days = [json.loads(choice.message.content or "") for choice in answer.choices]
    assert all(each in ({"day": "mon"}, {"day": "tue"}) for each in days)


LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["sea", "sky"]}},
            "required": ["at"],
        },
    },
}


def test_a_round_trip_of_tools_that_a_random_model_is_made_to_call(served: Served) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance: pip install llguidance")
    asked: Any = {"role": "user", "content": "What is there?"}
    how: Any = {"model": "default", "tools": [LOOK], "temperature": 1, "max_tokens": 250}
    with served.client.chat.completions.stream(
        messages=[asked], tool_choice="required", parallel_tool_calls=False, **how
    ) as stream:
        answer = stream.get_final_completion().choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls or []
    assert call.function.name == "look"
    assert json.loads(call.function.arguments) in ({"at": "sea"}, {"at": "sky"})
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "Ships."}
    called: Any = answer.message.model_dump()
    again = served.client.chat.completions.create(messages=[asked, called, result], **how)
    assert again.choices[0].finish_reason in ("length", "stop")


def test_a_history_of_anthropics_servers_by_its_own_package(served: Served) -> None:
    """Ids of another form, two thoughts, and results of tools that are not text."""
    anthropic: Any = pytest.importorskip("anthropic", reason="needs anthropic: '.[dev]'")
    client = anthropic.Anthropic(base_url=served.url, api_key=KEY, max_retries=0)
    thoughts = [{"type": "thinking", "thinking": said, "signature": ""} for said in ("a", "b")]
    use = {"type": "tool_use", "id": "toolu_01A09q90qw90lq917835lq9", "name": "find", "input": {}}
    png = {"type": "base64", "media_type": "image/png", "data": "iVBORw0K"}
    found = [{"type": "tool_reference", "tool_name": "look"}, {"type": "image", "source": png}]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": found}
    asked: Any = {
        "model": "default",
        "tools": [{"name": "find", "input_schema": {"type": "object"}, "defer_loading": False}],
        "messages": [
            {"role": "user", "content": "What is there?"},
            {"role": "assistant", "content": [*thoughts, use]},
            {"role": "user", "content": [result]},
        ],
    }
    answer = client.messages.create(**asked, max_tokens=4)
    usage, counted = answer.usage, client.messages.count_tokens(**asked)
    assert usage.output_tokens in range(1, 5)
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    with pytest.raises(anthropic.BadRequestError, match=r"thinking\.effort is not supported"):
        client.messages.create(**asked, max_tokens=4, thinking={"type": "adaptive", "effort": 1})


def test_forms_of_openais_package(served: Served) -> None:
    """Log-probabilities of a completion, an item that is cut, and a field within another."""
    client, how = served.client, {"model": "default"}
    choice = client.completions.create(**how, prompt="Ahoy", max_tokens=6, logprobs=2).choices[0]
    lists = choice.logprobs
    assert lists is not None
    assert lists.tokens is not None
    assert lists.text_offset is not None
    assert lists.top_logprobs is not None
    assert lists.token_logprobs == [
        top[token] for token, top in zip(lists.tokens, lists.top_logprobs, strict=True)
    ]
    for token, begins in zip(lists.tokens, lists.text_offset, strict=True):
        assert choice.text[begins:].startswith(token.removesuffix("\ufffd").strip())
    cut = client.responses.create(**how, input="Count.", max_output_tokens=2)
    assert [cut.status, *(item.status for item in cut.output)] == ["incomplete", "incomplete"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**how, input="?", extra_body={"text": {"stop": ["a"]}})
    assert caught.value.param == "text.stop"


def test_many_clients_at_once_get_the_texts_of_each_alone(served: Served) -> None:
    sayings = [f"Tell me of the number {i}, and of {'ships ' * (i % 7)}." for i in range(MANY)]
    alone = [served.ask(said) for said in sayings[:6]]
    with ThreadPoolExecutor(MANY) as pool:
        on_all_ranks = list(pool.map(served.ask, sayings))
    assert on_all_ranks[:6] == alone
    assert len(on_all_ranks) == MANY


def test_clients_that_vanish_leave_room_for_others(served: Served) -> None:
    for _ in range(6):
        with served.client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Count to a million."}],
            max_tokens=400,
            stream=True,
        ) as stream:
            next(iter(stream))
    end = time.monotonic() + patience(20)
    while served.metric("texts_under_way") > 0 and time.monotonic() < end:
        time.sleep(0.1)
    assert served.metric("texts_under_way") == 0
    assert served.ask("Are you there?")


def test_launch_starts_a_server_again_that_has_lost_a_rank(served: Served) -> None:
    """On the same port; open requests end with an error. A rank that is only stopped for a while is
    named, and waited for. At Ctrl-C open requests end as they should, and the job ends well: so
    this is the last test."""
    running = served.running
    with ThreadPoolExecutor(MANY) as pool:
        said = served.ask("Hello")
        pid = running.pid_of(1)  # it takes a while to find, on a busy machine
        assert pid is not None
        answers = [pool.submit(served.ask, f"Count from {i}.", 400) for i in range(MANY)]
        running.until(lambda: served.metric("texts_under_way") >= 4)
        os.kill(pid, signal.SIGKILL)
        errors = [answer.exception(patience(20)) for answer in answers]
        lost = [error for error in errors if error is not None]
        assert lost
        assert all(isinstance(error, (openai.APIError, httpx.HTTPError)) for error in lost)
        running.until(lambda: served.health() == (200, ""))
        assert served.ask("Hello") == said
        # Those without an error had come to their end before: none was cut.
        ended = {i: answers[i].result() for i, error in enumerate(errors) if error is None}
        assert {i: served.ask(f"Count from {i}.", 400) for i in ended} == ended
        assert "restart 1 of 3 in 1 s\nlaunch: the server starts again" in running.job().stdout
        assert re.search(r"rank 1 on \S+ died", running.job().output)

        running.kill_rank(1, signal.SIGSTOP)
        running.until(lambda: served.health()[0] == 503)
        assert re.match(r"rank 1 on \S+ has given no .*: its process is stop", served.health()[1])
        with pytest.raises(openai.InternalServerError, match=r"no text is generated: rank 1 on"):
            served.ask("Hello")
        running.kill_rank(1, signal.SIGCONT)
        running.until(lambda: served.health() == (200, ""))
        assert served.ask("Hello") == said

        answer = pool.submit(served.ask, "Hello", 300)
        running.until(lambda: served.metric("texts_under_way") > 0 or answer.done())
        running.process.send_signal(signal.SIGINT)
        assert answer.result(patience(30))
        assert running.wait(patience(20)) == 0
        assert running.left_behind() == []
        assert "Stopping after SIGINT" in running.job().stdout
