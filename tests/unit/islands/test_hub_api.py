"""The hub as islands and strangers meet it, over real HTTP."""

from __future__ import annotations

import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from shardmlx.common.http_listener import POLICY
from shardmlx.islands import hub_api
from shardmlx.islands.encodings import encoding_named
from shardmlx.islands.protocol import Join, Progress, SharedTensor, report_path
from shardmlx.main import main
from tests.helpers.island_hub import RunningHub, running_hub

TENSORS = (
    SharedTensor("model.layers.0.lora_a", (2, 3)),
    SharedTensor("model.layers.1.lora_a", (4,)),
)
JOIN = Join(
    name="ann",
    model={"type": "llama"},
    tensors=TENSORS,
    adapter_config={"fine_tune_type": "lora"},
)
START = np.arange(10, dtype=np.float32)


class Client:
    """An island that speaks HTTP by itself."""

    def __init__(self, hub: RunningHub, name: str, http: httpx.Client) -> None:
        http.headers["authorization"] = f"Bearer {hub.tokens[name]}"
        self.http = http
        self.name = name

    def join(self, message: Join = JOIN) -> httpx.Response:
        return self.http.post("/join", json=replace(message, name=self.name).to_json())

    def seed(self) -> None:
        assert self.join().json()["versions"] == [None]
        assert self.http.put("/fragments/0/seed", content=START.tobytes()).status_code == 200

    def report(self, difference: Any, base: int = 0, rows: int = 1, **more: Any) -> httpx.Response:
        path = report_path(0, life=1, base=base, rows=rows, tokens=7)
        body = np.asarray(difference, np.float32).tobytes()
        return self.http.put(path, content=body, **more)

    def version(self, after: int) -> int:
        """Wait for the version above one."""
        return int(self.http.get(f"/fragments/0?after={after}").headers["x-version"])

    def weights(self) -> list[float]:
        content = self.http.get("/fragments/0").content
        return [float(each) for each in np.frombuffer(content, np.float32)]


@contextmanager
def clients(path: Path, **options: Any) -> Iterator[tuple[RunningHub, Client, Client]]:
    """A hub whose islands ann and ben have joined, and the two."""
    options = {"outer_optimizer": "average", "inner_steps": 3, **options}
    with running_hub(path, "ann,ben", **options) as hub, ExitStack() as stack:
        ann, ben = (
            Client(hub, name, stack.enter_context(httpx.Client(base_url=hub.url, timeout=20)))
            for name in ("ann", "ben")
        )
        if hub.rounds.run.first is None:
            ann.seed()
        ben.join()
        yield hub, ann, ben


def test_two_islands_join_report_and_get_the_mean_of_their_weights(tmp_path: Path) -> None:
    with clients(tmp_path) as (_, ann, ben):
        joined = ben.join().json()
        assert (joined["life"], joined["versions"]) == (2, [0])
        assert joined["terms"]["inner_steps"] == 3
        assert ben.weights() == START.tolist()
        acknowledged = {"version": 0, "ended": False}
        assert ann.report(np.full(10, 1)).json() == acknowledged
        assert ben.report(np.full(10, 3)).status_code == 200
        assert ann.version(after=0) == 1
        assert ann.weights() == (START - 2).tolist()


def test_a_repeated_report_counts_once_and_one_that_contains_it_is_told_the_version(
    tmp_path: Path,
) -> None:
    with clients(tmp_path) as (_, ann, ben):
        ann.report(np.full(10, 2))
        ann.report(np.full(10, 1))
        ben.report(np.full(10, 1))
        assert ann.version(after=0) == 1
        refusal = ann.report(np.full(10, 2))
        assert (refusal.status_code, refusal.json()["version"]) == (409, 1)
        assert ann.weights() == (START - 1).tolist()


def test_a_download_goes_on_where_it_broke_off_and_begins_anew_with_a_new_version(
    tmp_path: Path,
) -> None:
    with clients(tmp_path, deadline=0.05) as (_, ann, _ben):
        first = ann.http.get("/fragments/0")
        assert (first.headers["x-version"], len(first.content)) == ("0", 40)
        resumed = {"range": "bytes=8-", "if-range": first.headers["etag"]}
        rest = ann.http.get("/fragments/0", headers=resumed)
        assert (rest.status_code, rest.content) == (206, first.content[8:])
        ann.report(np.full(10, 1))
        assert ann.version(after=0) == 1
        whole = ann.http.get("/fragments/0", headers=resumed)
        assert (whole.status_code, whole.headers["x-version"]) == (200, "1")


def test_the_encoded_change_leads_from_one_version_to_the_next(tmp_path: Path) -> None:
    with clients(tmp_path, deadline=0.05, encoding="int8") as (hub, ann, _ben):
        encoding = encoding_named("int8")
        parts = np.split(np.linspace(-1, 1, 10, dtype=np.float32), [6])
        body = b"".join(encoding.encode(part).tobytes() for part in parts)
        path = report_path(0, life=1, base=0, rows=1, tokens=1)
        assert ann.http.put(path, content=body).status_code == 200
        change = ann.http.get("/fragments/0?after=0")
        assert [change.headers[each] for each in ("x-version", "x-part")] == ["1", "change"]
        (tmp_path / "change").write_bytes(change.content)
        moved = [each.reshape(-1) for each in hub.rounds.fragment(0).decoded(tmp_path / "change")]
        assert ann.weights() == (START + np.concatenate(moved)).tolist()


def test_a_hub_that_is_stopped_ends_at_once_though_an_island_waits(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        with clients(tmp_path) as (hub, ann, _):
            url = f"{hub.url}/fragments/0?after=0"
            island = hub.rounds.islands["ann"]
            before = island.heard
            waiting = pool.submit(httpx.get, url, headers=ann.http.headers, timeout=60)
            while island.heard == before and not waiting.done():
                time.sleep(0.01)
            began = time.monotonic()
        assert time.monotonic() - began < hub_api.SECONDS_TO_WAIT / 2
        with pytest.raises(httpx.TransportError):
            waiting.result()


def test_without_an_islands_token_nothing_is_told_or_taken(tmp_path: Path) -> None:
    with clients(tmp_path) as (hub, ann, _):
        for token in ("", "Bearer", "Bearer wrong", "Basic {0}", "Bearer {0}x", "{0}"):
            ann.http.headers["authorization"] = token.format(hub.tokens["ann"])
            for path in ("/fragments/0", "/fragments/0?after=0", "/fragments/0/../0"):
                assert ann.http.get(path).status_code == 401
            assert ann.report(START).status_code == 401
            assert ann.join().status_code == 401
            assert ann.http.get("/status", headers={"host": "elsewhere"}).status_code == 401
        assert hub.rounds.strangers.total() == 36
        assert hub.rounds.fragment(0).pending == []


def test_the_own_machine_sees_status_and_page_but_no_token(tmp_path: Path) -> None:
    with clients(tmp_path) as (hub, ann, _):
        del ann.http.headers["authorization"]
        ann.http.post("/progress", json={})
        status = ann.http.get("/status")
        assert status.status_code == 200
        assert not any(token in status.text for token in hub.tokens.values())
        assert [*status.json()["islands"]] == ["ann", "ben"]
        for header in ("forwarded", "x-forwarded-for"):
            assert ann.http.get("/status", headers={header: "1.2.3.4"}).status_code == 401
        page = ann.http.get("/")
        assert page.headers["content-security-policy"] == POLICY
        parts = re.findall(r'(?:href|src)="(page/[^"]+)"', page.text)
        assert len(parts) == 5
        assert {ann.http.get(f"/{part}").status_code for part in parts} == {200}


def test_wrong_uploads_are_refused_counted_and_leave_nothing(tmp_path: Path) -> None:
    with clients(tmp_path) as (hub, ann, _):
        before = sorted(tmp_path.rglob("*"))
        counts = "rows=1&tokens=1"
        for path, nbytes, status in (
            (f"/fragments/0/reports/1-0?{counts}", 39, 400),
            (f"/fragments/0/reports/1-0?{counts}", 4096, 400),
            ("/fragments/0/reports/1-x?rows=1&tokens=1", 40, 400),
            ("/fragments/0/reports/1-0?rows=1", 40, 400),
            (f"/fragments/0/reports/1-{'9' * 5000}?{counts}", 40, 400),
            (f"/fragments/9/reports/1-0?{counts}", 40, 404),
            (f"/fragments/0/reports/..%2f..%2fx?{counts}", 40, 404),
        ):
            answer = ann.http.put(path, content=b"x" * nbytes)
            assert answer.status_code == status
            assert sorted(answer.json()) == ["error", "remedy"]
        assert sorted(tmp_path.rglob("*")) == before
        assert hub.rounds.islands["ann"].refused == 6  # the last one is not an island's path


def test_no_path_leads_to_a_file_that_is_not_the_pages(tmp_path: Path) -> None:
    with clients(tmp_path) as (hub, _, _ben):
        for path in (
            *("/page/../store.py", "/page/%2e%2e/store.py", "/page//etc/passwd", "/tokens/ann"),
            *("/page/..%2f..%2fpyproject.toml", "/fragments/../tokens/ann", "/run.json"),
        ):
            with closing(connected(hub)) as connection:
                connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                assert connection.recv(12) in (b"HTTP/1.1 404", b"HTTP/1.1 401")


def connected(hub: RunningHub) -> socket.socket:
    host, port = hub.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def test_a_body_that_dawdles_is_cut_off_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with clients(tmp_path) as (hub, _, _ben), closing(connected(hub)) as connection:
        monkeypatch.setattr(hub_api, "SECONDS_OF_SILENCE", 0.2)
        head = [
            "PUT /fragments/0/reports/1-0?rows=1&tokens=1 HTTP/1.1",
            *("Host: localhost", f"Authorization: Bearer {hub.tokens['ann']}"),
            *("Content-Length: 40", "", "12345"),
        ]
        connection.sendall("\r\n".join(head).encode())
        assert connection.recv(12) == b"HTTP/1.1 408"
        assert [*tmp_path.rglob("partial-*")] == []


def test_a_client_that_vanishes_in_a_body_leaves_nothing(tmp_path: Path) -> None:
    with clients(tmp_path) as (hub, ann, _):
        with closing(connected(hub)) as connection:
            head = "PUT /fragments/0/reports/1-0?rows=1&tokens=1 HTTP/1.1"
            known = f"Host: localhost\r\nAuthorization: Bearer {hub.tokens['ann']}"
            connection.sendall(f"{head}\r\n{known}\r\nContent-Length: 40\r\n\r\n123".encode())
            while not [*tmp_path.rglob("partial-*")]:
                time.sleep(0.01)
        while [*tmp_path.rglob("partial-*")]:
            time.sleep(0.01)
        assert ann.report(np.full(10, 1)).status_code == 200


def test_a_flood_of_bodies_of_one_island_is_bounded_and_another_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_api, "MOST_BODIES", 2)
    with clients(tmp_path) as (hub, ann, ben), ExitStack() as stack:
        known = f"Host: localhost\r\nAuthorization: Bearer {hub.tokens['ann']}"
        head = f"POST /join HTTP/1.1\r\n{known}\r\nContent-Length: 40\r\n\r\n1"
        # One that comes while a report is read may be refused itself.
        while ann.report(np.full(10, 1)).status_code != 429:
            stack.enter_context(closing(connected(hub))).sendall(head.encode())
        assert ann.join().json()["retry"] is True
        assert ben.report(np.full(10, 1)).status_code == 200


def test_json_that_is_no_message_is_refused(tmp_path: Path) -> None:
    with clients(tmp_path) as (_, ann, _ben):
        for path, body, status in (
            ("/join", b"[" * 100_000, 400),
            ("/join", b"{}", 422),
            ("/progress", b'{"step": 1, "tokens": 1, "loss": NaN}', 422),
            ("/progress", b'{"step": 1, "tokens": 1, "unheard": 2}', 422),
        ):
            assert ann.http.post(path, content=body).status_code == status


def test_progress_is_shown_and_the_first_present_island_is_to_validate(tmp_path: Path) -> None:
    with clients(tmp_path) as (_, ann, ben):
        message = Progress(step=5, tokens=70, loss=2.5).to_json()
        assert ben.http.post("/progress", json=message).json() == {
            "ended": False,
            "evaluate": False,
        }
        assert ann.http.post("/progress", json=message).json()["evaluate"] is True
        island = ben.http.get("/status").json()["islands"]["ben"]
        assert (island["present"], island["losses"], island["late"]) == (True, [[5, 2.5]], 0)


def test_the_command_serves_over_tls_until_it_is_stopped_and_writes_the_weights(
    tmp_path: Path,
) -> None:
    pem = tmp_path / "hub.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*new, "-keyout", str(pem), "-out", str(tmp_path / "crt")], check=True)
    pem.write_bytes(pem.read_bytes() + (tmp_path / "crt").read_bytes())
    words = ["hub", "--path", str(tmp_path / "lab"), "--islands", "ann", "--port", "0"]
    command = [sys.executable, "-m", "shardmlx", *words, "--certificate", str(pem)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        (url,) = re.findall(r"https://\S+:\d+", said)
        token = (tmp_path / "lab" / "tokens" / "ann").read_text()
        assert token not in said
        trusted = ssl.create_default_context(cafile=pem)
        url = url.replace("127.0.0.1", "localhost")
        with httpx.Client(base_url=url, verify=trusted) as http:
            http.headers["authorization"] = f"Bearer {token}"
            assert http.post("/join", json=JOIN.to_json()).json()["versions"] == [None]
            http.put("/fragments/0/seed", content=START.tobytes()).raise_for_status()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 130
    assert main([*words[:3], "--write", str(tmp_path / "out")]) == 0
    assert main(["hub", "--path", str(tmp_path / "none"), "--write", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "none").exists()
    assert main(["hub", "--path", "/proc/none", "--islands", "ann"]) == 2
    found = load_file(tmp_path / "out" / "adapters.safetensors")
    np.testing.assert_array_equal(found[TENSORS[1].name], START[6:])
