"""A job that cannot go on ends with one line, and every wait for all ranks ends in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from shardmlx.distributed import shutdown
from shardmlx.distributed.shutdown import JobShutdown, absent_before_start
from shardmlx.distributed.signals import Signals
from shardmlx.errors import UserError


def test_a_signal_ends_the_wait_of_a_thread_and_the_old_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    signals = Signals()
    heard: list[int] = []
    thread = threading.Thread(target=lambda: heard.extend(signals.wait(60.0)))
    thread.start()
    os.kill(os.getpid(), signal.SIGUSR1)
    thread.join(10)
    signals.close()
    assert heard == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) == before


def test_who_echoes_a_failure_lets_lower_ranks_speak(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "turn", lambda rank: rank * 1.0)
    ending = JobShutdown(50)
    threading.Timer(0.05, ending.reported.set).start()
    assert not ending.report(RuntimeError("nothing came"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "means", "remedy"),
    [
        (  # github.com/ml-explore/mlx/issues/3267
            "[METAL] Command buffer execution failed: Impacting Interactivity "
            "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)",
            "watchdog",
            "pmset displaysleepnow",
        ),
        (  # github.com/ml-explore/mlx/pull/479
            "[METAL] Command buffer execution failed: Insufficient Memory "
            "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
            "no memory left",
            "--micro-batch-size",
        ),
        (  # github.com/ml-explore/mlx/issues/4464
            "[metal::malloc] Resource limit (499000) exceeded",
            "limit of buffers",
            "--max-seq-length",
        ),
        (  # of errno 65 in macOS, in programs that tmux or launchd started
            "[Errno 65] No route to host",
            "cannot be reached",
            "Local Network",
        ),
    ],
    ids=["watchdog", "memory", "buffers", "local network"],
)
def test_what_macs_say_is_explained_in_the_last_line_of_a_job(
    text: str, means: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As others recorded it: no Mac was at hand."""
    assert JobShutdown(0).report(RuntimeError(text))
    (line,) = capsys.readouterr().err.splitlines()
    said, _, meaning = line.partition(f"RuntimeError: {text} ")
    assert said.startswith("shardmlx: failed: rank 0 on ")
    assert means in meaning
    assert remedy in meaning
    assert JobShutdown(0).report(RuntimeError("anything else"))
    assert capsys.readouterr().err.endswith("RuntimeError: anything else\n")


def test_what_one_rank_alone_meets_is_said_without_a_type(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ending = JobShutdown(0)
    assert ending.report(UserError("cannot write metrics: no space"))
    said = f"shardmlx: failed: {ending.name}: cannot write metrics: no space\n"
    assert capsys.readouterr().err == said


def test_rank_0_leaves_when_the_others_of_its_host_are_gone() -> None:
    ending = JobShutdown(0)
    with subprocess.Popen(["sleep", "0.2"]) as child:
        mpirun = threading.Thread(target=child.wait)
        mpirun.start()
        ending.ranks_to_outlive = (child.pid,)
        ending.leave_last()
        assert not psutil.pid_exists(child.pid)
        mpirun.join()


def ends_late(program: str) -> subprocess.CompletedProcess[str]:
    """Of a process whose MPI is given a tenth of a second."""
    setup = "import atexit, time; from shardmlx.distributed.shutdown import Deadline, JobShutdown"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{setup}\n{program}"],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_rank_that_waits_for_the_others_too_long_ends_with_a_line() -> None:
    done = ends_late("with Deadline(JobShutdown(0), 0.1, 'starting MPI'): time.sleep(60)")
    assert done.returncode == 1
    assert done.stderr.endswith(": starting MPI: not all ranks came within 0.1 s (see --timeout)\n")


def test_who_has_not_called_mpi_is_named_and_if_all_have_it_is_open_mpi_that_keeps_them() -> None:
    late = absent_before_start(["rank 1 on box", "rank 3 on mac2"])
    assert late.who == "rank 1 on box and rank 3 on mac2 did not come"
    assert absent_before_start([]).who.startswith("all ranks came")
    assert "firewalls" in late.why
    assert "firewalls" in absent_before_start([]).why


def test_a_rank_that_comes_late_but_before_its_turn_to_end_goes_on() -> None:
    done = ends_late(
        "ending = JobShutdown(8)\n"
        "with Deadline(ending, 0.1, 'starting MPI'): time.sleep(0.3)\n"
        "ending.reported.set(); time.sleep(0.5); print('goes on')"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")


def test_rank_0_has_time_to_say_who_has_not_come_though_it_began_to_wait_later() -> None:
    ending = "ending = JobShutdown(1)\n"
    done = ends_late(f"{ending}with Deadline(ending, 0.1, 'starting MPI'): time.sleep(2)")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_end_of_mpi_is_bounded_when_python_starts_no_more_threads() -> None:
    done = ends_late(
        "def finish(deadline):\n"
        "    with deadline: time.sleep(60)\n"
        "atexit.register(finish, Deadline(JobShutdown(0), 0.1, 'ending MPI'))"
    )
    assert done.returncode == 1
    assert "ending MPI: not all ranks came within 0.1 s" in done.stderr
