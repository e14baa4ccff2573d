"""What services are told of a run, and what becomes of one that fails. ``tests/mpi/test_services``
has the libraries themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from shardmlx.common.reporter import Reporter
from shardmlx.errors import AgreedFailure, Stopped, UserError
from shardmlx.runreport.services import LoggedRun, RunServices, is_orderly, scalars

TRAIN = {
    "step": 4,
    "loss": 2.5,
    "grad_norm": None,
    "step_seconds": 0.5,
    "margin": 0.25,
    "shapes": 3,
    "time": 17e8,
    "ranks": [{"peak_memory_bytes": 2_000_000_000}, {"peak_memory_bytes": 3_000_000_000}],
}


def run_in(directory: Path) -> LoggedRun:
    return LoggedRun(name="out", project=None, directory=directory, options={"iters": 6})


def test_names_are_those_of_mlx_lm_or_of_the_metrics_file() -> None:
    assert scalars("train", TRAIN) == {
        "train_loss": 2.5,
        "step_seconds": 0.5,
        "iterations_per_second": 2.0,
        "peak_memory": 3.0,
        "margin": 0.25,
    }
    val = {"step": 4, "loss": 2.0, "seconds": 0.25, "margin": 1.0, "time": 17e8}
    assert scalars("val", val) == {"val_loss": 2.0, "val_time": 0.25, "val_margin": 1.0}
    assert scalars("test", {"loss": 2.0, "time": 17e8}) == {"test_loss": 2.0}
    assert scalars("checkpoint", {"step": 4, "seconds": 1.0}) == {}


class Recorder(ModuleType):
    """A stand-in for trackio, whose network fails at a step."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__("trackio")
        self.fails_at = fails_at
        self.logged: list[int] = []
        self.finished = 0

    def init(self, **how: object) -> None:
        assert how == {"project": "shardmlx", "name": "out", "config": {"iters": 6}}
        if self.fails_at == 0:
            raise ConnectionError("nobody\nis there")

    def log(self, values: dict[str, float], step: int) -> None:
        if step == self.fails_at:
            raise TimeoutError
        self.logged.append(step)

    def finish(self) -> None:
        self.finished += 1


def test_a_service_that_fails_is_named_once_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = Recorder(fails_at=4)
    monkeypatch.setitem(sys.modules, "trackio", library)
    services = RunServices(("trackio",), run_in(tmp_path), Reporter())
    services.take("val", {**TRAIN, "step": 1, "seconds": 1.0})
    for step in (2, 4, 6):
        services.take("train", {**TRAIN, "step": step})
    services.close(None)
    assert library.logged == [0, 2]
    assert library.finished == 0
    said = capsys.readouterr().out
    assert said == "warning: --report-to trackio gets no more of this run: TimeoutError\n"


def test_a_service_that_cannot_begin_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", Recorder(fails_at=0))
    with pytest.raises(UserError) as caught:
        RunServices(("trackio",), run_in(tmp_path), Reporter())
    assert caught.value.problem == "--report-to trackio cannot begin: nobody is there"


def test_a_metrics_file_that_has_gone_costs_the_page_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = Recorder()
    monkeypatch.setitem(sys.modules, "trackio", library)
    services = RunServices(("trackio",), run_in(tmp_path), Reporter())
    services.close(str(tmp_path / "gone.jsonl"))
    assert library.finished == 1
    assert "services get no page of the run" in capsys.readouterr().out


def test_only_a_run_that_ends_in_order_waits_for_services() -> None:
    assert all(map(is_orderly, (None, UserError("x"), AgreedFailure("x"), Stopped(15, "x"))))
    assert not any(map(is_orderly, (RuntimeError("rank 1 is lost"), KeyboardInterrupt())))
