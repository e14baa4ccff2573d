"""Where the seconds of a step went, and the trace that shows it."""

import json
from pathlib import Path

from shardmlx.engine.trace import Event, RankTimes, Recorder, Span, rank_times, write_chrome_trace

MESSAGE = (1, 0, 7)


def times(*events: Event) -> RankTimes:
    (result,) = rank_times([events], [0.0])
    return result


def test_the_parts_of_a_step_add_up() -> None:
    result = times(
        Event(Span.STEP, "step 1", 0.0, 10.0),
        Event(Span.COMPUTE, "0F0", 0.0, 3.0),
        Event(Span.COMPUTE, "0B0", 5.0, 7.0),
        Event(Span.REDUCE, "sum over replicas", 7.0, 8.0),
        Event(Span.UPDATE, "optimizer", 8.0, 8.5),
    )
    assert result == RankTimes(step_seconds=10.0, compute_seconds=5.5, exposed_comm_seconds=1.0)
    assert result.idle_seconds == 3.5
    assert result.bubble == 0.35


def test_waiting_for_a_message_is_idle_until_it_is_sent_and_communication_from_then_on() -> None:
    sender = [Event(Span.SEND, "0SEND_F0", 4.0, 4.0, MESSAGE)]
    receiver = [
        Event(Span.STEP, "step 1", 0.0, 6.0),
        Event(Span.RECEIVE, "1RECV_F0", 1.0, 6.0, MESSAGE),
    ]
    _, result = rank_times([sender, receiver], [0.0, 0.0])
    assert result.exposed_comm_seconds == 2.0
    assert result.idle_seconds == 4.0


def test_each_step_has_its_message_and_the_clocks_of_ranks_are_brought_together() -> None:
    """Rank 1's clock shows 100 s more."""
    sender = [
        Event(Span.SEND, "0SEND_F0", 4.0, 4.0, (1, 0, 7)),
        Event(Span.SEND, "0SEND_F0", 14.0, 14.0, (2, 0, 7)),
    ]
    receiver = [
        Event(Span.RECEIVE, "1RECV_F0", 101.0, 105.0, (1, 0, 7)),
        Event(Span.RECEIVE, "1RECV_F0", 111.0, 117.0, (2, 0, 7)),
    ]
    assert rank_times([sender, receiver], [0.0, -100.0])[1].exposed_comm_seconds == 1.0 + 3.0


def test_clocks_that_do_not_quite_agree_make_no_negative_time() -> None:
    sender = [Event(Span.SEND, "0SEND_F0", 5.1, 5.1, MESSAGE)]
    receiver = [Event(Span.RECEIVE, "1RECV_F0", 1.0, 5.0, MESSAGE)]
    assert rank_times([sender, receiver], [0.0, 0.0])[1].exposed_comm_seconds == 0.0
    over = times(Event(Span.STEP, "step 1", 0.0, 1.0), Event(Span.COMPUTE, "0F0", 0.0, 1.1))
    assert over.idle_seconds == 0.0
    assert over.bubble == 0.0


def test_a_recorder_hands_its_events_over_and_starts_anew() -> None:
    recorder = Recorder()
    with recorder.span(Span.COMPUTE, "0F0"), recorder.span(Span.SEND, "0SEND_F0", MESSAGE):
        pass

    sent, span = recorder.take()

    assert (sent.span, sent.label, sent.key) == (Span.SEND, "0SEND_F0", MESSAGE)
    assert (span.span, span.label, span.key) == (Span.COMPUTE, "0F0", ())
    assert span.start <= sent.start <= sent.end <= span.end
    assert recorder.take() == []


def test_the_trace_is_in_the_format_of_chrome_with_one_process_a_rank(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    first = [
        Event(Span.STEP, "step 1", 1.0, 1.5),
        Event(Span.COMPUTE, "0F0", 1.0, 1.25),
        Event(Span.SEND, "0SEND_F0", 1.25, 1.25, MESSAGE),
    ]
    second = [Event(Span.RECEIVE, "1RECV_F0", 101.25, 101.5, MESSAGE)]

    names = ["rank 0 on mini", "rank 1 on studio"]
    write_chrome_trace(path, [(first, 0.0), (second, -100.0)], names)

    records = json.loads(path.read_text())["traceEvents"]
    assert [each["args"]["name"] for each in records if each["ph"] == "M"] == names
    found = [each for each in records if each["ph"] != "M"]
    keys = ("pid", "tid", "name", "cat", "ts", "dur")
    assert {each["ph"] for each in found} == {"X"}
    assert [tuple(each[key] for key in keys) for each in found] == [
        (0, 0, "step 1", "step", 1e6, 5e5),
        (0, 1, "0F0", "compute", 1e6, 2.5e5),
        (0, 2, "0SEND_F0", "send", 1.25e6, 0.0),
        (1, 1, "1RECV_F0", "receive", 1.25e6, 2.5e5),
    ]
