"""The HTTP server as its clients see it: OpenAI's own package, a browser, Prometheus."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from shardmlx.common.http_listener import POLICY
from shardmlx.server import streaming
from shardmlx.server.answer_parts import AnswerPart
from shardmlx.server.body_reader import LONG_BODY_BYTES
from shardmlx.server.request_queue import Delta
from tests.helpers.http_serving import (
    CALL,
    LOOK,
    MODEL,
    Agent,
    Letters,
    Parrot,
    Serving,
    Text,
    serving,
)
from tests.helpers.shown import shown

USER: ChatCompletionUserMessageParam = {"role": "user", "content": "hello"}
KEY = "sesame"


@pytest.fixture(scope="module")
def shared() -> Iterator[Serving]:
    with serving() as one:
        yield one


@pytest.fixture(scope="module")
def client(shared: Serving) -> Iterator[openai.OpenAI]:
    with client_of(shared) as one:
        yield one


def client_of(server: Serving, key: str = "any") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key=key, max_retries=0, timeout=60)


def post(server: Serving, body: Any = None, path: str = "/v1/completions", **options: Any) -> Any:
    body = {"prompt": "hello", "max_tokens": 3} if body is None else body
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **options.pop("headers", {})}
    return httpx.post(server.address + path, content=content, headers=headers, timeout=60)


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].isprintable()
    return error


def metric(server: Serving, name: str) -> float:
    text = httpx.get(f"{server.address}/metrics").text
    (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE) or ["0"]
    return float(value)


# The openai package.


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=[USER], max_tokens=7)
    assert answer.choices[0].message.content == "hellohe"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 7
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 4
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens == 2


# What does not go well.


def test_a_full_queue_says_when_to_come_again() -> None:
    with serving(most_open=2) as server, client_of(server) as client:
        server.parrot.goes_on.clear()
        with client.completions.create(model=MODEL, prompt="hello", n=2, stream=True):
            server.until(lambda: server.service.load[1] == 2)
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model=MODEL, prompt="hello")
            assert caught.value.code == "queue_full"
            assert caught.value.response.headers["retry-after"] == "2"


def test_a_failure_under_load_ends_every_request_with_an_error() -> None:
    async def ask(client: openai.AsyncOpenAI, streams: bool) -> str:
        try:
            if not streams:
                await client.completions.create(model=MODEL, prompt="hello")
                return "an answer"
            got = ""
            chat = client.chat.completions
            async for chunk in await chat.create(model=MODEL, messages=[USER], stream=True):
                got += chunk.choices[0].delta.content or ""
            return f"a stream that seemed whole: {got}"
        except openai.InternalServerError as error:
            return f"status {error.status_code}: {error.body['message']}"
        except openai.APIError as error:
            return f"event: {error.message}"

    async def ask_all(server: Serving) -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.address}/v1", api_key="any", max_retries=0, timeout=60
        ) as client:
            tasks = [asyncio.create_task(ask(client, place % 2 == 0)) for place in range(32)]
            while len(server.parrot.added) < 32:
                await asyncio.sleep(0.01)
            server.parrot.fails = "rank 1 on elsewhere is lost"
            return await asyncio.gather(*tasks)

    with serving(parrot=Parrot(at_once=8, steps=5)) as server:
        ends = asyncio.run(ask_all(server))
        why = "no text is generated any more: rank 1 on elsewhere is lost"
        assert ends == [f"event: {why}", f"status 503: {why}"] * 16
        health = httpx.get(f"{server.address}/health")
        assert health.status_code == 503
        assert health.json() == {"status": "ended", "reason": "rank 1 on elsewhere is lost"}
        refused = post(server)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        assert metric(server, 'shardmlx_texts_total{end="error"}') == 32
        assert metric(server, "shardmlx_up") == 0


def test_while_a_rank_does_not_answer_nobody_need_wait_for_it() -> None:
    """Whoever asks is told when to ask again; a stream that has begun goes on."""
    why: list[str] = []
    with serving(
        unavailable_reason=lambda: why[0] if why else None, parrot=Parrot(steps=2)
    ) as server:
        body = {"prompt": "hello", "stream": True, "max_tokens": 4}
        with httpx.stream("POST", f"{server.address}/v1/completions", json=body) as response:
            server.until(lambda: server.parrot.steps == 0)
            why.append("rank 1 on mini has given no sign of life for 5 s")
            refused = post(server)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
            assert error_of(refused)["message"] == f"no text is generated: {why[0]}"
            health = httpx.get(f"{server.address}/health")
            assert health.status_code == 503
            assert health.json() == {"status": "waiting", "reason": why[0]}
            assert metric(server, "shardmlx_up") == 0
            why.clear()
            server.parrot.goes_on.set()
            assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"
        assert post(server).status_code == 200
        assert httpx.get(f"{server.address}/health").json() == {"status": "ok"}


STREAMS = {
    "chat/completions": (b": still here\n\n", "data: {"),
    "responses": (b"event: response.in_progress\n", "event: error\n"),
    "messages": (b'event: ping\ndata: {"type": "ping"}\n\n', "event: error\n"),
}
"""APIs, with the bytes in a stream that their clients count as life, and the begin of an error."""


def asked_for(path: str) -> dict[str, Any]:
    said = "input" if path == "responses" else "messages"
    limit = {} if path == "responses" else {"max_tokens": 9}
    return {said: [{"role": "user", "content": "ab."}], "stream": True, **limit}


@pytest.mark.parametrize("path", STREAMS)
def test_in_silence_a_stream_says_that_it_lives(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SECONDS_OF_SILENCE", 0.01)
    sign, _ = STREAMS[path]
    with serving(parrot=Parrot(steps=2)) as server:
        url, body = f"{server.address}/v1/{path}", asked_for(path)
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            came = b""
            for chunk in response.iter_bytes():
                came += chunk
                if came.count(sign) >= 3:
                    server.parrot.steps = None
                    server.parrot.goes_on.set()
        assert came.count(sign) >= 3


class Unhurried(Parrot):
    """A generator that takes a hundredth of a second for a token."""

    def step(self) -> Sequence[tuple[int, Delta]]:
        time.sleep(0.01)
        return super().step()


def test_a_stream_lives_while_the_tokens_of_a_call_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SECONDS_OF_SILENCE", 0.1)
    tool = {"type": "function", "function": LOOK}
    call = CALL.replace("sea", 100 * "sea")  # so long that the server sees it grow
    body = {"messages": [{"role": "user", "content": call}], "tools": [tool], "stream": True}
    with serving(parrot=Unhurried(), encoder=Agent()) as server:
        said = httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=60).text
    before, made, _ = said.partition('"tool_calls": [{')
    assert made
    assert ": still here" in before.rpartition('"content": "k"')[2]


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_fails_ends_with_an_error(path: str) -> None:
    with serving(parrot=Parrot(steps=2)) as server:
        url, body = f"{server.address}/v1/{path}", asked_for(path)
        with httpx.stream("POST", url, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.parrot.fails = "a fault"
            *_, last = "\n".join(lines).strip().split("\n\n")
    assert last.startswith(STREAMS[path][1])
    assert "no text is generated any more: a fault" in last
    assert "[DONE]" not in last


class Broken(Parrot):
    """A generator whose answers break off within their structure."""

    def _next(self, text: Text) -> Delta:
        text.generated += 1
        whole = text.generated < 3
        parts = (AnswerPart("said", "{"),) if whole else ()
        return Delta(parts, (), text.generated, 0, None if whole else "broken")


FORCED = {
    "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "any"},
}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("chat/completions", {"response_format": {"type": "json_object"}}),
        ("messages", FORCED),
    ],
)
def test_an_answer_that_breaks_its_structure_is_an_error(path: str, asked: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, **asked}
    with serving(parrot=Broken(), encoder=Agent(), complaint=lambda grammar: "") as server:
        url = f"{server.address}/v1/{path}"
        whole = httpx.post(url, json=body)
        assert whole.status_code == 500
        assert "structure" in whole.json()["error"]["message"]
        *_, last = httpx.post(url, json={**body, "stream": True}).text.strip().split("data: ")
        assert "structure" in json.loads(last)["error"]["message"]


def test_what_clients_may_take_for_line_ends_is_escaped(shared: Serving) -> None:
    tokens = [10, 13, 28, 133 - 64, 104]
    response = post(shared, {"prompt": tokens, "stream": True, "max_tokens": 5})
    events = [line for line in response.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in events)


def test_an_error_is_the_one_of_the_page(shared: Serving) -> None:
    response = post(shared, {"prompt": "hello", "echo": True})
    assert response.json() == json.loads(shown("serve.md", "refusal"))


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/v1/completions", "GET", 405),
        ("/v1/models", "POST", 405),
        ("/v1/images", "POST", 404),
        ("/v1/models/", "GET", 404),
        ("/../etc/passwd", "GET", 404),
    ],
)
def test_paths_and_methods_that_are_not(
    shared: Serving, path: str, method: str, status: int
) -> None:
    response = httpx.request(method, shared.address + path)
    assert response.status_code == status
    assert error_of(response)["type"] == "invalid_request_error"
    assert ("allow" in response.headers) == (status == 405)


def test_a_fault_of_our_own_is_an_error_too(
    shared: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared.service, "submit", lambda requests: 1 / 0)
    response = post(shared)
    assert response.status_code == 500
    assert error_of(response)["message"] == "a fault of the server: its log has more"


# Who may ask.


@pytest.fixture(scope="module")
def locked() -> Iterator[Serving]:
    with serving(api_key=KEY) as server:
        yield server


def test_the_right_key_opens_and_the_page_and_health_need_none(locked: Serving) -> None:
    with client_of(locked, KEY) as client:
        assert client.completions.create(model=MODEL, prompt="hello", max_tokens=1)
    wrong = pytest.raises(openai.AuthenticationError, match=r"the API key is wrong")
    with client_of(locked, "sesamo") as client, wrong:
        client.completions.create(model=MODEL, prompt="hello")
    headers = {"authorization": f"bearer {KEY}"}
    assert httpx.get(f"{locked.address}/metrics", headers=headers).status_code == 200
    for path in ("/", "/health", "/page/main.js"):
        assert httpx.get(locked.address + path).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "//", "/health/"])
@pytest.mark.parametrize("given", [None, KEY, f"Basic {KEY}", f"Bearer {KEY}x", "Bearer \xe9"])
def test_no_key_opens_nothing(locked: Serving, path: str, given: str | None) -> None:
    headers = {} if given is None else {"authorization": given.encode("latin-1")}
    response = httpx.get(locked.address + path, headers=headers)  # type: ignore[arg-type]
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert error_of(response)["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_what_any_page_could_post_is_refused(shared: Serving, kind: str) -> None:
    response = post(shared, headers={"content-type": kind})
    assert response.status_code == 415
    assert "send it with 'Content-Type: application/json'" in error_of(response)["message"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "["])
def test_a_name_that_somebody_pointed_at_this_machine_is_refused(
    shared: Serving, host: str
) -> None:
    for path in ("/", "/health", "/v1/models"):
        response = httpx.get(shared.address + path, headers={"host": host})
        assert response.status_code == 421
        assert error_of(response)["code"] == "unknown_host"


def test_no_other_site_may_use_the_api(shared: Serving) -> None:
    headers = {"origin": "https://site.example", "access-control-request-method": "POST"}
    response = httpx.options(f"{shared.address}/v1/completions", headers=headers)
    assert response.status_code == 405
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_sites_that_are_allowed_may() -> None:
    site = {"origin": "https://site.example"}
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
        "access-control-request-private-network": "true",  # Chrome's, for a page of the internet
    }
    with serving(api_key=KEY, origins=["https://site.example"]) as server:
        path = f"{server.address}/v1/completions"
        preflight = httpx.options(path, headers={**site, **asked})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://site.example"
        assert preflight.headers["access-control-allow-private-network"] == "true"
        assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
        refused = httpx.post(path, headers=site)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://site.example"
        other = {**asked, "origin": "https://other.example"}
        assert httpx.options(path, headers=other).status_code == 400


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/nothing"])
def test_headers_of_every_answer(shared: Serving, path: str) -> None:
    headers = httpx.get(shared.address + path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "server" not in headers


# The page, and numbers.


def test_the_page_and_its_parts_are_served_and_kept_while_they_are_the_same(
    shared: Serving,
) -> None:
    for path, kind in (("/", "html"), ("/page/main.js", "javascript"), ("/page/base.css", "css")):
        page = httpx.get(shared.address + path)
        assert page.headers["content-type"] == f"text/{kind}; charset=utf-8"
        assert page.headers["content-security-policy"] == POLICY
        assert page.headers["cache-control"] == "no-cache"
        again = httpx.get(shared.address + path, headers={"if-none-match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    for path in ("/page/", "/page/nothing.js", "/page/..%2fapp.py", "/page/%2e%2e/app.py"):
        assert httpx.get(shared.address + path).status_code == 404, path


def test_metrics_count_texts_and_tokens() -> None:
    with serving() as server:
        post(server, {"prompt": "hello.", "max_tokens": 9})
        post(server, {"prompt": "hello", "max_tokens": 3})
        text = httpx.get(f"{server.address}/metrics")
        assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
        for name, value in {
            'shardmlx_texts_total{end="stop"}': 1,
            'shardmlx_texts_total{end="length"}': 1,
            "shardmlx_prompt_tokens_total": 11,
            "shardmlx_cached_tokens_total": 5,
            "shardmlx_generated_tokens_total": 9,
            "shardmlx_draft_rounds_total": 3,
            "shardmlx_drafted_tokens_total": 9,
            "shardmlx_accepted_tokens_total": 6,
            "shardmlx_time_to_first_token_seconds_count": 2,
            "shardmlx_time_between_tokens_seconds_count": 7,
            "shardmlx_texts_under_way": 0,
            "shardmlx_texts_waiting": 0,
            "shardmlx_kept_tokens": 7,
            "shardmlx_up": 1,
            "shardmlx_peak_memory_bytes": 0,
        }.items():
            assert f"\n{name} {value:.1f}\n" in text.text, name


def test_a_short_request_does_not_wait_for_a_long_one_and_few_long_ones_wait() -> None:
    class Slow(Letters):
        def __init__(self) -> None:
            self.has_begun, self.short_is_done = threading.Event(), threading.Event()

        def text(self, prompt: str) -> tuple[int, ...]:
            if len(prompt) > LONG_BODY_BYTES:
                self.has_begun.set()
                assert self.short_is_done.wait(30)
            return super().text(prompt[:5])

    slow = Slow()
    body = 251_000
    with serving(encoder=slow, max_body_bytes=body) as server, ThreadPoolExecutor(9) as pool:
        long = pool.submit(post, server, {"prompt": "hello" * 50_000, "max_tokens": 3})
        assert slow.has_begun.wait(30)
        assert post(server).status_code == 200
        more = [pool.submit(post, server, {"prompt": "hello" * 50_000}) for _ in range(8)]
        (refused,) = wait(more, return_when=FIRST_COMPLETED).done
        assert refused.result().status_code == 429
        assert int(refused.result().headers["retry-after"]) > 0
        slow.short_is_done.set()
        assert long.result().status_code == 200
        assert sorted(each.result().status_code for each in more) == [200] * 7 + [429]
