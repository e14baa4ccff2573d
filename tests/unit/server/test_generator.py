"""The command ``serve`` on a rank that is a thread, with a small model."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.utils import load

from shardmlx.common.environment import Blas
from shardmlx.config.serve import LINE
from shardmlx.errors import Stopped
from shardmlx.server import answer_parser
from shardmlx.server.answer_parser import AnswerSyntax
from shardmlx.server.answer_parts import Reading, UnreadText
from shardmlx.server.run import run
from tests.helpers.local_transport import LocalNetwork, LocalTransport
from tests.helpers.ports import free_port

KEPT = 20
TOKENS = 24


@pytest.fixture(scope="module")
def url(small: Path) -> Iterator[str]:
    """The address of a server that samples the least likely of so many tokens: min-p keeps these,
    and XTC leaves out all likely tokens but the least likely of them."""
    port = free_port()
    sampling = ["--temp", "1", "--min-p", "1", "--min-tokens-to-keep", str(KEPT)]
    sampling += ["--xtc-probability", "1", "--xtc-threshold", "0"]
    config = LINE.load(["--model", str(small), "--port", str(port), *sampling])
    stops = threading.Event()

    def asked() -> int | None:
        return signal.SIGTERM if stops.is_set() else None

    def serve(transport: LocalTransport) -> None:
        transport.stop_requested = asked  # type: ignore[method-assign]
        run(config, transport, Blas("none"))

    address = f"http://127.0.0.1:{port}"
    with ThreadPoolExecutor() as pool:
        serving = pool.submit(LocalNetwork(1).run, serve)
        while not serving.done() and not is_there(address):
            time.sleep(0.05)
        yield address
        stops.set()
        serving.result()


def is_there(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.TransportError:
        return False


def completed(url: str, path: Path) -> tuple[str, str]:
    """Return the text of the server, and of mlx-lm with the tokens of that rank; both without the
    tokens that XTC never leaves out."""
    model, tokenizer = load(str(path))
    prompt = tokenizer.encode("What is the colour of the sea?")
    bias = dict.fromkeys([*tokenizer.encode("\n"), *tokenizer.eos_token_ids], -100.0)
    asked = {"prompt": prompt, "max_tokens": TOKENS, "logit_bias": bias}
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()
    steps = generate_step(
        mx.array(prompt),
        model,
        max_tokens=TOKENS,
        sampler=lambda logprobs: mx.argsort(-logprobs)[..., KEPT - 1],
        logits_processors=make_logits_processors(bias),
    )
    return answer["choices"][0]["text"], tokenizer.decode([token for token, _ in steps])


def test_answers_are_sampled_as_the_options_say(url: str, small: Path) -> None:
    text, wanted = completed(url, small)
    assert text == wanted


def test_a_fault_in_reading_an_answer_ends_no_other(
    url: str, small: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A format that fails for calls of tools, once an answer without tools has begun."""
    read, has_begun = answer_parser.marked_answer, threading.Event()

    def beginning(incoming: UnreadText, syntax: AnswerSyntax) -> Reading:
        has_begun.set()
        return read(incoming, syntax)

    def failing(incoming: UnreadText, syntax: AnswerSyntax) -> Reading:
        while not (has_begun.is_set() or incoming.is_last):
            yield None
        raise RuntimeError("an unforeseen fault")

    monkeypatch.setattr(answer_parser, "marked_answer", beginning)
    monkeypatch.setattr(answer_parser, "json_answer", failing)
    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Ahoy!"}],
        "tools": [look],
        "max_tokens": 250,
    }
    with ThreadPoolExecutor() as pool:
        whole, streamed = (
            pool.submit(
                httpx.post,
                f"{url}/v1/chat/completions",
                json={**chat, "stream": streams},
                timeout=60,
            )
            for streams in (False, True)
        )
        text, wanted = completed(url, small)
    assert text == wanted
    assert whole.result().status_code == 500
    *_, last = streamed.result().text.strip().split("data: ")
    for said in (whole.result().text, last):
        assert "a fault of the server" in said
    assert capfd.readouterr().err.count("RuntimeError: an unforeseen fault") == 2
    assert is_there(url)
    assert 'shardmlx_texts_total{end="error"} 2.0' in httpx.get(f"{url}/metrics").text


def test_a_server_whose_terminal_is_closed_has_not_ended_well(small: Path) -> None:
    """One that is asked to stop has."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        port = free_port()

        def serve(transport: LocalTransport, number: int = number, port: int = port) -> None:
            transport.stop_requested = lambda: number  # type: ignore[method-assign]
            run(LINE.load(["--model", str(small), "--port", str(port)]), transport, Blas("none"))

        if number == signal.SIGHUP:
            with pytest.raises(Stopped, match="its terminal was closed") as caught:
                LocalNetwork(1).run(serve)
            assert caught.value.signal == signal.SIGHUP
        else:
            LocalNetwork(1).run(serve)
