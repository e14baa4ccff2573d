"""The server's connections: clients that vanish, dawdle, flood, and a server that stops."""

import asyncio
import errno
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from shardmlx.common import http_listener, uvicorn_thread
from shardmlx.common.http_listener import LOOPBACK, address_of, bind, bind_both, trusted_hosts
from shardmlx.common.uvicorn_thread import HttpServer
from shardmlx.config import serve
from shardmlx.config.serve import ServeConfig, check_packages
from shardmlx.errors import UserError
from shardmlx.server import body_reader
from tests.helpers.http_serving import Parrot, Serving, serving
from tests.helpers.ports import free_port
from tests.helpers.refusals import refusal


@contextmanager
def connected(server: Serving) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        yield connection


@contextmanager
def asked_early(app: ASGIApp) -> Iterator[socket.socket]:
    """A client whose request is there before the server of ``app`` has started."""
    listener = bind("127.0.0.1", 0)
    with socket.create_connection(listener.getsockname()[:2], timeout=30) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        server = HttpServer(app, listener, no_http={})
        server.start()
        try:
            yield connection
        finally:
            server.stop(5)


def head(path: str, *lines: str) -> bytes:
    all_lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    return "\r\n".join([*all_lines, *lines, "", ""]).encode()


def whole(stream: bool, **parameters: object) -> bytes:
    body = json.dumps({"prompt": "hello", "stream": stream, **parameters}).encode()
    return head("/v1/completions", f"Content-Length: {len(body)}") + body


def received(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def received_meanwhile(connection: socket.socket) -> Callable[[], bytes]:
    """What comes up to the end, read at the same time; call it to wait for that."""
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(received(connection)))
    thread.start()

    def wait() -> bytes:
        thread.join(30)
        return got[0]

    return wait


@contextmanager
def reads_nothing(server: Serving) -> Iterator[None]:
    """A client of six streams that are more than its buffers hold."""
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(("127.0.0.1", server.port))
        slow.sendall(whole(True, n=6, max_tokens=900, logprobs=20))
        server.until(lambda: len(server.parrot.added) == 6)
        yield


def until(connection: socket.socket, what: bytes) -> bytes:
    got = b""
    while what not in got:
        more = connection.recv(1 << 16)
        assert more, f"the connection ended after {got!r}"
        got += more
    return got


def send_until_it_breaks(connection: socket.socket, what: bytes) -> None:
    with suppress(ConnectionError):
        while True:
            connection.sendall(what)
            time.sleep(0.005)


# Clients that go away.


@pytest.mark.parametrize("stream", [True, False])
def test_who_vanishes_while_waiting_is_cancelled(stream: bool) -> None:
    with serving() as server:
        server.parrot.goes_on.clear()
        with connected(server) as connection:
            connection.sendall(whole(stream))
            server.until(lambda: server.service.load[1] == 1)
        server.until(lambda: server.parrot.cancelled == [0])
        assert server.service.load[1] == 0


@pytest.mark.parametrize("stream", [True, False])
def test_who_vanishes_in_the_middle_is_cancelled_at_the_next_token(stream: bool) -> None:
    step_ends = threading.Event()
    step_ends.set()
    with serving(parrot=Parrot(steps=3, lasts=step_ends)) as server:
        with connected(server) as connection:
            connection.sendall(whole(stream, max_tokens=900))
            server.until(lambda: server.parrot.steps == 0)
            text = server.parrot.texts[0]
            step_ends.clear()
            server.parrot.goes_on.set()
        cancelled = 'shardmlx_texts_total{end="cancelled"} 1.0'
        server.until(lambda: cancelled in httpx.get(f"{server.address}/metrics").text)
        generated = text.generated
        step_ends.set()
        server.until(lambda: server.parrot.cancelled == [0])
        assert 3 <= generated <= text.generated <= generated + 1


def test_all_texts_of_who_vanishes_are_cancelled() -> None:
    with serving(parrot=Parrot(steps=3)) as server:
        with connected(server) as connection:
            connection.sendall(whole(True, n=3))
            until(connection, b"data:")
        server.until(lambda: sorted(server.parrot.cancelled) == [0, 1, 2])


def test_who_vanishes_in_the_middle_of_a_body_leaves_no_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving() as server:
        with connected(server) as connection:
            connection.sendall(head("/v1/completions", "Content-Length: 100") + b'{"prompt"')
        assert httpx.get(f"{server.address}/health").status_code == 200
        assert server.parrot.added == []
    assert caplog.messages == []


def test_who_reads_slowly_holds_up_nobody() -> None:
    with serving() as server, reads_nothing(server):
        asked = {"prompt": "hello", "max_tokens": 200}
        answer = httpx.post(f"{server.address}/v1/completions", json=asked, timeout=60.0)
        assert answer.json()["choices"][0]["text"] == 40 * "hello"
        server.until(lambda: server.parrot.is_idle)
        only_one = '\nshardmlx_texts_total{end="length"} 1.0\n'
        assert only_one in httpx.get(f"{server.address}/metrics").text
    assert server.parrot.cancelled == []


# Bodies and heads that are too large, or too slow.


@pytest.mark.parametrize(
    ("length", "chunks"),
    [("Content-Length: 99999999999", 0), ("Transfer-Encoding: chunked", 2)],
    ids=["by its own word", "in chunks without an end"],
)
def test_a_body_that_is_too_large_is_refused_before_it_is_read_whole(
    length: str, chunks: int
) -> None:
    with serving(max_body_bytes=1000) as server, connected(server) as connection:
        connection.sendall(head("/v1/completions", length))
        for _ in range(chunks):
            connection.sendall(b"200\r\n" + 512 * b" " + b"\r\n")
        answer = until(connection, b"}}")
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"the body is larger than 1000 bytes, the most that is read" in answer


def test_a_body_that_is_not_wanted_is_not_asked_for() -> None:
    with serving() as server:
        with connected(server) as connection:
            connection.sendall(
                head("/v1/completions", "Content-Length: 9999999", "Expect: 100-continue")
            )
            assert until(connection, b"\r\n").startswith(b"HTTP/1.1 413 ")
        body = b'{"prompt": "hello", "max_tokens": 1}'
        with connected(server) as connection:
            expect = head("/v1/completions", f"Content-Length: {len(body)}", "Expect: 100-continue")
            connection.sendall(expect)
            assert until(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
            connection.sendall(body)
            assert until(connection, b"}}").startswith(b"HTTP/1.1 200 ")


def test_a_client_that_sends_all_of_a_huge_body_reads_why_it_was_refused() -> None:
    with serving() as server:
        for content in (iter([1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20]), None):
            answer = httpx.post(
                f"{server.address}/v1/completions",
                content=5 * (1 << 20) * b"x" if content is None else (n * b"x" for n in content),
                headers={"content-type": "application/json"},
            )
            assert answer.status_code == 413


def test_a_body_that_goes_on_after_its_refusal_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_thread, "SECONDS_FOR_HEAD", 0.05)
    with serving(max_body_bytes=10) as server, connected(server) as connection:
        connection.sendall(head("/v1/completions", "Transfer-Encoding: chunked"))
        send_until_it_breaks(connection, b"400\r\n" + 1024 * b"x" + b"\r\n")


def test_a_body_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_reader, "SECONDS_FOR_BODY", 0.05)
    with serving() as server, connected(server) as connection:
        connection.sendall(head("/v1/completions", "Content-Length: 100") + b"{")
        answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"the body did not come within 0.05 seconds" in answer


@pytest.mark.parametrize("given", [b"", b"GET", b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: "])
def test_a_head_that_does_not_come(monkeypatch: pytest.MonkeyPatch, given: bytes) -> None:
    monkeypatch.setattr(uvicorn_thread, "SECONDS_FOR_HEAD", 0.05)
    with serving() as server, connected(server) as connection:
        connection.sendall(given)
        assert received(connection) == b""


def test_a_slow_answer_is_no_slow_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_thread, "SECONDS_FOR_HEAD", 0.05)

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.2)
        await no_content(scope, receive, send)

    # A head's time counts from when the server accepts: this one has come by then.
    with asked_early(slow) as connection:
        assert until(connection, b"\r\n").startswith(b"HTTP/1.1 204 ")


def test_what_is_no_http_is_refused_and_a_huge_head_too() -> None:
    with serving() as server:
        tls = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n"
        for nonsense in (tls, b"GET / " + 20_000 * b"x"):
            with connected(server) as connection:
                connection.sendall(nonsense)
                head, _, body = received(connection).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 400 ")
                error = json.loads(body)["error"]
                assert error["message"].startswith(
                    "this is not an HTTP request, or its head is too lo"
                )
        assert httpx.get(f"{server.address}/health").status_code == 200


def test_a_body_with_two_lengths_is_refused_and_its_connection_closed() -> None:
    """What one length takes for the body's rest is a request by the other (RFC 9112)."""
    with serving() as server, connected(server) as connection:
        lengths = ("Content-Length: 4", "Transfer-Encoding: chunked")
        connection.sendall(head("/v1/completions", *lengths) + b"0\r\n\r\n" + 2 * whole(False))
        answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"both Content-Length and Transfer-Encoding" in answer
        assert answer.count(b"HTTP/1.1") == 1
        assert server.parrot.added == []


# Starting and stopping.


def test_stopping_ends_open_streams_with_an_error_and_closes_the_port() -> None:
    with serving(parrot=Parrot(steps=2)) as server:
        with connected(server) as connection:
            connection.sendall(whole(True))
            until(connection, b'"e"')
            server.service.close(0)
            rest = received_meanwhile(connection)
            server.server.stop(30)
            said = rest()
        assert b"no text is generated any more: the server is stopping" in said
        assert b"[DONE]" not in said
        assert said.endswith(b"0\r\n\r\n")
        with pytest.raises(OSError, match=r"refused"):
            socket.create_connection(("127.0.0.1", server.port))


def test_stopping_lets_open_texts_end_and_refuses_new_ones() -> None:
    with serving(parrot=Parrot(steps=2)) as server, connected(server) as connection:
        connection.sendall(whole(True, max_tokens=4))
        until(connection, b'"e"')
        server.service.close(30)
        refused = httpx.post(f"{server.address}/v1/completions", json={"prompt": "hello"})
        assert refused.status_code == 503
        assert "the server is stopping" in refused.json()["error"]["message"]
        server.parrot.goes_on.set()
        assert b'"finish_reason": "length"' in until(connection, b"data: [DONE]\n\n")


def test_who_does_not_read_cannot_keep_the_server_from_stopping(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        serving() as server,
        reads_nothing(server),
        connected(server) as idle,
        connected(server) as half,
    ):
        half.sendall(b"POST /v1/comp")
        server.until(lambda: server.parrot.is_idle)
        server.service.close(0)
        server.server.stop(0.2)
        assert idle.recv(1) == b""
    assert caplog.messages == []


async def no_content(scope: Scope, receive: Receive, send: Send) -> None:
    """An application."""
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


def test_whoever_waits_is_told_of_the_end_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[BaseException | None] = []
    server = HttpServer(no_content, bind("127.0.0.1", 0), no_http={}, on_end=ends.append)
    server.start()
    server.stop(0)
    assert ends == [None]

    async def fail(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(uvicorn_thread._Server, "main_loop", fail)
    server = HttpServer(no_content, bind("127.0.0.1", 0), no_http={}, on_end=ends.append)
    server.start()
    server.stop(0)
    assert str(ends[1]) == "a fault"


def test_an_access_log_is_kept_only_if_it_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    monkeypatch.setattr(logging.getLogger("uvicorn.access"), "propagate", True)
    for access_log in (True, False):
        server = HttpServer(no_content, bind("127.0.0.1", 0), no_http={}, access_log=access_log)
        server.start()
        httpx.get(f"{server.address}/path")
        server.stop(5)
        err = capsys.readouterr().err
        assert ('"GET /path HTTP/1.1" 204' in err) == access_log


# Sockets.


def test_a_port_that_is_taken() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        caught = refusal(bind, "127.0.0.1", port)
    assert f"--host 127.0.0.1 --port {port}" in caught.problem


@pytest.mark.parametrize("host", ["nowhere.invalid", "192.0.2.1", "x" * 300])
def test_a_host_that_is_none(host: str) -> None:
    assert f"--host {host}" in refusal(bind, host, 0).problem


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_this_machine_is_reached_by_ipv4_and_ipv6(host: str) -> None:
    listeners = bind_both(host, 0)
    if len(listeners) == 1:
        pytest.skip("this machine has no IPv6")
    addresses = [*map(address_of, listeners)]
    port = listeners[0].getsockname()[1]
    assert addresses == [f"http://127.0.0.1:{port}", f"http://[::1]:{port}"]
    server = HttpServer(no_content, *listeners, no_http={})
    assert server.address == addresses[0]
    server.start()
    try:
        assert [httpx.get(each).status_code for each in addresses] == [204, 204]
    finally:
        server.stop(5)
    assert [each.fileno() for each in listeners] == [-1, -1]


def test_localhost_is_not_shared_with_another_program() -> None:
    try:
        other = bind("::1", free_port())
    except UserError:
        pytest.skip("this machine has no IPv6")
    with other, pytest.raises(UserError) as caught:
        bind_both("127.0.0.1", other.getsockname()[1])
    assert "::1" in caught.value.problem


@pytest.mark.parametrize("missing", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_where_there_is_no_ipv6(missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the kernel, nor on the interface."""

    class IPv4(socket.socket):
        def __init__(self, family: int = -1, *how: Any, **more: Any) -> None:
            if (family, missing) == (socket.AF_INET6, errno.EAFNOSUPPORT):
                raise OSError(missing, "no IPv6")
            super().__init__(family, *how, **more)

        def bind(self, address: Any) -> None:
            if self.family == socket.AF_INET6:
                raise OSError(missing, "no IPv6")
            super().bind(address)

    monkeypatch.setattr("shardmlx.common.http_listener.socket.socket", IPv4)
    (listener,) = bind_both("127.0.0.1", 0)
    with listener:
        assert listener.family == socket.AF_INET


def test_an_address_for_everyone_can_be_typed_on_a_phone(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, host in (("10.1.2.3", "10.1.2.3"), (None, "0.0.0.0")):
        monkeypatch.setattr(http_listener, "source_address", {"192.0.2.1": found}.get)
        with bind("0.0.0.0", 0) as listener:
            port = listener.getsockname()[1]
            assert address_of(listener) == f"http://{host}:{port}"


def test_names_are_checked_where_only_this_machine_is_meant() -> None:
    with bind("127.0.0.1", 0) as loopback, bind("0.0.0.0", 0) as everywhere:
        assert frozenset(LOOPBACK) == {"localhost", "127.0.0.1", "::1"}
        assert trusted_hosts(loopback) == frozenset(LOOPBACK)
        assert trusted_hosts(loopback, ["mac.local"]) == frozenset({*LOOPBACK, "mac.local"})
        assert trusted_hosts(everywhere) is None
        assert trusted_hosts(everywhere, ["mac.local"]) == frozenset(
            {*LOOPBACK, "0.0.0.0", "mac.local"}
        )


def test_who_connects_before_the_server_has_started_waits() -> None:
    with asked_early(no_content) as early:
        assert until(early, b"\r\n").startswith(b"HTTP/1.1 204 ")


def test_missing_packages_are_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    check_packages(ServeConfig.from_flat())
    monkeypatch.setattr(serve, "find_spec", lambda name: name if name[0] == "p" else None)
    remedy = refusal(check_packages, ServeConfig.from_flat()).remedy
    assert remedy == "pip install 'shardmlx[serve]'"
