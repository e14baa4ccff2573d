"""Two hosts whose signals have other numbers, as Linux and macOS, and whose Pythons lie at other
paths: a kill, Ctrl-C and sleep leave what they leave on equal hosts. SIGTERM does as Ctrl-C does:
``tests/mpi/test_launch.py``."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.hosts import TMP, Lab, hosts
from testbed.jobs import Job, patience
from testbed.runs import events
from tests.helpers.lab import move_python, needs_own_python, start_pythons_with, write_hosts
from tests.helpers.mpirun import mpirun
from tests.helpers.sshd import logins, require

EVERY = 5

AS_ON_MACOS = """\
import enum, os, pathlib, signal

NUMBERS = {name: number for number, name in enumerate(
    "HUP INT QUIT ILL TRAP ABRT EMT FPE KILL BUS SEGV SYS PIPE ALRM TERM URG STOP TSTP CONT CHLD "
    "TTIN TTOU IO XCPU XFSZ VTALRM PROF WINCH INFO USR1 USR2".split(), 1
)}
# Numbers that end a process, pause it or let it go on are the kernel's, which is Linux.
NUMBERS |= {name: int(getattr(signal, f"SIG{name}")) for name in ("CHLD", "CONT", "STOP", "TSTP")}

if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
    assert (NUMBERS["USR1"], NUMBERS["BUS"]) == (30, 10)
    signal.Signals = enum.IntEnum("Signals", {f"SIG{name}": n for name, n in NUMBERS.items()})
    for each in signal.Signals:
        setattr(signal, each.name, each)
    (pathlib.Path.home() / "rank1").write_text(str(os.getpid()))
"""
"""The table of macOS in rank 1's Python. What launch sends as SIGUSR1, 10, is not a signal that it
handles: it would end that rank, as SIGBUS does on a Mac."""


class Runs:
    """Starts of one training on two hosts, each of which goes on from the one before."""

    def __init__(self, lab: Lab, python: Path) -> None:
        self.lab = lab
        self.python = python
        self.home = lab.home("mac1")

    def run(self, meanwhile: Callable[[int], None], restarts: int = 0, timeout: int = 60) -> Job:
        """Start launch, and call ``meanwhile`` with its process id. The job makes more steps than
        anybody waits for."""
        options = f"--mpirun-options={shlex.join(self.lab.mpirun_options)}"
        words = (
            *("-m", "shardmlx.launch", "--hostfile", "hosts", options),
            *("--max-restarts", str(restarts), "train"),
            *("--model", "model", "--data", "data", "--num-layers", "-1", "--batch-size", "4"),
            *("--val-batches", "0", "--steps-per-report", "1", "--iters", "100000"),
            *("--checkpoint-dir", "checkpoints", "--checkpoint-every", str(EVERY)),
            *("--metrics-file", "metrics", "--resume", "auto", "--timeout", str(timeout)),
        )
        command = self.lab.command("mac1", self.python, *words)
        return mpirun(2, command=command, meanwhile=meanwhile)

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint; 0 if there is none."""
        marks = self.home.glob("checkpoints/step-*/COMMITTED")
        return max((int(mark.parent.name.removeprefix("step-")) for mark in marks), default=0)

    @property
    def made(self) -> int:
        """The last step of which the run has told."""
        return max((event["step"] for event in events(self.home / "metrics", "train")), default=0)

    def saves_again(self) -> bool:
        """Wait for another checkpoint than there is; if none comes, the job tells why."""
        before = self.saved
        return came(lambda: self.saved > before)

    def kill_rank_1(self) -> None:
        """Kill it, and wait for the one of the next start."""
        killed = int(self._rank_1.read_text())
        os.kill(killed, signal.SIGKILL)
        came(lambda: self._rank_1.read_text() not in ("", str(killed)))

    @property
    def _rank_1(self) -> Path:
        return self.lab.home("mac2") / "rank1"


def came(event: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Wait for an event; tell whether it came."""
    end = time.monotonic() + patience(seconds)
    while not event():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.timeout(1000)  # three starts of a job
def test_kills_stops_and_sleep_between_numbers_of_two_systems(
    small: Path, pirate: Path, tmp_path: Path
) -> None:
    require()
    needs_own_python()
    with hosts(tmp_path, 2) as lab, logins(lab):
        runs = furnished(lab, small, pirate)

        def kill_and_stop(launch: int) -> None:
            if runs.saves_again():
                runs.kill_rank_1()
            if runs.saves_again():
                os.kill(launch, signal.SIGINT)

        job = runs.run(kill_and_stop, restarts=1)
        assert job.returncode == 130, job.output
        assert "rank 1 on mac2 died" in job.output
        starts = [line for line in job.stdout.splitlines() if line.startswith("$ ")]
        assert len(starts) == 2
        assert all(f"--prefix {TMP}/shardmlx-" in line for line in starts)
        (resumed,) = events(runs.home / "metrics", "resume")
        assert resumed["step"] >= EVERY
        assert "launch: asked all ranks to save and stop" in job.output
        assert "launch: run the same command to go on" in job.output
        assert runs.saved == runs.made
        (stopped,) = events(runs.home / "metrics", "stop")
        assert (stopped["step"], stopped["signal"]) == (runs.made, "SIGINT")

        def fall_asleep(launch: int) -> None:
            if runs.saves_again():
                lab.cut("mac2")

        job = runs.run(fall_asleep, timeout=max(20, math.ceil(patience(10))))
        line = job.failure(1)
        assert "rank 1 on mac2" in line
        # All steps since a checkpoint, if the link was cut while the next one was written.
        assert runs.made - runs.saved <= EVERY


def furnished(lab: Lab, model: Path, data: Path) -> Runs:
    """Give the hosts their Pythons, the second one its numbers, and the first one what to train."""
    pythons = {host: move_python(lab, host) for host in lab.hosts}
    start_pythons_with(lab, "mac2", AS_ON_MACOS)
    write_hosts(lab, pythons)
    shutil.copytree(model, lab.home("mac1") / "model")
    shutil.copytree(data, lab.home("mac1") / "data")
    return Runs(lab, pythons["mac1"])
