"""Who is lost, who has died, and who was asked to stop: judged without messages and threads."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from shardmlx.distributed.heartbeat import (
    Beat,
    Fate,
    Heartbeat,
    Monitor,
    State,
    Verdict,
    silence_limit,
)
from shardmlx.distributed.shutdown import JobShutdown
from shardmlx.distributed.signals import Signals


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def rank_0(clock: Clock, process: Callable[[int], str | None] = lambda peer: None) -> Monitor:
    return Monitor(0, {1: "rank 1 on mac2", 2: "rank 2 on mac3"}, 60.0, process, clock=clock)


def pass_time(
    monitor: Monitor, clock: Clock, seconds: float, heard: tuple[int, ...] = ()
) -> Verdict | None:
    """Look twice a second, as the thread does; the ranks in ``heard`` give signs of life."""
    for _ in range(round(seconds * 2)):
        clock.now += 0.5
        for peer in heard:
            monitor.heard(peer, Beat("step 3"))
        if (verdict := monitor.look()) is not None:
            return verdict
    return None


def test_a_rank_that_is_silent_for_the_limit_is_lost_and_its_last_activity_named(
    clock: Clock,
) -> None:
    monitor = rank_0(clock)
    monitor.heard(1, Beat("step 12, stage 1, 1F3"))
    assert pass_time(monitor, clock, 59.5, heard=(2,)) is None
    assert pass_time(monitor, clock, 0.5, heard=(2,)) == Verdict(
        Fate.LOST,
        "rank 1 on mac2 has given no sign of life for 60 s; it was last in step 12, stage 1, 1F3",
    )


def test_a_stopped_process_is_named_as_such(clock: Clock) -> None:
    monitor = rank_0(clock, lambda peer: "stopped" if peer == 1 else None)
    verdict = pass_time(monitor, clock, 60, heard=(2,))
    assert verdict is not None
    assert "for 60 s: its process is stopped; it was last in starting" in verdict.text


def test_ranks_that_give_signs_of_life_are_not_lost(clock: Clock) -> None:
    assert pass_time(rank_0(clock), clock, 600, heard=(1, 2)) is None


def test_silence_does_not_count_while_this_process_slept(clock: Clock) -> None:
    """A laptop that was closed, or a job that was stopped in the shell."""
    monitor = rank_0(clock)
    pass_time(monitor, clock, 30, heard=())
    clock.now += 3600
    assert monitor.look() is None
    assert pass_time(monitor, clock, 59.5) is None
    assert pass_time(monitor, clock, 0.5) is not None


def test_a_rank_that_has_left_is_not_missed(clock: Clock) -> None:
    monitor = rank_0(clock, lambda peer: "gone" if peer == 1 else None)
    monitor.heard(1, Beat("done", state=State.LEFT))
    assert pass_time(monitor, clock, 600, heard=(2,)) is None


def test_a_process_that_is_gone_has_died_once_its_last_message_would_have_come(
    clock: Clock,
) -> None:
    monitor = rank_0(clock, lambda peer: "gone" if peer == 2 else None)
    monitor.heard(2, Beat("step 3, stage 2, 2F0"))
    assert monitor.look() is None
    assert monitor.in_hurry
    clock.now += 0.11
    assert monitor.look() == Verdict(
        Fate.DIED,
        "rank 2 on mac3 died (was it killed, or out of memory?); it was last in "
        "step 3, stage 2, 2F0",
    )


def test_of_several_ranks_the_lower_judges_first(clock: Clock) -> None:
    monitors = [
        Monitor(rank, {0: "rank 0 on mac1"}, 60.0, lambda peer: "gone", clock=clock)
        for rank in (1, 2)
    ]
    assert [monitor.look() for monitor in monitors] == [None, None]
    clock.now += 0.11
    first, second = (monitor.look() for monitor in monitors)
    assert first is not None
    assert second is None


def test_who_does_not_answer_when_mpirun_ends_the_job_has_died(clock: Clock) -> None:
    """mpirun sends SIGCONT, SIGTERM and SIGKILL, a quarter of a second apart."""
    monitor = rank_0(clock)
    monitor.expects_stop = True
    pass_time(monitor, clock, 5, heard=(1, 2))
    clock.now += 0.2
    monitor.signalled(signal.SIGCONT)
    clock.now += 0.05
    monitor.heard(2, Beat("step 3"))
    clock.now += 0.2
    monitor.signalled(signal.SIGTERM)
    assert monitor.look() is None
    clock.now += 0.11
    verdict = monitor.look()
    assert verdict is not None
    assert verdict.fate is Fate.DIED
    assert verdict.text.startswith("rank 1 on mac2 died")


def test_where_all_answer_a_sigterm_asks_for_a_stop_in_order(clock: Clock) -> None:
    monitor = rank_0(clock)
    monitor.expects_stop = True
    monitor.signalled(signal.SIGCONT)
    clock.now += 0.25
    monitor.signalled(signal.SIGTERM)
    for peer in (1, 2):
        monitor.heard(peer, Beat("step 3", (signal.SIGTERM,)))
    assert pass_time(monitor, clock, 10, heard=(1, 2)) is None
    assert monitor.stop() == signal.SIGTERM


def test_a_signal_to_another_rank_asks_all_to_stop(clock: Clock) -> None:
    monitor = rank_0(clock)
    monitor.expects_stop = True
    assert monitor.stop() is None
    monitor.heard(2, Beat("step 3", (signal.SIGINT,)))
    assert monitor.look() is None
    assert monitor.stop() == signal.SIGINT


def test_a_signal_that_nobody_asks_for_ends_the_job_at_once(clock: Clock) -> None:
    monitor = rank_0(clock)
    monitor.heard(2, Beat("loading", (signal.SIGINT,)))
    assert monitor.look() == Verdict(Fate.INTERRUPTED, "interrupted by SIGINT", signal.SIGINT)


def test_a_second_signal_ends_the_job_at_once(clock: Clock) -> None:
    monitor = rank_0(clock)
    monitor.expects_stop = True
    monitor.signalled(signal.SIGUSR1)
    assert monitor.look() is None
    monitor.signalled(signal.SIGUSR1)
    assert monitor.look() == Verdict(Fate.INTERRUPTED, "interrupted by SIGUSR1", signal.SIGUSR1)


def test_after_a_peer_has_spoken_nothing_is_said_and_the_process_ends_soon(clock: Clock) -> None:
    monitor = rank_0(clock, lambda peer: "gone")
    monitor.heard(1, Beat("step 3", state=State.SPOKEN))
    assert monitor.hushed
    assert pass_time(monitor, clock, 5) is None
    assert pass_time(monitor, clock, 0.5) == Verdict(Fate.ENDED, "")


def test_a_process_without_its_mpirun_ends(clock: Clock) -> None:
    monitor = Monitor(1, {0: "rank 0 on mac1"}, 60.0, launched=lambda: False, clock=clock)
    assert monitor.look() == Verdict(Fate.ENDED, "")


@pytest.mark.parametrize(("timeout", "limit"), [(0.4, 3.0), (20.0, 19.0), (600.0, 60.0)])
def test_how_long_a_rank_may_be_silent(timeout: float, limit: float) -> None:
    """Several signs of life, and no more than a minute."""
    assert silence_limit(timeout) == limit


class Mail:
    """What was posted, and a message that has come."""

    def __init__(self) -> None:
        self.posted: list[tuple[int, Beat]] = []
        self.all_posted = threading.Event()

    def post(self, peer: int, data: bytes) -> None:
        self.posted.append((peer, pickle.loads(data)))
        if len(self.posted) == 2:
            self.all_posted.set()

    def fetch(self) -> Iterator[tuple[int, bytes]]:
        yield 2, pickle.dumps(Beat("step 3", (signal.SIGTERM,)))


def test_the_thread_sends_receives_and_acts(clock: Clock) -> None:
    mail, signals, verdicts = Mail(), Signals(), []
    errors: list[Exception] = []
    acted = threading.Event()

    def act(verdict: Verdict) -> None:
        verdicts.append(verdict)
        acted.set()

    heartbeat = Heartbeat(
        rank_0(clock), (1, 2), mail, signals, lambda: "loading", act, lambda: None, errors.append
    )
    assert mail.all_posted.wait(10)
    assert acted.wait(10)
    heartbeat.close()
    signals.close()
    assert mail.posted[:2] == [(1, Beat("loading")), (2, Beat("loading"))]
    assert mail.posted[-2:] == [
        (1, Beat("loading", (), State.LEFT)),
        (2, Beat("loading", (), State.LEFT)),
    ]
    assert verdicts[0].fate is Fate.INTERRUPTED
    assert errors == []


def test_an_error_on_the_thread_is_this_rank_s_failure(clock: Clock) -> None:
    """The others would find it silent."""
    signals, errors = Signals(), []
    failed = threading.Event()

    def activity() -> str:
        if not failed.is_set():
            raise KeyError("stage 1")
        return "leaving"

    def fail(error: Exception) -> None:
        errors.append(error)
        failed.set()

    heartbeat = Heartbeat(
        rank_0(clock), (1, 2), Mail(), signals, activity, lambda verdict: None, lambda: None, fail
    )
    assert failed.wait(10)
    heartbeat.close()
    signals.close()
    assert [repr(error) for error in errors] == ["KeyError('stage 1')"]


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


def test_a_job_s_end_is_explained_once(capsys: pytest.CaptureFixture[str]) -> None:
    ending = JobShutdown(1)
    told: list[str] = []
    ending.announce = lambda: told.append("peers")
    assert ending.report(RuntimeError(f"{ending.name}, stage 1, 1F3: no memory"))
    assert not ending.report(RuntimeError("and then this"))
    assert capsys.readouterr().err == f"shardmlx: failed: {ending.name}, stage 1, 1F3: no memory\n"
    assert told == ["peers"]


def test_who_echoes_a_failure_lets_lower_ranks_speak(capsys: pytest.CaptureFixture[str]) -> None:
    ending = JobShutdown(50)
    threading.Timer(0.05, ending.hush).start()
    assert not ending.report(RuntimeError("nothing came"))
    assert capsys.readouterr().err == ""


def ends_late(program: str) -> subprocess.CompletedProcess[str]:
    """Of a process whose MPI is given a tenth of a second."""
    setup = "import atexit, time; from shardmlx.distributed.shutdown import JobShutdown"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{setup}\n{program}"],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_rank_that_waits_for_the_others_too_long_ends_with_a_line() -> None:
    done = ends_late("with JobShutdown(0).bounded(0.1, 'starting MPI'): time.sleep(60)")
    assert done.returncode == 1
    assert done.stderr.endswith(": starting MPI: not all ranks came within 0.1 s (see --timeout)\n")


def test_a_rank_that_comes_late_but_before_its_turn_to_end_goes_on() -> None:
    done = ends_late(
        "ending = JobShutdown(8)\n"
        "with ending.bounded(0.1, 'starting MPI'): time.sleep(0.3)\n"
        "ending.hush(); time.sleep(0.5); print('goes on')"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")


def test_the_end_of_mpi_is_bounded_when_python_starts_no_more_threads() -> None:
    done = ends_late(
        "def finish(deadline):\n"
        "    with deadline: time.sleep(60)\n"
        "atexit.register(finish, JobShutdown(0).bounded(0.1, 'ending MPI'))"
    )
    assert done.returncode == 1
    assert "ending MPI: not all ranks came within 0.1 s" in done.stderr
