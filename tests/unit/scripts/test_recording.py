"""The recording of a terminal that the site plays, and the script that makes it."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from itertools import pairwise
from types import ModuleType

import pytest

from shardmlx.config.commands import BY_NAME
from tests.helpers.sources import ROOT


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("recording")


def test_it_is_an_asciicast_of_what_the_script_types(recording: ModuleType) -> None:
    header, *events = map(json.loads, recording.CAST.read_text(encoding="utf-8").splitlines())
    assert (header["version"], header["width"]) == (2, recording.COLUMNS)
    assert all(earlier[0] <= later[0] for earlier, later in pairwise(events))
    assert {kind for _, kind, _ in events} == {"o"}
    shown = "".join(text for _, _, text in events)
    at = 0
    for command, _ in recording.TYPED:
        at = shown.index(f"$\x1b[0m {command}\r\n", at) + 1
    assert "^C" in shown[:at]
    assert "step 5: loss" in shown[:at]
    assert "step 12: loss" in shown[at:]
    assert str(ROOT) not in shown
    assert "root" not in shown
    assert recording.COLUMNS == 100


def test_what_is_shown_before_it_plays_is_the_falling_loss(recording: ModuleType) -> None:
    """By the time in the link to it."""
    page = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    (seconds,) = re.findall(r"\]\(pictures/first-run\.cast#t=(\d+)\)", page)
    _, *events = map(json.loads, recording.CAST.read_text(encoding="utf-8").splitlines())
    before = "".join(text for at, _, text in events if at <= float(seconds))
    losses = re.findall(r"step (\d+): loss ([\d.]+)", before.rpartition("Resumed from")[2])
    steps = [int(step) for step, _ in losses]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert len(steps) > 3
    assert float(losses[-1][1]) < float(losses[0][1])
    assert before.rpartition("Resumed from")[2].count("\n") < recording.LINES


def test_its_commands_can_be_typed(recording: ModuleType) -> None:
    for command, _ in recording.TYPED:
        program, name, *words = shlex.split(command)
        if program == "shardmlx" and name != "launch":
            BY_NAME[name].line.parser().parse_args(words)
