"""What is set up around a process before MLX and MPI start."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardmlx.common.environment import find_home


@pytest.mark.parametrize(("local_rank", "holds"), [(None, True), ("0", True), ("1", False)])
def test_one_process_a_host_keeps_a_mac_awake_but_not_its_displays(
    local_rank: str | None, holds: bool, tmp_path: Path
) -> None:
    """No Mac was at hand: a program called caffeinate writes what it was asked."""
    asked = tmp_path / "asked"
    caffeinate = tmp_path / "caffeinate"
    caffeinate.write_text(f'#!/bin/sh\necho "$@" > {asked}\n')
    caffeinate.chmod(0o755)
    program = (
        "import os; from shardmlx.common.environment import keep_awake; keep_awake(); "
        "print(os.getpid())"
    )
    rank = {} if local_rank is None else {"OMPI_COMM_WORLD_LOCAL_RANK": local_rank}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | rank,
        capture_output=True,
        text=True,
        check=True,
    )
    end = time.monotonic() + 30
    while holds and not (asked.exists() and asked.read_text()) and time.monotonic() < end:
        time.sleep(0.01)
    assert asked.exists() == holds
    if holds:
        assert asked.read_text() == f"-is -w {done.stdout}"


@pytest.mark.parametrize("given", [None, ""])
def test_a_process_without_home_has_that_of_its_user(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open MPI does not start without one: as under launchd, or in a container."""
    monkeypatch.delenv("HOME", raising=False)
    if given is not None:
        monkeypatch.setenv("HOME", given)
    find_home()
    assert os.environ["HOME"] == pwd.getpwuid(os.getuid()).pw_dir
    monkeypatch.setenv("HOME", "/else")
    find_home()
    assert os.environ["HOME"] == "/else"
