"""What becomes of a job: traces of events with their times, and what follows from them when."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from shardmlx.distributed.fate import (
    Action,
    Beat,
    Do,
    End,
    Fail,
    JobFate,
    Look,
    Send,
    State,
    silence_limit,
)

NAMES = ("rank 0 on mac1", "rank 1 on mac2", "rank 2 on mac3")
Event = Callable[[JobFate, float], list[Action]]
DIED = "{} died (was it killed, or out of memory?); it was last in {}"
Trace = list[tuple[float, Event]]


def looked(*seen: Any, **state: Any) -> Event:
    return lambda fate, now: fate.looked(Look(*seen, **state), now)


def heard(peer: int, beat: Beat) -> Event:
    return lambda fate, now: fate.heard(peer, beat, now)


def signalled(*numbers: int) -> Event:
    return lambda fate, now: fate.signalled(numbers, now)


LOOK = looked("loading")


def fate_of(rank: int = 0) -> JobFate:
    return JobFate(rank, NAMES, 60.0, 0.0)


def played(fate: JobFate, *traces: Iterable[tuple[float, Event]]) -> list[tuple[float, Action]]:
    """Return what follows from events, but for signs of life, and when."""
    return [
        (time, action)
        for trace in traces
        for time, event in trace
        for action in event(fate, time)
        if not isinstance(action, Send)
    ]


def looks(
    start: float, stop: float, alive: tuple[int, ...] = (), states: Mapping[int, str] | None = None
) -> Trace:
    """Looks twice a second, from ``start`` to ``stop``; the ranks in ``alive`` are heard."""
    events: Trace = []
    for half in range(int(start * 2), int(stop * 2) + 1):
        events += [(half / 2, heard(peer, Beat("step 3"))) for peer in alive]
        events.append((half / 2, looked("loading", states or {})))
    return events


def test_rank_0_gives_all_signs_of_life_and_the_others_rank_0() -> None:
    for rank, first, later in ((0, (1, 2), (1, 2)), (2, (0, 1), (0,))):
        fate = fate_of(rank)
        beat = Beat("loading")
        assert LOOK(fate, 0.0) == [Send(first, beat)]  # while there is time to connect
        assert LOOK(fate, 0.2) == []
        assert LOOK(fate, 0.25) == [Send(later, beat)]
        numbers = (signal.SIGCONT, signal.SIGTERM)
        answer = Beat("loading", (signal.SIGTERM,))
        assert fate.signalled(numbers, 0.3) == [Send(later, answer)]


def test_a_rank_that_is_silent_for_the_limit_is_lost_and_its_last_activity_named() -> None:
    """Its failure is raised by the main thread, or else reported four seconds later."""
    fate = fate_of()
    text = "rank 1 on mac2 has given no sign of life for 60 s; it was last in step 12, stage 1, 1F3"
    said = [(0.0, heard(1, Beat("step 12, stage 1, 1F3")))]
    assert played(fate, said, looks(0.5, 60, alive=(2,))) == [(60.0, Fail(text))]
    failed = [(60 + second / 2, looked("loading", failed=True)) for second in range(1, 20)]
    assert played(fate, failed) == [(64.5, Do.GIVE_UP)]


def test_a_rank_is_in_doubt_before_it_is_lost_and_no_more_when_it_is_heard() -> None:
    fate = fate_of()
    stopped = {1: "stopped"}
    assert played(fate, looks(0, 4.5, alive=(2,), states=stopped)) == []
    assert fate.quiet is None
    assert played(fate, looks(5, 5, alive=(2,), states=stopped)) == []
    assert fate.quiet == (
        "rank 1 on mac2 has given no sign of life for 5 s: its process is stopped; it was last in "
        "starting"
    )
    assert played(fate, looks(5.5, 600, alive=(1, 2), states=stopped)) == []
    assert fate.quiet is None


def test_silence_does_not_count_while_this_process_slept() -> None:
    """A laptop that was closed, or a job that was stopped in the shell."""
    woken = 3630.0
    trace = [*looks(0, 30), *looks(woken, woken + 90)]
    (lost,) = [time for time, action in played(fate_of(), trace) if isinstance(action, Fail)][:1]
    assert lost == woken + 60


def test_a_rank_that_has_left_is_not_missed() -> None:
    left = [(0.0, heard(1, Beat("done", state=State.LEFT)))]
    assert played(fate_of(), left, looks(0.5, 600, alive=(2,), states={1: "gone"})) == []


@pytest.mark.parametrize(("rank", "turn"), [(0, 0.1), (1, 0.1), (2, 0.13)])
def test_a_process_that_is_gone_has_died_once_its_last_message_would_have_come(
    rank: int, turn: float
) -> None:
    """Of several ranks the lower judges first."""
    fate, peer = fate_of(rank), 0 if rank else 2
    gone = looked("loading", {peer: "gone"})
    said: Trace = [(1.0, heard(peer, Beat("step 3, stage 2, 2F0"))), (1.0, gone)]
    assert played(fate, said, [(1.0 + turn - 0.01, gone)]) == []
    assert fate.pause < 0.1
    end = End(1, DIED.format(NAMES[peer], "step 3, stage 2, 2F0"), died=True)
    assert played(fate, [(1.0 + turn + 0.01, gone)]) == [(1.0 + turn + 0.01, end)]
    assert played(fate, looks(2, 99)) == []  # it is said once


def mpirun_ends(*answers: int) -> Trace:
    """mpirun sends SIGCONT, SIGTERM and SIGKILL, a quarter of a second apart."""
    return [
        *looks(0, 5, alive=(1, 2)),
        (5.2, signalled(signal.SIGCONT)),
        *((5.25, heard(peer, Beat("step 4"))) for peer in answers),
        (5.45, signalled(signal.SIGTERM)),
        (5.45, LOOK),
    ]


def test_who_does_not_answer_when_mpirun_ends_the_job_has_died() -> None:
    fate = fate_of()
    fate.stop_requested()
    assert played(fate, mpirun_ends(2)) == []
    end = End(1, DIED.format(NAMES[1], "step 3"), died=True)
    assert played(fate, [(5.56, LOOK)]) == [(5.56, end)]


def test_where_all_answer_a_sigterm_asks_for_a_stop_in_order() -> None:
    fate = fate_of()
    fate.stop_requested()
    assert played(fate, mpirun_ends(1, 2), looks(6, 16, alive=(1, 2))) == []
    assert fate.stop_requested() == signal.SIGTERM


def test_a_signal_to_another_rank_asks_all_to_stop() -> None:
    fate = fate_of()
    fate.stop_requested()
    assert fate.stop_requested() is None
    assert played(fate, [(0.1, heard(2, Beat("step 3", (signal.SIGINT,)))), (0.1, LOOK)]) == []
    assert fate.stop_requested() == signal.SIGINT


@pytest.mark.parametrize("expected", [0, 1])
def test_a_signal_that_nobody_asks_for_and_a_second_one_end_the_job_at_once(expected: int) -> None:
    fate = fate_of()
    if expected:
        fate.stop_requested()
    trace: Trace = []
    for number in range(expected + 1):
        trace += [(0.1 + number, signalled(signal.SIGUSR1)), (0.1 + number, LOOK)]
    end = End(128 + signal.SIGUSR1, "interrupted by SIGUSR1")
    assert played(fate, trace) == [(0.1 + expected, end)]
    assert played(fate_of(1), trace) == []  # rank 0 hears of it, and ends the job


def test_after_a_peer_has_spoken_nothing_is_said_and_the_process_ends_soon() -> None:
    spoken = [(0.0, heard(1, Beat("step 3", state=State.REPORTED)))] * 2
    after = looks(0, 9, states={2: "gone"})
    assert played(fate_of(), spoken, after) == [(0.0, Do.STAY_SILENT), (5.5, Do.EXIT)]


def test_a_process_without_its_mpirun_ends() -> None:
    assert played(fate_of(1), [(0.1, looked("", launched=False))]) == [(0.1, Do.EXIT)]


@pytest.mark.parametrize(("timeout", "limit"), [(0.4, 3.0), (20.0, 19.0), (600.0, 60.0)])
def test_how_long_a_rank_may_be_silent(timeout: float, limit: float) -> None:
    """Several signs of life, and no more than a minute."""
    assert silence_limit(timeout) == limit
