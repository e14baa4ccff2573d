"""What TensorBoard is given is what the metrics file has."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from shardmlx.config.objective import MEANS
from shardmlx.runreport.tensorboard import TensorBoardLog
from tests.helpers.stories import preferences, story


def tell(log: TensorBoardLog, events: Sequence[dict[str, Any]]) -> None:
    for each in events:
        log.take(each["event"], {key: value for key, value in each.items() if key != "event"})


def records(directory: Path) -> Iterator[Any]:
    """Yield the events of the files, as TensorBoard reads them: length, sums, protocol buffer."""
    for path in sorted((directory / "tensorboard").iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            yield Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for record in records(directory):
        for value in record.summary.value:
            if value.HasField("simple_value"):
                found.setdefault(value.tag, []).append((record.step, value.simple_value))
    return found


def test_the_values_are_those_of_the_run(tmp_path: Path) -> None:
    log = TensorBoardLog(str(tmp_path))
    tell(log, story())
    # Each report is on the disk at once: nothing is closed here.
    found = scalars(tmp_path)
    train = [event for event in story() if event["event"] == "train"]

    def told(field: str) -> list[tuple[int, float]]:
        return [(event["step"], float(np.float32(event[field]))) for event in train]

    assert found["loss/training"] == told("loss")
    assert found["learning_rate"] == told("learning_rate")
    assert found["grad_norm"] == told("grad_norm")
    assert found["tokens_per_second"] == told("tokens_per_second")
    assert [step for step, _ in found["loss/validation"]] == [1, 10, 20, 30, 40, 50, 60]
    seconds = [value for _, value in found["rank_1/idle_seconds"]]
    assert seconds == pytest.approx([event["ranks"][1]["idle_seconds"] for event in train])
    log.close()


def test_what_preferences_say_is_there_for_training_and_validation(tmp_path: Path) -> None:
    log = TensorBoardLog(str(tmp_path))
    told = preferences()
    tell(log, [*told, {"event": "test", "loss": 0.5, "accuracy": 0.75, "time": 1.0}])
    found = scalars(tmp_path)
    for kind, name in (("train", "training"), ("val", "validation")):
        events = [event for event in told if event["event"] == kind]
        for field in MEANS:
            values = [(event["step"], float(np.float32(event[field]))) for event in events]
            assert found[f"{field}/{name}"] == values
    assert found["accuracy/test"] == [(60, 0.75)]
    assert not [name for name in found if name.startswith("margin/test")]
    log.close()


def test_what_a_resumed_run_makes_again_is_forgotten(tmp_path: Path) -> None:
    log = TensorBoardLog(str(tmp_path))
    tell(log, story())
    (begun,) = [each for each in records(tmp_path) if each.HasField("session_log")]
    assert begun.session_log.status == SessionLog.START
    assert begun.step == 21
    log.close()


def test_the_options_are_a_table_of_text(tmp_path: Path) -> None:
    log = TensorBoardLog(str(tmp_path))
    options = {"model": "</td>`<script>", "seed": 0}
    tell(log, [{"event": "start", "step": 0, "options": options, "time": 1.5}])
    log.close()
    (value,) = [value for record in records(tmp_path) for value in record.summary.value]
    assert value.tag.startswith("options")
    (table,) = value.tensor.string_val
    assert table.decode().splitlines()[2:] == ["| model | `</td> <script>` |", "| seed | `0` |"]


def test_a_run_that_never_began_leaves_nothing(tmp_path: Path) -> None:
    TensorBoardLog(str(tmp_path)).close()
    assert list(tmp_path.iterdir()) == []
