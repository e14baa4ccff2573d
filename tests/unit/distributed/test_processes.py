"""Which process is the mpirun of this job, and that no other one is ever taken for it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from shardmlx.distributed import processes
from shardmlx.distributed.processes import MpirunProcess, find_mpirun, open_file, process_state
from shardmlx.distributed.times import SECONDS_TO_FOLLOW


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.fixture
def mpirun(monkeypatch: pytest.MonkeyPatch) -> MpirunProcess:
    """This process, which plays mpirun for its children."""
    process = psutil.Process()
    monkeypatch.setattr(processes, "_MPIRUN", (process.name(),))
    monkeypatch.setenv("PMIX_NAMESPACE", f"prterun-mac-1-{os.getpid()}@1")
    return MpirunProcess(process, is_mpirun=True, direct=True)


def be_child_of(pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: pid)


def test_the_state_of_a_process(child: subprocess.Popen[bytes]) -> None:
    assert process_state(os.getpid()) is None
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert process_state(child.pid) == "stopped"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(child.pid) == "gone"  # though nobody has asked for its status yet
    child.wait()
    assert process_state(child.pid) == "gone"


def test_mpirun_is_the_parent(mpirun: MpirunProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    be_child_of(mpirun.process.pid, monkeypatch)
    assert find_mpirun() == mpirun
    assert mpirun.runs()
    assert mpirun.is_mpirun
    be_child_of(1, monkeypatch)
    assert not mpirun.runs()


def test_mpirun_is_found_through_a_script(
    mpirun: MpirunProcess, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_child_of(child.pid, monkeypatch)
    found = find_mpirun()
    assert found == replace(mpirun, direct=False)
    assert found.runs()


@pytest.mark.parametrize("namespace", ["", "prterun-mac-1-0@1", "prte-mac-1-{pid}@1", "slurm.7.0"])
def test_a_parent_that_is_not_the_mpirun_of_this_job_is_none(
    namespace: str, mpirun: MpirunProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_child_of(mpirun.process.pid, monkeypatch)
    monkeypatch.setenv("PMIX_NAMESPACE", namespace.format(pid=mpirun.process.pid))
    assert find_mpirun() is None


def test_whoever_adopts_a_rank_is_not_its_launcher(
    mpirun: MpirunProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_child_of(mpirun.process.pid, monkeypatch)
    monkeypatch.setattr(processes, "_MPIRUN", ("prterun",))
    assert find_mpirun() is None


def test_a_later_process_with_the_number_is_left_alone(
    mpirun: MpirunProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("seen off"))
    monkeypatch.setattr(psutil.Process, "is_running", lambda process: False)
    mpirun.ensure_end(SECONDS_TO_FOLLOW)


def test_what_is_left_behind_ends_mpirun_and_nothing_else(child: subprocess.Popen[bytes]) -> None:
    started = psutil.Process(child.pid).create_time()

    def ensure_end(started: float) -> None:
        program = [sys.executable, "-P", processes.__file__]
        subprocess.run([*program, str(child.pid), str(started), "0.1"], timeout=60, check=True)

    ensure_end(started - 2)
    assert child.poll() is None
    ensure_end(started)
    assert child.wait(10) == -signal.SIGTERM


def test_what_ends_by_itself_is_sent_no_signal() -> None:
    with subprocess.Popen(["sleep", "0.1"]) as child:
        processes.end_process(child.pid, psutil.Process(child.pid).create_time(), 30.0)
        assert child.wait(30) == 0


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_what_a_process_has_open(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS has no /proc, but lsof."""
    if system == "darwin" and shutil.which("lsof") is None:
        pytest.skip("needs lsof: apt-get install lsof")
    monkeypatch.setattr(sys, "platform", system)
    path = tmp_path / "typed"
    with path.open("w") as file:
        assert open_file(os.getpid(), file.fileno()) == str(path)
        read, write = os.pipe()
        found = open_file(os.getpid(), read)
        assert found is not None
        assert "pipe" in found
        os.close(read)
        os.close(write)
    assert open_file(os.getpid(), 999) is None
