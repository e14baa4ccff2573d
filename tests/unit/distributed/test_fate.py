"""What becomes of a job: traces of events with their times, and what follows from them when."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from shardmlx.distributed.alarm import Alarm
from shardmlx.distributed.fate import JobFate
from shardmlx.distributed.fate_events import Action, Beat, Do, End, Fail, Look, Send, State
from shardmlx.distributed.times import HURRY, PERIOD, SECONDS_TO_BE_ENDED

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


def test_when_mpirun_ends_the_job_each_rank_tells_all_that_it_lives_and_who_else_does() -> None:
    """A late sign of life is not an answer, and an answer asks for none."""
    fate = fate_of(2)
    LOOK(fate, 0.0)
    called = Beat("loading", asks=True, living=(2,))
    assert fate.signalled([signal.SIGCONT], 0.3) == [Send((0, 1), called)]
    assert fate.heard(0, Beat("step 3"), 0.31) == []
    assert fate.heard(1, Beat("step 3", asks=True, living=(1,)), 0.31) == []
    assert LOOK(fate, 0.39) == []
    assert fate.pause == HURRY
    assert LOOK(fate, 0.4) == [Send((0, 1), Beat("loading", asks=True, living=(1, 2)))]
    both = Beat("loading", ("SIGTERM",), asks=True, living=(1, 2))
    assert fate.signalled([signal.SIGTERM], 0.5) == [Send((0, 1), both)]
    assert LOOK(fate, 1.4) == [Send((0,), Beat("loading", ("SIGTERM",)))]  # it is over

    asked = fate_of(2)
    LOOK(asked, 0.0)
    answer = Beat("loading", living=(1, 2))
    assert asked.heard(1, Beat("step 3", asks=True, living=(1,)), 0.3) == [Send((0, 1), answer)]
    assert asked.heard(0, Beat("step 3", asks=True, living=(0,)), 0.3) == []


def test_an_alarm_lasts_a_second_and_the_next_one_knows_nothing_of_it() -> None:
    alarm = Alarm(1)
    alarm.terminated(0.5)  # before it, and so not mpirun's
    alarm.sound(5.0)
    assert (alarm.living(5.5), alarm.killed(5.5)) == ((1,), None)
    alarm.answered([2])
    alarm.terminated(5.5)
    assert alarm.is_on(5.96875)
    assert alarm.asks(5.96875)
    assert (alarm.living(5.96875), alarm.killed(5.96875)) == ((1, 2), 5.5)
    assert not alarm.is_on(6.0)
    assert not alarm.asks(6.0)
    assert (alarm.living(6.0), alarm.killed(6.0)) == ((), None)
    alarm.sound(6.0)
    assert (alarm.living(6.5), alarm.killed(6.5)) == ((1,), None)


@pytest.mark.parametrize(
    ("beat", "is_repeated"),
    [
        (Beat("step 3", ("SIGTERM",), asks=True), True),
        (Beat("step 3", fails=True), False),
        (Beat("step 3", state=State.LEFT), False),
        (Beat("step 3", state=State.REPORTED), False),
    ],
)
def test_the_next_sign_of_life_tells_all_but_an_end_and_a_failure(
    beat: Beat, is_repeated: bool
) -> None:
    assert beat.is_repeated is is_repeated


def test_a_rank_that_is_silent_for_the_limit_is_lost_and_its_last_activity_named() -> None:
    """Its failure is raised by the main thread, or else reported four seconds later."""
    fate = fate_of()
    text = "rank 1 on mac2 has given no sign of life for 60 s; it was last in step 12, stage 1, 1F3"
    said = [(0.0, heard(1, Beat("step 12, stage 1, 1F3")))]
    assert played(fate, said, looks(0.5, 60, alive=(2,))) == [(60.0, Fail(text))]
    failed = [(60 + second / 2, looked("loading", failed=True)) for second in range(1, 20)]
    assert played(fate, failed) == [(63.5, Do.GIVE_UP)]


def test_a_rank_looks_often_in_the_last_period_of_a_silence() -> None:
    """A wait of its main thread may end a second after the limit, and name another rank."""
    fate = fate_of()
    played(fate, looks(0, 60 - 2 * PERIOD, alive=(2,)))
    assert fate.pause == PERIOD
    played(fate, looks(60 - PERIOD, 60 - PERIOD, alive=(2,)))
    assert fate.pause == HURRY
    played(fate, [(59.6, heard(1, Beat("step 3")))], [(59.6, LOOK)])
    assert fate.pause == PERIOD


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
    every_two = [(2.0 * count, LOOK) for count in range(31)]
    assert [time for time, _ in played(fate_of(), every_two)] == [60.0]


def test_a_rank_that_has_left_is_not_missed() -> None:
    left = [(0.0, heard(1, Beat("done", state=State.LEFT)))]
    assert played(fate_of(), left, looks(0.5, 600, alive=(2,), states={1: "gone"})) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_gone_has_died_once_its_last_message_would_have_come(rank: int) -> None:
    fate, peer = fate_of(rank), 0 if rank else 2
    gone = looked("loading", {peer: "gone"})
    said: Trace = [(1.0, heard(peer, Beat("step 3, stage 2, 2F0"))), (1.0, gone)]
    assert played(fate, said, [(1.09, gone)]) == []
    assert fate.pause < 0.1
    end = End(1, DIED.format(NAMES[peer], "step 3, stage 2, 2F0"), died=True)
    assert played(fate, [(1.11, gone)]) == [(1.11, end)]
    assert played(fate, looks(2, 99)) == []  # it is said once


def test_who_sees_a_process_gone_tells_lower_ranks_and_reports_it_if_they_do_not() -> None:
    fate = fate_of(2)
    LOOK(fate, 0.0)
    gone = looked("loading", {0: "gone"})
    (sent,) = gone(fate, 1.0)
    assert sent == Send((0, 1), Beat("loading", asks=True, living=(2,), gone=(0,)))
    assert played(fate, [(2.49, gone)]) == []
    end = End(1, DIED.format(NAMES[0], "starting"), died=True)
    assert played(fate, [(2.51, gone)]) == [(2.51, end)]

    told = fate_of(1)
    assert isinstance(sent, Send)
    again = heard(2, sent.beat)
    assert played(told, [(1.2, again), (1.28, again), (1.29, LOOK)]) == []
    assert played(told, [(1.31, LOOK)]) == [(1.31, end)]


def test_lower_ranks_have_their_turns_from_when_the_last_of_them_has_learned_of_a_death() -> None:
    """Their host may have slept meanwhile. What higher ranks say, or lower ones say again, does not
    count."""
    fate = JobFate(2, [f"rank {rank}" for rank in range(5)], 60.0, 0.0)
    knows = Beat("step 3", gone=(4,))
    trace: Trace = [
        (0.75, LOOK),
        (1.0, looked("loading", {4: "gone"})),
        (1.5, heard(1, knows)),
        (2.0, heard(0, knows)),
        (2.5, heard(0, knows)),
        (2.75, heard(3, knows)),
        (2.75, LOOK),
        (3.69, LOOK),
    ]
    assert played(fate, trace) == []
    ((_, end),) = played(fate, [(3.71, LOOK)])
    assert isinstance(end, End)


def test_a_lower_rank_that_is_heard_for_the_first_time_since_a_death_has_its_turn_then() -> None:
    """Its host was cut off, and it learns of the death next."""
    fate = fate_of(1)
    sign = heard(0, Beat("step 3"))
    trace: Trace = [(0.5, LOOK), (1.0, looked("loading", {2: "gone"})), (2.4, sign), (2.5, LOOK)]
    assert played(fate, trace, [(2.8, sign), (3.89, LOOK)]) == []
    assert len(played(fate, [(3.91, LOOK)])) == 1


def test_with_one_lower_rank_its_turn_is_a_second_and_a_half() -> None:
    fate = fate_of(1)
    trace: Trace = [
        (0.5, LOOK),
        (1.0, looked("loading", {2: "gone"})),
        (2.0, heard(0, Beat("step 3", gone=(2,)))),
        (2.0, LOOK),
        (3.25, LOOK),
    ]
    assert played(fate, trace) == []
    ((_, end),) = played(fate, [(3.5, LOOK)])
    assert isinstance(end, End)


def test_a_lower_rank_that_was_about_to_report_and_is_gone_does_so_no_more() -> None:
    fate = fate_of(2)
    trace: Trace = [
        (0.9, LOOK),
        (1.0, heard(0, Beat("step 3", fails=True))),
        (1.1, looked("loading", {0: "gone"})),
    ]
    assert played(fate, trace) == []
    assert fate.leaves_report(1.15)  # its report may be on its way
    assert not fate.leaves_report(1.25)


@pytest.mark.parametrize(("rank", "seconds"), [(0, 3.0), (1, 3.2), (2, 3.4)])
def test_the_main_thread_has_three_seconds_and_lower_ranks_their_turns_to_report_a_failure(
    rank: int, seconds: float
) -> None:
    fate, failed = fate_of(rank), looked("loading", failed=True)
    assert played(fate, [(1.0, failed), (1.0 + seconds - 0.01, failed)]) == []
    assert played(fate, [(1.01 + seconds, failed)]) == [(1.01 + seconds, Do.GIVE_UP)]


def answer(rank: int, *signals: int) -> Event:
    """The answer of a rank to mpirun's signals."""
    names = tuple(signal.Signals(number).name for number in signals)
    return heard(rank, Beat("step 4", names, asks=True, living=(rank,)))


def mpirun_ends(*answers: int) -> Trace:
    """mpirun sends SIGCONT, SIGTERM and SIGKILL, a quarter of a second apart."""
    return [
        *looks(0, 5, alive=(1, 2)),
        (5.2, signalled(signal.SIGCONT)),
        *((5.25, answer(peer)) for peer in answers),
        (5.45, signalled(signal.SIGTERM)),
        (5.45, LOOK),
    ]


def died(rank: int, last: str = "step 3") -> End:
    return End(1, DIED.format(NAMES[rank], last), died=True)


@pytest.mark.parametrize("expects_stop", [False, True])
def test_who_does_not_answer_when_mpirun_ends_the_job_has_died(expects_stop: bool) -> None:
    fate = fate_of()
    if expects_stop:
        fate.stop_requested()
    assert played(fate, mpirun_ends(2)) == []
    assert played(fate, [(5.54, LOOK), (5.56, LOOK)]) == [(5.56, died(1))]


@pytest.mark.parametrize(
    ("heard_at", "text"),
    [
        (0.5, "died (was it killed, or out of memory?)"),
        (0.25, "died, or sleeps: it has given no sign of life for 5 s"),
    ],
)
def test_who_was_silent_for_more_than_five_seconds_died_or_sleeps(
    heard_at: float, text: str
) -> None:
    trace: Trace = [
        (0.0, heard(2, Beat("step 3"))),
        (heard_at, heard(1, Beat("step 3"))),
        *((half / 2, LOOK) for half in range(1, 10)),
        (5.0, signalled(signal.SIGCONT)),
        (5.0, answer(2)),
        (5.25, signalled(signal.SIGTERM)),
    ]
    end = End(1, f"{NAMES[1]} {text}; it was last in step 3", died=True)
    assert played(fate_of(), trace, [(5.5, LOOK)]) == [(5.5, end)]


def test_who_was_silent_for_two_seconds_before_mpirun_ends_the_job_did_not_just_die() -> None:
    trace = [*looks(0, 3, alive=(1, 2)), *looks(3.5, 4.5, alive=(2,))]
    ends: Trace = [(5.0, signalled(signal.SIGCONT)), (5.25, signalled(signal.SIGTERM))]
    assert played(fate_of(), trace, ends, [(5.36, LOOK)]) == [(5.36, died(2))]


@pytest.mark.parametrize(("seen", "ranks"), [(5.0, (2,)), (5.3, (0, 2))])
def test_when_mpirun_ends_the_job_a_process_that_was_gone_before_is_who_died(
    seen: float, ranks: tuple[int, ...]
) -> None:
    """One that is gone only now may have left in order: its last message is still to come."""
    trace: Trace = [
        *looks(0, 4.5, alive=(0,)),
        (5.0, signalled(signal.SIGCONT)),
        (5.25, signalled(signal.SIGTERM)),
        (seen, looked("loading", {2: "gone"})),
    ]
    ((_, end),) = played(fate_of(1), sorted(trace, key=lambda each: each[0]), [(5.36, LOOK)])
    assert isinstance(end, End)
    assert [name in end.reason for name in NAMES] == [rank in ranks for rank in range(3)]


@pytest.mark.parametrize(
    ("rank", "seconds"), [(0, 0.1), (1, 0.1), (2, 0.13), (3, 0.16), (4, 0.19), (5, 0.19)]
)
def test_who_is_missing_is_concluded_after_a_tenth_of_a_second_and_short_turns(
    rank: int, seconds: float
) -> None:
    """mpirun kills this process a quarter of a second after SIGTERM."""
    fate = JobFate(rank, [f"rank {each}" for each in range(6)], 60.0, 0.0)
    trace: Trace = [
        (4.9, LOOK),
        (5.0, signalled(signal.SIGCONT)),
        (5.0, signalled(signal.SIGTERM)),
    ]
    assert played(fate, trace, [(5.0 + seconds - 0.01, LOOK)]) == []
    assert len(played(fate, [(5.0 + seconds, LOOK)])) == 1


def test_where_two_may_have_died_both_are_named() -> None:
    text = (
        "rank 1 on mac2 (it was last in step 3) or rank 2 on mac3 (it was last in step 3) died "
        "(was it killed, or out of memory?)"
    )
    both = End(1, text, died=True)
    assert played(fate_of(), mpirun_ends(), [(5.56, LOOK)]) == [(5.56, both)]


def test_of_several_ranks_that_miss_one_the_lowest_that_answers_reports_it() -> None:
    ends: Trace = [
        *looks(0, 5, alive=(0,)),
        (5.2, signalled(signal.SIGCONT)),
        (5.45, signalled(signal.SIGTERM)),
        (5.45, LOOK),
    ]
    for rank, other in ((1, 2), (2, 1)):
        answers: Trace = [(5.3, answer(other))]
        said = played(fate_of(rank), ends[:-2], answers, ends[-2:], [(5.59, LOOK)])
        assert said == ([(5.59, died(0))] if rank == 1 else [])
    ((_, end),) = played(fate_of(2), ends, [(5.59, LOOK)])
    text = "rank 0 on mac1 (it was last in step 3) or rank 1 on mac2 died"
    assert end == End(1, f"{text} (was it killed, or out of memory?)", died=True)
    # The answer may come by way of a third rank.
    fate = JobFate(3, (*NAMES, "rank 3 on mac4"), 60.0, 0.0)
    passed_on: Trace = [(5.3, heard(2, Beat("step 4", asks=True, living=(1, 2))))]
    assert played(fate, ends[:-2], passed_on, ends[-2:], [(5.65, LOOK)]) == []


def test_a_lower_rank_that_answered_and_then_no_more_has_died_too_and_reports_nothing() -> None:
    """In an alarm a rank gives ten signs of life a second. mpirun is about to kill this one."""
    trace: Trace = [
        *looks(0, 5, alive=(0,)),
        (5.1, heard(1, Beat("step 3", asks=True, living=(1,), gone=(0,)))),
        (5.15, signalled(signal.SIGCONT)),
        (5.4, signalled(signal.SIGTERM)),
    ]
    for again, said in ((5.28, [(5.59, died(0))]), (5.3, [])):
        answers: Trace = [(again, heard(1, Beat("step 3", living=(1, 2), gone=(0,))))]
        assert played(fate_of(2), trace[:-1], answers, trace[-1:], [(5.59, LOOK)]) == said


def test_of_several_ranks_that_miss_rank_0_one_reports_its_silence() -> None:
    first = played(fate_of(1), looks(0, 5, alive=(0,)), looks(5.5, 66))[0]
    assert (first[0], isinstance(first[1], Fail)) == (65.0, True)
    late = played(fate_of(2), looks(0, 5, alive=(0,)), looks(5.5, 67))[0]
    assert (late[0], isinstance(late[1], Fail)) == (66.5, True)
    answers: Trace = [(65.0 + half / 2, answer(1)) for half in range(1, 16)]
    silent = sorted([*looks(5.5, 72), *answers], key=lambda each: each[0])
    left = played(fate_of(2), looks(0, 5, alive=(0,)), silent)[0]
    assert (left[0], isinstance(left[1], Fail)) == (70.0, True)


def test_a_rank_that_is_heard_again_is_no_longer_missed_and_who_blames_one_gives_up_sooner() -> (
    None
):
    """Lower ranks have had their turns before."""
    fate = fate_of(2)
    trace = [*looks(0, 60), *looks(60.5, 60.5, alive=(0,)), *looks(61, 121.5)]
    assert played(fate, trace) == []
    ((_, lost),) = played(fate, [(122.0, LOOK)])
    assert isinstance(lost, Fail)
    failed = looked("loading", failed=True)
    assert played(fate, [(122.5, failed), (125.4, failed)]) == []
    assert played(fate, [(125.5, failed)]) == [(125.5, Do.GIVE_UP)]


def test_of_ranks_that_fail_by_themselves_the_first_reports_or_else_the_lowest() -> None:
    claims, fails = looked("step 4", reports=True), Beat("step 4", fails=True)
    for rank, peer, before, leaves in (
        (0, 2, True, True),
        (0, 2, False, False),
        (2, 0, True, True),
        (2, 0, False, True),
        (1, 2, False, False),
    ):
        fate = fate_of(rank)
        LOOK(fate, 0.0)
        trace = [(1.0, heard(peer, fails)), (1.0, claims)]
        for time, event in trace if before else reversed(trace):
            sent = event(fate, time)
            if event is claims and not before:
                assert sent == [Send(fate.others, fails)]
        assert fate.leaves_report(1.1) is leaves


def test_where_all_answer_a_sigterm_asks_for_a_stop_in_order() -> None:
    fate = fate_of()
    fate.stop_requested()
    assert played(fate, mpirun_ends(1, 2), looks(6, 16, alive=(1, 2))) == []
    assert fate.stop_requested() == signal.SIGTERM


def test_a_signal_to_another_rank_asks_all_to_stop() -> None:
    fate = fate_of()
    fate.stop_requested()
    assert fate.stop_requested() is None
    assert played(fate, [(0.1, heard(2, Beat("step 3", ("SIGINT",)))), (0.1, LOOK)]) == []
    assert fate.stop_requested() == signal.SIGINT


@pytest.mark.parametrize("expected", [0, 1])
def test_a_signal_that_nobody_asks_for_and_a_second_one_end_the_job_at_once(expected: int) -> None:
    fate = fate_of()
    if expected:
        fate.stop_requested()
    trace: Trace = []
    for number in range(expected + 1):
        trace += [(0.1 + number, signalled(signal.SIGUSR1)), (0.1 + number, LOOK)]
    end = End(128 + signal.SIGUSR1, "interrupted by SIGUSR1", died=False)
    assert played(fate, trace) == [(0.1 + expected, end)]
    assert played(fate_of(1), trace) == []  # rank 0 hears of it, and ends the job


def test_after_a_peer_has_spoken_nothing_is_said_and_the_process_ends_soon() -> None:
    spoken = [(1.0, heard(1, Beat("step 3", state=State.REPORTED)))] * 2
    after = looks(1, 9, states={2: "gone"})
    assert played(fate_of(), spoken, after) == [(1.0, Do.STAY_SILENT), (5.5, Do.EXIT)]


def test_a_process_without_its_mpirun_ends() -> None:
    assert played(fate_of(1), [(0.1, looked("", launched=False))]) == [(0.1, Do.EXIT)]


def test_a_rank_looks_once_a_period_at_first_and_knows_what_those_it_hears_do() -> None:
    fate = fate_of(1)
    assert fate.pause == PERIOD
    fate.heard(0, Beat("step 4"), 0.1)
    fate.heard(2, Beat("step 5"), 0.1)
    assert fate.last_activity(0) == "step 4"
    assert fate.last_activity(2) is None


def test_a_process_that_is_there_again_has_not_died() -> None:
    gone = looked("loading", {1: "gone"})
    alive = looked("loading", {1: None})
    trace: Trace = [(0.9, LOOK), (1.0, gone), (1.05, alive), *looks(1.5, 4, alive=(1, 2))]
    assert played(fate_of(), trace) == []


def test_a_rank_that_wakes_lets_those_that_were_awake_report_a_death_first() -> None:
    gone = looked("loading", {1: "gone"})
    woken: Trace = [(0.9, LOOK), (1.0, gone), (20.0, gone), (20.2, gone)]
    fate = fate_of()
    assert played(fate, woken) == []
    (end,) = played(fate, [(20.0 + PERIOD, gone)])
    assert end == (20.0 + PERIOD, died(1, "starting"))
    higher = fate_of(2)
    assert played(higher, woken, [(21.45, gone)]) == []
    ((_, end_of_higher),) = played(higher, [(21.55, gone)])
    assert isinstance(end_of_higher, End)


@pytest.mark.parametrize(
    ("slept", "signs", "waits"),
    [(60.0, 4, True), (59.5, 4, False), (60.0, 3, False)],
)
def test_a_rank_that_its_peers_gave_up_leaves_the_report_to_them(
    slept: float, signs: int, waits: bool
) -> None:
    """Those that were awake have sent signs of life, before one of them reported it and ended."""
    sent: Trace = [(slept, heard(2, Beat("step 3")))] * signs
    ((ended, end),) = played(fate_of(), sent, looks(slept, slept + 5, states={1: "gone"}))
    assert ended == slept + (SECONDS_TO_BE_ENDED if waits else PERIOD)
    assert end == died(1, "starting")


def test_a_rank_that_its_peers_gave_up_lets_them_report_before_its_main_thread() -> None:
    fate = fate_of()
    sent = [(70.0, heard(2, Beat("step 3")))] * 9
    assert played(fate, [(1.0, LOOK)], sent, [(70.0, LOOK)]) == []
    assert fate.leaves_report(70.0)
    assert not fate.leaves_report(70.0 + SECONDS_TO_BE_ENDED)


def test_a_rank_that_its_peers_gave_up_is_not_interrupted_by_those_who_end_it() -> None:
    fate = fate_of()
    sent = [(70.0, heard(2, Beat("step 3")))] * 9
    ended: Trace = [(70.0, LOOK), (70.0, signalled(signal.SIGCONT)), (70.0, answer(2))]
    ended += [(70.25, signalled(signal.SIGTERM)), (70.35, LOOK), (70.5, LOOK)]
    assert played(fate, [(1.0, LOOK)], sent, ended) == []
