"""Daemons that an mpirun has left behind are ended, here and where a login leads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardmlx.hosts.leftovers import end_here, end_there, name_of
from shardmlx.hosts.remote_login import RemoteLogin


def daemon(name: str, traps: str = "") -> subprocess.Popen[str]:
    """A process like prted, which has its mpirun's name in its command line, and is up."""
    script = f"{traps} echo up; while :; do sleep 0.1; done"
    process = subprocess.Popen(["sh", "-c", script, name], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def end_by_login(name: str) -> None:
    mpirun = Path(sys.executable).with_name("mpirun")
    end_there(name, RemoteLogin.of(None, sys.executable, mpirun).command(None))


@pytest.mark.parametrize("end", [end_here, end_by_login])
def test_daemons_of_one_mpirun_are_ended_even_if_they_are_deaf(
    end: Callable[[str], object],
) -> None:
    name = name_of(47110815, "mac1.local")
    deaf = daemon("prterun-mac1-47110815@0", "trap '' TERM;")
    other = daemon("prterun-mac1-4711081@0")
    try:
        end(name)
        assert deaf.wait(10) == -9
        assert other.poll() is None
    finally:
        for process in (deaf, other):
            process.kill()
            process.communicate()
