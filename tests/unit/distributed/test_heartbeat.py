"""Who is lost, who has died, and who was asked to stop: judged without messages and threads."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from shardmlx.distributed.heartbeat import (
    Beat,
    Fate,
    Judgement,
    Monitor,
    State,
    silence_limit,
)


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
) -> Judgement | None:
    """Look twice a second, as the thread does; the ranks in ``heard`` give signs of life."""
    for _ in range(round(seconds * 2)):
        clock.now += 0.5
        for peer in heard:
            monitor.heard(peer, Beat("step 3"))
        if (judgement := monitor.look()) is not None:
            return judgement
    return None


def test_a_rank_that_is_silent_for_the_limit_is_lost_and_its_last_activity_named(
    clock: Clock,
) -> None:
    monitor = rank_0(clock)
    monitor.heard(1, Beat("step 12, stage 1, 1F3"))
    assert pass_time(monitor, clock, 59.5, heard=(2,)) is None
    assert pass_time(monitor, clock, 0.5, heard=(2,)) == Judgement(
        Fate.LOST,
        "rank 1 on mac2 has given no sign of life for 60 s; it was last in step 12, stage 1, 1F3",
    )


def test_a_stopped_process_is_named_as_such(clock: Clock) -> None:
    monitor = rank_0(clock, lambda peer: "stopped" if peer == 1 else None)
    judgement = pass_time(monitor, clock, 60, heard=(2,))
    assert judgement is not None
    assert "for 60 s: its process is stopped; it was last in starting" in judgement.text


def test_a_rank_is_in_doubt_before_it_is_lost_and_no_more_when_it_is_heard(clock: Clock) -> None:
    monitor = rank_0(clock, lambda peer: "stopped" if peer == 1 else None)
    pass_time(monitor, clock, 4.5, heard=(2,))
    assert monitor.quiet is None
    pass_time(monitor, clock, 0.5, heard=(2,))
    assert monitor.quiet == (
        "rank 1 on mac2 has given no sign of life for 5 s: its process is stopped; it was last in "
        "starting"
    )
    pass_time(monitor, clock, 0.5, heard=(1, 2))
    assert monitor.quiet is None


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
    assert monitor.look() == Judgement(
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
    judgement = monitor.look()
    assert judgement is not None
    assert judgement.fate is Fate.DIED
    assert judgement.text.startswith("rank 1 on mac2 died")


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
    assert monitor.look() == Judgement(Fate.INTERRUPTED, "interrupted by SIGINT", signal.SIGINT)


def test_a_second_signal_ends_the_job_at_once(clock: Clock) -> None:
    monitor = rank_0(clock)
    monitor.expects_stop = True
    monitor.signalled(signal.SIGUSR1)
    assert monitor.look() is None
    monitor.signalled(signal.SIGUSR1)
    assert monitor.look() == Judgement(Fate.INTERRUPTED, "interrupted by SIGUSR1", signal.SIGUSR1)


def test_after_a_peer_has_spoken_nothing_is_said_and_the_process_ends_soon(clock: Clock) -> None:
    monitor = rank_0(clock, lambda peer: "gone")
    monitor.heard(1, Beat("step 3", state=State.SPOKEN))
    assert monitor.hushed
    assert pass_time(monitor, clock, 5) is None
    assert pass_time(monitor, clock, 0.5) == Judgement(Fate.ENDED, "")


def test_a_process_without_its_mpirun_ends(clock: Clock) -> None:
    monitor = Monitor(1, {0: "rank 0 on mac1"}, 60.0, launched=lambda: False, clock=clock)
    assert monitor.look() == Judgement(Fate.ENDED, "")


@pytest.mark.parametrize(("timeout", "limit"), [(0.4, 3.0), (20.0, 19.0), (600.0, 60.0)])
def test_how_long_a_rank_may_be_silent(timeout: float, limit: float) -> None:
    """Several signs of life, and no more than a minute."""
    assert silence_limit(timeout) == limit
