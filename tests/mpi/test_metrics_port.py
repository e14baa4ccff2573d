"""A run that can be looked at: its page and its events, while it trains."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from testbed.jobs import Running

PATIENCE = 60.0


def test_the_page_and_the_events_are_those_of_the_run(
    small: Path, pirate: Path, tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    flags: list[str | Path] = ["--model", small, "--data", pirate, "--num-layers", "-1"]
    flags += ["--iters", "30", "--steps-per-report", "5", "--val-batches", "0"]
    flags += ["--adapter-path", tmp_path / "out", "--metrics-file", metrics]
    with Running.ranks(2, "-m", "shardmlx.train", *flags, "--metrics-port", "0") as running:
        address = wait_for_address(running)
        port = int(address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as hanging:
            hanging.sendall(b"GET /events HTTP/1.1\r\n")
            assert "<h1" in httpx.get(address).text
            seen = 0
            told: list[dict[str, Any]] = []
            while not any(event["event"] == "train" for event in told):
                answer = httpx.get(f"{address}/events?after={seen}", timeout=PATIENCE).json()
                seen = answer["last"]
                told += answer["events"]
            assert running.wait(PATIENCE) == 0, running.job().output
        assert running.left_behind() == []
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert told == lines[: len(told)]
    with pytest.raises(httpx.ConnectError):
        httpx.get(address)


def wait_for_address(running: Running) -> str:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and running.process.poll() is None:
        if found := re.search(r"The run at (http://127\.0\.0\.1:\d+)$", running.job().stdout, re.M):
            return found[1]
        time.sleep(0.05)
    pytest.fail(f"the run does not say where it is\n{running.job().output}")
