"""What is said to the user."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest

from shardmlx.common.reporter import Reporter
from shardmlx.errors import UserError


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
