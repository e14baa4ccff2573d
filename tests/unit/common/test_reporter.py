"""What is said to the user."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path

import pytest

from shardmlx.common.reporter import Reporter
from shardmlx.errors import UserError
from tests.helpers.terminals import Terminal


def test_what_counts_is_marked_and_data_steer_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Reporter().say_marked([("who [bold]", False), ("\x1b[2Jme\n", True)])
    assert capsys.readouterr().out == "who [bold]«\\x1b[2Jme\n»\n"


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_named_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = Reporter(tmp_path / "metrics")
    monkeypatch.setattr(Path, "open", lambda *args, **kwargs: FullDisk())
    with pytest.raises(UserError, match=r"cannot write .*/metrics: No space left on device"):
        reporter.event("start", {})


def test_a_metrics_file_is_one_runs_at_a_time(tmp_path: Path) -> None:
    first, second = (Reporter(tmp_path / "metrics") for _ in range(2))
    first.event("start", {"step": 0})
    before = (tmp_path / "metrics").read_bytes()
    for write in (lambda: second.event("start", {}), lambda: Reporter(tmp_path / "metrics")):
        with pytest.raises(UserError) as refused:
            write()
        assert str(tmp_path / "metrics") in refused.value.problem
    assert (tmp_path / "metrics").read_bytes() == before
    first.close()
    second.event("start", {"step": 7})
    assert b'"step": 7' in (tmp_path / "metrics").read_bytes()


@pytest.mark.parametrize("given", ["", "1"])
def test_a_terminal_has_colours_unless_no_color_is_set(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", given)
    program = "from shardmlx.common.reporter import Reporter; Reporter().warn('x')"
    # A shell whose output is the terminal, too, as mpirun's is.
    with Terminal(["sh", "-c", f'"{sys.executable}" -c "{program}"; exit $?']) as terminal:
        status, shown = terminal.end()
    assert status == 0
    assert shown == ("warning: x\r\n" if given else "\x1b[33mwarning: x\x1b[0m\r\n")
