"""How an island speaks with its hub, over real HTTP."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shardmlx.errors import UserError
from shardmlx.islands import client
from shardmlx.islands.client import TOKEN, Hub
from shardmlx.islands.protocol import Join, Refusal, SharedTensor
from tests.helpers.island_hub import running_hub

JOIN = Join(
    name="ann",
    model={"fine_tune_type": "lora"},
    tensors=(SharedTensor("model.layers.0.lora_a", (2, 3)),),
    adapter_config={},
)
WHOLE = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAUSES", (0.02, 0.05))


@contextmanager
def served(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[Hub]:
    """A server that gives each request to ``answer``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """It says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield Hub(f"http://127.0.0.1:{server.server_port}", "secret", print)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_download_goes_on_where_it_broke_off_unless_there_is_a_newer_version(
    is_replaced: bool, tmp_path: Path
) -> None:
    asked = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        given = request.headers.get("range"), request.headers.get("if-range")
        asked.append(given)
        start = 0 if given[0] is None or is_replaced else int(given[0][6:-1])
        version = len(asked) if is_replaced else 1
        request.send_response(206 if start else 200)
        request.send_header("content-length", str(len(WHOLE) - start))
        request.send_header("etag", f'"v{version}"')
        request.send_header("x-version", str(version))
        request.end_headers()
        is_cut = len(asked) < 3
        request.wfile.write(WHOLE[start : start + 4000] if is_cut else WHOLE[start:])

    with served(answer) as hub, (tmp_path / "body").open("w+b") as body:
        version = hub.take(0, None, body)
    assert (tmp_path / "body").read_bytes() == WHOLE
    assert version == (3 if is_replaced else 1, False)
    first, *later = asked
    assert first == (None, None)
    starts = ["bytes=4000-", "bytes=4000-"] if is_replaced else ["bytes=4000-", "bytes=8000-"]
    tags = ['"v1"', '"v2"'] if is_replaced else ['"v1"', '"v1"']
    assert later == [*zip(starts, tags, strict=True)]


class FullDisk(io.BytesIO):
    name = "/tmp/body"

    def write(self, piece: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_not_the_hubs_fault() -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("content-length", str(len(WHOLE)))
        request.end_headers()
        request.wfile.write(WHOLE)

    with served(answer) as hub, pytest.raises(UserError, match="cannot write /tmp/body: No space"):
        hub.take(0, None, FullDisk())


def test_a_hub_that_is_not_there_is_named_with_what_to_do() -> None:
    with served(lambda request: None) as hub:
        pass
    with pytest.raises(UserError) as caught:
        hub.persist(hub.terms, 0.1)
    assert hub.url in caught.value.problem
    assert "shardmlx hub" in caught.value.remedy


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (404, b"<html>", Refusal, "{url}"),
        (404, b'{"error": {"message": "no such path"}}', Refusal, "{url}"),
        (200, b'{"status": "ok"}', UserError, "Terms is none"),
        (200, b"[]", UserError, "{url}: no answer in .* not an object"),
        (200, b"\xff", UserError, "{url}: no answer"),
    ],
)
def test_what_is_no_hub_is_said_to_be_none(
    status: int, body: bytes, kind: type[UserError], said: str
) -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.end_headers()
        request.wfile.write(body)

    with served(answer) as hub, pytest.raises(kind, match=said.format(url=hub.url)):
        hub.persist(hub.terms, 0.1)


def test_an_island_needs_its_own_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_hub(tmp_path, "ann,bob") as running:
        monkeypatch.delenv(TOKEN, raising=False)
        for none in (None, "", "\N{HORIZONTAL ELLIPSIS}", "a\nb"):
            if none is not None:
                monkeypatch.setenv(TOKEN, none)
            with pytest.raises(UserError, match=TOKEN) as caught:
                Hub.of(running.url, "ann", print)
            assert "tokens/ann" in caught.value.remedy
        for token, status in (("wrong", 401), (running.tokens["bob"], 403)):
            monkeypatch.setenv(TOKEN, token)
            hub = Hub.of(running.url, "ann", print)
            with pytest.raises(Refusal) as refused:
                hub.persist(partial(hub.join, JOIN))
            assert refused.value.status == status
            assert refused.value.remedy


def test_what_is_refused_is_told_though_the_whole_body_was_still_to_come(tmp_path: Path) -> None:
    whole = io.BytesIO(bytes(16 << 20))  # more than sockets hold
    with running_hub(tmp_path, "ann") as running:
        for token, status in (("wrong", 401), (running.tokens["ann"], 400)):
            with pytest.raises(Refusal) as refused:
                Hub(running.url, token, print).put("/fragments/x/seed", whole)
            assert refused.value.status == status
