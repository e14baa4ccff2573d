"""A run that can be looked at while it goes on, by whoever asks, however badly they behave."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from shardmlx.common.http_listener import bind
from shardmlx.runreport import live
from shardmlx.runreport.live import LivePage
from shardmlx.runreport.metrics_file import current
from tests.helpers.stories import story


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[LivePage]:
    page = LivePage(bind("127.0.0.1", 0))
    yield page
    monkeypatch.setattr(live, "SECONDS_TO_TELL", 0.0)
    page.close()


def tell(page: LivePage, *events: dict[str, Any]) -> None:
    """Do as a run does with its events."""
    for each in events:
        page.take(each["event"], {key: value for key, value in each.items() if key != "event"})


def events(page: LivePage, after: int = 0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{page.address}/events?after={after}").json()["events"]
    return found


def connected(page: LivePage) -> socket.socket:
    port = int(page.address.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def test_the_events_are_those_of_the_run(page: LivePage) -> None:
    told = current(story())[:7]
    tell(page, *told)
    assert events(page) == told
    assert events(page, after=5) == told[5:]
    # Whoever has seen another run is told everything.
    answer = httpx.get(f"{page.address}/events?after=40&run=another").json()
    assert answer["events"] == told


def test_the_page_asks_for_the_events(page: LivePage) -> None:
    answer = httpx.get(page.address)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-frame-options"] == "DENY"
    assert '"live": true' in answer.text
    assert httpx.head(page.address).headers["content-length"] == str(len(answer.content))


def test_a_question_waits_for_the_next_event(page: LivePage) -> None:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(events(page)))
    thread.start()
    thread.join(0.2)
    assert answers == []
    tell(page, {"event": "val", "step": 1, "loss": 2.0})
    thread.join(30)
    assert [[each["step"] for each in answer] for answer in answers] == [[1]]


def test_a_loss_that_is_not_finite_is_told_as_none(page: LivePage) -> None:
    tell(page, {"event": "train", "step": 1, "loss": float("nan")})
    assert events(page)[-1]["loss"] is None


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_name_that_is_not_this_machines_is_refused(page: LivePage, host: str) -> None:
    """Against DNS rebinding."""
    tell(page, {"event": "val", "step": 1, "loss": 2.0})
    for path in ("/", "/events"):
        assert httpx.get(page.address + path, headers={"host": host}).status_code == 421


def test_everybody_may_ask_where_others_are_meant() -> None:
    page = LivePage(bind("0.0.0.0", 0))
    port = page.address.rpartition(":")[2]
    answer = httpx.get(f"http://127.0.0.1:{port}/", headers={"host": "mac.local"})
    assert answer.status_code == 200
    page.close()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", "/../metrics.jsonl", 404), ("POST", "/", 501)],
)
def test_there_is_nothing_else(page: LivePage, method: str, path: str, status: int) -> None:
    assert httpx.request(method, page.address + path).status_code == status


@pytest.mark.parametrize("after", ["", "-1", "x", "٣", "9" * 5000, "1.5", "0&after=1"])
def test_a_question_without_sense_is_for_all(page: LivePage, after: str) -> None:
    tell(page, {"event": "val", "step": 1, "loss": 2.0})
    assert len(httpx.get(f"{page.address}/events", params=f"after={after}").json()["events"]) == 1


def test_who_hangs_holds_up_neither_the_run_nor_others(page: LivePage) -> None:
    with ExitStack() as stack:
        hanging = [stack.enter_context(connected(page)) for _ in range(16)]
        for connection in hanging:
            connection.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
        tell(page, *story()[:5])
        assert events(page) == story()[:5]
        assert select.select(hanging, [], [], 0)[0] == [], "the page has waited for their end"


def test_an_open_page_learns_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SECONDS_TO_TELL", 60.0)
    page = LivePage(bind("127.0.0.1", 0))
    tell(page, *story()[:3])
    heard: list[Any] = []

    def look() -> None:
        seen, has_ended = 0, False
        while not has_ended:
            answer = httpx.get(f"{page.address}/events?after={seen}").json()
            heard.extend(answer["events"])
            seen, has_ended = answer["last"], answer["ended"]

    thread = threading.Thread(target=look)
    thread.start()
    while len(heard) < 3:
        time.sleep(0.01)
    tell(page, {"event": "summary", "steps": 60})
    page.close()
    thread.join(30)
    assert [event["event"] for event in heard][3:] == ["summary"]


def test_an_end_without_a_page_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SECONDS_TO_TELL", 60.0)
    page = LivePage(bind("127.0.0.1", 0))
    start = time.monotonic()
    page.close()
    assert time.monotonic() - start < live.SECONDS_TO_TELL


def test_a_run_that_resumes_is_shown_whole(tmp_path: Path) -> None:
    lines = story()
    at = next(i for i, event in enumerate(lines) if event["event"] == "resume")
    before = tmp_path / "metrics.jsonl"
    before.write_text("".join(f"{json.dumps(each)}\n" for each in lines[: at - 1]) + '{"half')
    page = LivePage(bind("127.0.0.1", 0), str(before))
    tell(page, *lines[at - 1 :])
    page._log.end()
    assert events(page) == current(lines)
    page.close()


def test_a_process_ends_whoever_hangs() -> None:
    program = (
        "import socket; from shardmlx.common.http_listener import bind;"
        "from shardmlx.runreport.live import LivePage;"
        "page = LivePage(bind('127.0.0.1', 0));"
        "port = int(page.address.rpartition(':')[2]);"
        "one = socket.create_connection(('127.0.0.1', port)); one.sendall(b'GET /events HTTP/1.0');"
        "raise SystemExit(3)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 3
