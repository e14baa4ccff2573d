"""What is read of a metrics file, and what of it still holds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from shardmlx.errors import UserError
from shardmlx.runreport.metrics_file import MetricsFile, current
from tests.helpers.stories import STORY, story, write_metrics


def steps(events: list[dict[str, Any]], kind: str) -> list[int]:
    return [event["step"] for event in events if event["event"] == kind]


def train(step: int) -> dict[str, Any]:
    return {"event": "train", "step": step, "loss": 1.0}


def test_a_run_that_was_killed_leaves_half_a_line_which_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(STORY.read_text()[:-100])
    assert [*MetricsFile(path)] == [*MetricsFile(STORY)][:-1]


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[]", '"text"', "7", "\x00", "[" * 100_000),
        *('{"step": 1}', '{"event": 1}', '{"event": "train", "step": null}'),
    ],
)
def test_what_is_no_event_is_left_out(line: str, tmp_path: Path) -> None:
    file = write_metrics(tmp_path / "m", train(1), line, "", train(2))
    assert [*MetricsFile(file)] == [train(1), train(2)]


def test_numbers_that_json_does_not_have_are_none(tmp_path: Path) -> None:
    line = '{"event": "train", "loss": NaN, "a": -Infinity, "c": 1e9}'
    (event,) = MetricsFile(write_metrics(tmp_path / "m", line))
    assert event == {"event": "train", "loss": None, "a": None, "c": 1e9}


@pytest.mark.parametrize("content", [b"", b"\n\n", b"hello\n", b"\xff\xfe\x00", b'{"event": "x"}'])
def test_a_file_without_metrics_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"notes\.txt has no metrics .* train --metrics-file"):
        MetricsFile(path)


@pytest.mark.parametrize("name", ["nowhere.jsonl", "."])
def test_a_file_that_cannot_be_read_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read metrics file ") as refused:
        MetricsFile(tmp_path / name)
    assert str(tmp_path / name) in refused.value.problem


def test_a_resumed_run_makes_its_last_steps_again() -> None:
    told, now = story(), current(story())
    assert steps(told, "train").count(24) == 2
    assert steps(now, "train") == list(range(2, 61, 2))
    assert steps(now, "val") == [1, 10, 20, 30, 40, 50, 60]
    (resume,) = [event for event in now if event["event"] == "resume"]
    assert (resume["step"], resume["repeated_steps"]) == (20, 4)
    assert steps(now, "start") == [0, 20]


def test_a_resumed_run_has_not_ended_yet() -> None:
    again = [*story(), {"event": "resume", "step": 60}]
    assert [event for event in current(again) if event["event"] == "summary"] == []


def test_of_files_put_together_the_last_run_is_shown() -> None:
    other = [{"event": "start", "step": 0}, train(1)]
    assert current([*story(), *other]) == other


def test_a_stop_holds_until_the_run_resumes() -> None:
    stop = {"event": "stop", "step": 60, "signal": "SIGTERM", "reason": "stopped by SIGTERM"}
    stopped = [*story()[:-1], stop]
    assert current(stopped)[-1] == stop
    assert stop not in current(
        [*stopped, {"event": "start", "step": 60}, {"event": "resume", "step": 60}]
    )


def test_time_grows_with_the_events_however_often_a_run_resumes() -> None:
    """A run that dies every ten steps, and makes five of them again: 2 s are 20 times enough."""
    events: list[dict[str, Any]] = [{"event": "start", "step": 0}]
    for at in range(0, 50_000, 10):
        events += [train(step) for step in range(at + 1, at + 16)]
        events += [{"event": "start", "step": at + 10}, {"event": "resume", "step": at + 10}]
    begun = time.process_time()
    now = current(events)
    assert time.process_time() - begun < 2
    assert steps(now, "train") == list(range(1, 50_001))
    assert {each["repeated_steps"] for each in now if each["event"] == "resume"} == {5}
