"""What ``train`` shows and refuses beside training: rows as they count, the plan, its page."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from shardmlx.common.http_listener import bind
from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError
from shardmlx.training.command import train_model
from tests.helpers.local_transport import alone

Capture = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("limited_to_a_test")


@pytest.fixture
def options(small: Path, pirate: Path, tmp_path: Path) -> dict[str, Any]:
    place = {"adapter_path": str(tmp_path / "out"), "metrics_file": str(tmp_path / "metrics")}
    return {"model": str(small), "data": str(pirate), "num_layers": 4, **place}


def said(options: dict[str, Any], capsys: Capture) -> list[str]:
    config = TrainConfig.from_flat(**options)
    alone(lambda rank: train_model(config, rank))
    return capsys.readouterr().out.splitlines()


def test_rows_are_shown_with_what_counts(
    options: dict[str, Any], tmp_path: Path, capsys: Capture
) -> None:
    """The row with a key more comes after those with fewer, as in mlx-lm."""
    del options["metrics_file"]
    lines = said(options | {"loss_on": "assistant", "show_data": 2}, capsys)
    shown = [line for line in lines if "\u00ab" in line]
    assert len(shown) == 2
    assert sum("count in the loss" in line for line in lines) == 2
    assert not [*tmp_path.iterdir()], "nothing was written"


def test_a_dry_run_says_what_a_run_would_do_and_does_nothing(
    options: dict[str, Any], tmp_path: Path, capsys: Capture
) -> None:
    """Epochs are counted in steps of the data: 32 rows, of which four make a step."""
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=1  # flops=1T\n")
    before = set(tmp_path.iterdir())
    options |= {"dry_run": True, "epochs": 2.5, "checkpoint_dir": str(tmp_path / "checkpoints")}
    lines = said(options | {"hostfile": str(hosts)}, capsys)
    assert "--epochs 2.5: 20 steps" in lines
    (header,) = (each for each in lines if "planned peak" in each)
    assert header.split() == ["rank", "host", "layers", "planned", "peak", "limit", "which", "is"]
    assert lines[lines.index(header) + 1].split()[0] == "0"
    (time,) = (each for each in lines if each.startswith("Time of a step: "))
    assert "of 20 steps" in time
    assert "the FLOP/s of the hostfile, an estimate" in time
    for what, name in (("adapters", "out"), ("checkpoints", "checkpoints"), ("metrics", "metrics")):
        assert f"Would write {what} to {tmp_path / name}" in lines
    assert lines[-1] == "Dry run: nothing was loaded or written"
    assert set(tmp_path.iterdir()) == before


def test_where_no_speed_is_known_a_dry_run_says_no_time(
    options: dict[str, Any], capsys: Capture
) -> None:
    lines = said(options | {"dry_run": True}, capsys)
    (time,) = (each for each in lines if each.startswith("Time of a step: "))
    assert time.startswith("Time of a step: not known: measure it with shardmlx profile")


def test_a_run_can_be_looked_at_while_it_trains(
    options: dict[str, Any], tmp_path: Path, capsys: Capture
) -> None:
    """Its page and its events, also beside somebody who hangs, until it ends."""
    told: list[Mapping[str, Any]] = []
    addresses: list[str] = []

    def look(event: str, values: Mapping[str, Any]) -> None:
        if event != "train" or values["step"] != 3:
            return
        said = capsys.readouterr().out
        addresses.extend(re.findall(r"^The run at (http://127\.0\.0\.1:\d+)$", said, re.M))
        (address,) = addresses
        hanging = stack.enter_context(
            socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
        )
        hanging.sendall(b"GET /events HTTP/1.1\r\n")
        assert "<h1" in httpx.get(address).text
        told.extend(httpx.get(f"{address}/events?after=0").json()["events"])
        gauges = httpx.get(f"{address}/metrics")
        assert "text/plain; version=" in gauges.headers["content-type"]
        assert f"shardmlx_train_loss {told[-1]['loss']}\n" in gauges.text
        assert re.search(r'^shardmlx_rank_idle_seconds\{host="\S+",rank="0"\} ', gauges.text, re.M)

    options |= {"metrics_port": 0, "iters": 4, "steps_per_report": 1, "val_batches": 0}
    config = TrainConfig.from_flat(**options)
    with ExitStack() as stack:
        alone(lambda rank: train_model(config, rank, on_event=look))
    lines = [json.loads(line) for line in (tmp_path / "metrics").read_text().splitlines()]
    assert [each["event"] for each in told] == ["start", "train", "train"]
    assert told == lines[:3]
    with pytest.raises(httpx.ConnectError):
        httpx.get(addresses[0])


def test_a_port_that_is_taken_ends_the_run_before_anything_is_loaded(
    options: dict[str, Any], tmp_path: Path, capsys: Capture
) -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UserError) as refused:
            said(options | {"metrics_port": port}, capsys)
    assert str(refused.value) == (
        f"--metrics-host 127.0.0.1 --metrics-port {port}: Address already in use: "
        "give an address of this machine, and a port from 1024 that is free, or 0 for any"
    )
    assert not [*tmp_path.iterdir()]
    assert capsys.readouterr().out == ""
