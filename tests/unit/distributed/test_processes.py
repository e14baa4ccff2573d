"""Which process is the mpirun of this job, and that no other one is ever taken for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from shardmlx.distributed import processes
from shardmlx.distributed.processes import Launcher, find_launcher, process_state


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.fixture
def mpirun(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """This process, which plays mpirun for its children."""
    process = processes._look(os.getpid())
    assert process is not None
    monkeypatch.setattr(processes, "_MPIRUN", (process.name,))
    monkeypatch.setenv("PMIX_NAMESPACE", f"prterun-mac-1-{os.getpid()}@1")
    return Launcher(os.getpid(), process.name, process.started, direct=True)


def be_child_of(pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: pid)


def test_the_state_of_a_process(child: subprocess.Popen[bytes]) -> None:
    assert process_state(os.getpid()) is None
    child.kill()
    child.wait()
    assert process_state(child.pid) == "gone"


def test_mpirun_is_the_parent(mpirun: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    be_child_of(mpirun.pid, monkeypatch)
    assert find_launcher() == mpirun
    assert mpirun.runs()
    assert mpirun.is_mpirun
    be_child_of(1, monkeypatch)
    assert not mpirun.runs()


def test_mpirun_is_found_through_a_script(
    mpirun: Launcher, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_child_of(child.pid, monkeypatch)
    found = find_launcher()
    assert found == replace(mpirun, direct=False)
    assert found.runs()


@pytest.mark.parametrize("namespace", ["", "prterun-mac-1-0@1", "prte-mac-1-{pid}@1", "slurm.7.0"])
def test_a_parent_that_is_not_the_mpirun_of_this_job_is_none(
    namespace: str, mpirun: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_child_of(mpirun.pid, monkeypatch)
    monkeypatch.setenv("PMIX_NAMESPACE", namespace.format(pid=mpirun.pid))
    assert find_launcher() is None


def test_whoever_adopts_a_rank_is_not_its_launcher(
    mpirun: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_child_of(mpirun.pid, monkeypatch)
    monkeypatch.setattr(processes, "_MPIRUN", ("prterun",))
    assert find_launcher() is None


def test_a_later_process_with_the_number_is_left_alone(
    mpirun: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("seen off"))
    replace(mpirun, started="at another time").see_off()
    replace(mpirun, name="another").see_off()


def see_off(pid: int, started: str) -> None:
    subprocess.run(["sh", "-c", processes._SEE_OFF, "sh", str(pid), started], timeout=30)


def test_what_is_left_behind_ends_mpirun_and_nothing_else(child: subprocess.Popen[bytes]) -> None:
    process = processes._look(child.pid)
    assert process is not None
    see_off(child.pid, "at another time")
    assert child.poll() is None
    see_off(child.pid, process.started)
    assert child.wait(10) == -signal.SIGTERM


def test_processes_are_seen_without_proc_too() -> None:
    process = processes._look_with_ps(os.getpid())
    assert process is not None
    assert process.parent == os.getppid()
    assert len(process.started.split()) == 5
    if sys.platform == "linux":
        in_proc = processes._look_in_proc(os.getpid())
        assert in_proc is not None
        assert (in_proc.parent, in_proc.name) == (process.parent, process.name)
