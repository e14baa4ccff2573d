"""Rank 0 gives commands, and all ranks carry them out in one order."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import closing
from itertools import islice
from typing import Any

import pytest

from shardmlx.distributed.agreement import AgreedError
from shardmlx.distributed.crew import MOST_AHEAD, Crew, lead, leading, takes_long, together
from shardmlx.distributed.messages import Handle, TransportTimeout
from shardmlx.distributed.transport import Transport
from shardmlx.errors import AgreedFailure, Stopped, UserError
from testbed.jobs import patience
from tests.helpers.local_transport import LocalNetwork

RANKS = 3


class Counter:
    """A part of a worker."""

    def __init__(self, first: int) -> None:
        self.count = first

    def add(self, more: int) -> int:
        self.count += more
        return self.count


class Worker:
    """What a rank can do here; it keeps what it was told."""

    def __init__(self, transport: Transport) -> None:
        self._rank = transport.rank
        self.told: list[Any] = []
        self.counters = [Counter(0), Counter(10 * transport.rank)]

    def tell(self, word: Any, *, twice: bool = False) -> tuple[int, Any]:
        self.told += [word, word] if twice else [word]
        return self._rank, word

    def refuse(self, rank: int) -> None:
        if self._rank == rank:
            raise UserError("the disk is full", "free some of it")

    def fail(self, error: Exception) -> None:
        raise error

    def wait(self, event: Any) -> int:
        event.wait(10)
        return self._rank


Work = Callable[[Crew[Worker]], Any]


def on_ranks(work: Work, timeout: float = 20.0, ranks: int = RANKS) -> list[tuple[Any, list[Any]]]:
    """Return, by rank, what ``lead`` returns or raises, and what the worker was told."""

    def rank(transport: Transport) -> tuple[Any, list[Any]]:
        worker = Worker(transport)
        try:
            return lead(transport, worker, work), worker.told
        except (AgreedError, AgreedFailure, Stopped) as error:
            return error, worker.told

    network = LocalNetwork(ranks, timeout)
    found = network.run(rank)
    assert not any(network._sends.values()), "all that was sent was received"
    assert not any(network._receives.values())
    return found


def test_all_ranks_do_the_same_in_the_same_order_and_answer_by_rank() -> None:
    def work(crew: Crew[Worker]) -> list[Any]:
        assert crew.size == RANKS
        first = crew.all(Worker.tell, "load")
        crew.all(Worker.tell, {"step": 1}, twice=True)
        return first

    (answers, told), *others = on_ranks(work)
    assert answers == [(rank, "load") for rank in range(RANKS)]
    assert told == ["load", {"step": 1}, {"step": 1}]
    assert others == [(None, told)] * 2


def test_one_rank_alone_needs_no_messages() -> None:
    ((answers, told),) = on_ranks(lambda crew: crew.all(Worker.tell, "load"), ranks=1)
    assert (answers, told) == ([(0, "load")], ["load"])


@pytest.mark.parametrize("rank", range(RANKS))
def test_what_one_rank_refuses_is_the_error_of_all(rank: int) -> None:
    def work(crew: Crew[Worker]) -> None:
        crew.all(Worker.refuse, rank)
        crew.all(Worker.tell, "never")

    found = on_ranks(work)
    where = "" if rank == 0 else f"rank {rank} on localhost: "
    for error, told in found:
        assert isinstance(error, AgreedError)
        assert (error.problem, error.remedy) == (f"{where}the disk is full", "free some of it")
        assert told == []


@pytest.mark.parametrize(
    "error", [AgreedError("no room", "make some"), AgreedFailure("nan"), Stopped(15, "saved")]
)
def test_errors_of_all_ranks_stay_what_they_are(error: Exception) -> None:
    for found, _ in on_ranks(lambda crew: crew.all(Worker.fail, error)):
        assert type(found) is type(error)
        assert str(found) == str(error)
        assert getattr(found, "signal", None) == getattr(error, "signal", None)


@pytest.mark.parametrize("error", [UserError("bad", "mend it"), AgreedFailure("nan")])
def test_rank_0_refuses_between_two_commands_for_all(error: Exception) -> None:
    def work(crew: Crew[Worker]) -> None:
        crew.all(Worker.tell, "load")
        raise error

    for found, told in on_ranks(work):
        assert str(found) == str(error)
        assert told == ["load"]


def test_an_error_that_nobody_foresees_is_no_answer() -> None:
    """It is that rank's own, and ends the job."""

    def rank(transport: Transport) -> None:
        lead(transport, Worker(transport), lambda crew: crew.all(Worker.fail, KeyError("a fault")))

    with pytest.raises(KeyError, match="a fault"):
        LocalNetwork(2, timeout=20).run(rank)


def test_rank_0_goes_on_before_the_others_have_answered() -> None:
    """They wait for what rank 0 does after its next command."""
    event = threading.Event()
    told_of = []

    class Patient(Worker):
        def wait(self, event: Any) -> int:
            if self._rank:
                released.wait(10)
            return self._rank

    released = event

    def rank(transport: Transport) -> Any:
        def work(crew: Crew[Patient]) -> list[int]:
            pending = crew.begin(Patient.wait, None)
            told_of.append(pending.own)
            released.set()
            later = crew.begin(Patient.tell, "next")
            assert [each for each, _ in later.values()] == [0, 1]
            return pending.values()

        return lead(transport, Patient(transport), work)

    first, _ = LocalNetwork(2, timeout=20).run(rank)
    assert first == [0, 1]
    assert told_of == [0]


def test_many_commands_ahead_of_their_answers() -> None:
    count = 10 * MOST_AHEAD

    def work(crew: Crew[Worker]) -> list[Any]:
        pending = [crew.begin(Worker.tell, number) for number in range(count)]
        return [each.values()[-1] for each in reversed(pending)]

    (answers, told), *others = on_ranks(work)
    assert answers == [(RANKS - 1, number) for number in reversed(range(count))]
    assert told == list(range(count))
    assert [each for _, each in others] == [told] * 2


def test_rank_0_goes_no_more_than_16_commands_ahead_of_their_answers() -> None:
    def work(crew: Crew[Worker]) -> list[int]:
        pending = [crew.begin(Worker.tell, number) for number in range(16)]
        before = len(pending[0].answers)
        pending.append(crew.begin(Worker.tell, 16))
        return [before, *(len(each.answers) for each in pending)]

    (answers, _), *_ = on_ranks(work)
    assert answers == [1, RANKS, *[1] * 16]


class Remembering(LocalNetwork):
    """A network that knows of each message that was sent whether somebody still holds it."""

    def __init__(self) -> None:
        super().__init__(2, timeout=20)
        self.sent: list[weakref.ref[Any]] = []

    def post(self, key: tuple[int, int, int], handle: Handle, is_send: bool) -> Handle:
        if is_send:
            self.sent.append(weakref.ref(handle.array))
        return super().post(key, handle, is_send)


def test_neither_commands_nor_answers_that_have_come_are_held() -> None:
    network = Remembering()

    def work(crew: Crew[Worker]) -> int:
        for number in range(30):
            crew.all(Worker.tell, number)
        return len([each for each in network.sent if each() is not None])

    held, _ = network.run(lambda transport: lead(transport, Worker(transport), work))
    assert len(network.sent) == 31 * 2 + 30 * 2
    assert held <= 8


def test_rank_0_does_not_leave_before_the_others_have_heard_that_they_may() -> None:
    left = threading.Event()

    def rank(transport: Transport) -> bool:
        if transport.rank == 0:
            lead(transport, Worker(transport), lambda crew: None)
            left.set()
            return True
        waited = left.wait(0.1)
        lead(transport, Worker(transport), lambda crew: None)
        return waited

    assert LocalNetwork(2, timeout=20).run(rank) == [True, False]


def test_what_rank_0_refuses_to_do_itself_is_raised_at_once() -> None:
    def work(crew: Crew[Worker]) -> str:
        with pytest.raises(AgreedError, match="the disk is full"):
            crew.begin(Worker.refuse, 0)
        return "goes on"

    (answer, _), *_ = on_ranks(work)
    assert answer == "goes on"


def test_answers_that_nobody_asked_for_are_taken_before_all_leave_with_an_error() -> None:
    def work(crew: Crew[Worker]) -> None:
        for number in range(3):
            crew.begin(Worker.tell, number)
        raise UserError("bad", "mend it")

    for found, told in on_ranks(work):
        assert (str(found), told) == ("bad: mend it", [0, 1, 2])


def test_what_all_ranks_are_told_is_pickled_once() -> None:
    pickled = []

    class Word:
        def __reduce__(self) -> tuple[Any, ...]:
            pickled.append(1)
            return threading.Event, ()

    class Hasty(Worker):
        def wait(self, event: Any) -> int:
            return self._rank

    def rank(transport: Transport) -> Any:
        return lead(transport, Hasty(transport), lambda crew: crew.all(Hasty.wait, Word()))

    assert LocalNetwork(RANKS, timeout=20).run(rank)[0] == [0, 1, 2]
    assert pickled == [1]


def test_an_error_of_a_command_that_nobody_asks_for_is_raised_at_the_end() -> None:
    def work(crew: Crew[Worker]) -> str:
        crew.begin(Worker.refuse, 2)
        return "done"

    for found, _ in on_ranks(work):
        assert isinstance(found, AgreedError)
        assert "rank 2" in found.problem


def test_each_rank_has_its_own_arguments() -> None:
    def work(crew: Crew[Worker]) -> list[Any]:
        shared = ("b",)
        return crew.begin_each(Worker.tell, [("a",), shared, shared]).values()

    (answers, _), *_ = on_ranks(work)
    assert answers == [(0, "a"), (1, "b"), (2, "b")]


def test_parts_of_workers_are_commanded_alike() -> None:
    def work(crew: Crew[Worker]) -> list[int]:
        counter = crew.part(Counter, "counters", 1)
        counter.begin(Counter.add, 1)
        crew.all(Worker.tell, "between")
        found = counter.all(Counter.add, 2)
        assert counter.worker.count == found[0]
        with pytest.raises(TypeError, match="Worker"):
            crew.part(Worker, "counters", 0)
        return found

    (answers, _), *_ = on_ranks(work)
    assert answers == [3, 13, 23]


class Following(Worker):
    """A worker that does what comes by other messages."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.transport = transport

    def follow(self) -> None:
        while (word := self.transport.receive_object(0, "word")) is not None:
            self.told.append(word)


def say(transport: Transport, word: str | None) -> None:
    for peer in range(1, transport.size):
        transport.send_object(word, peer, "word")


def test_the_others_follow_while_rank_0_leads() -> None:
    def rank(transport: Transport) -> list[str]:
        def work(crew: Crew[Following]) -> None:
            with crew.others(Following.follow):
                assert crew.is_followed
                say(transport, "hello")
                say(transport, None)
            assert not crew.is_followed
            crew.all(Following.tell, "after")

        worker = Following(transport)
        lead(transport, worker, work)
        return worker.told

    assert LocalNetwork(RANKS, timeout=20).run(rank) == [
        ["after"],
        ["hello", "after"],
        ["hello", "after"],
    ]


@pytest.mark.parametrize("is_left_early", [False, True])
def test_what_ends_the_others_while_they_follow_is_raised_where_rank_0_has_led(
    is_left_early: bool,
) -> None:
    class Stopping(Following):
        def follow(self) -> None:
            super().follow()
            raise AgreedFailure("nan")

    def led(crew: Crew[Stopping]) -> Generator[None, None, None]:
        with crew.others(Stopping.follow):
            try:
                yield
            finally:
                say(crew.transport, None)

    def rank(transport: Transport) -> None:
        def work(crew: Crew[Stopping]) -> None:
            leads = led(crew)
            next(leads)
            with pytest.raises(AgreedFailure, match="nan"):
                leads.close() if is_left_early else next(leads)
            assert not crew.is_followed

        lead(transport, Stopping(transport), work)

    LocalNetwork(2, timeout=20).run(rank)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UserError("the output is full", "free some room"), UserError),
        (AgreedError("the output is full", "free some room"), UserError),
        (AgreedFailure("the output is full"), RuntimeError),
        (Stopped(1, "the output is full"), RuntimeError),
    ],
)
def test_an_error_while_the_others_follow_is_rank_0s_alone(
    error: Exception, kind: type[Exception]
) -> None:
    """They wait for other messages, and hear of none: the job ends, and nobody leaves in order."""

    def rank(transport: Transport) -> None:
        def work(crew: Crew[Following]) -> None:
            with crew.others(Following.follow):
                raise error

        lead(transport, Following(transport), work)

    with pytest.raises(kind, match="the output is full") as seen:
        LocalNetwork(2, timeout=20).run(rank)
    assert type(seen.value) is kind


def test_one_process_that_nobody_follows_is_stopped_as_it_is() -> None:
    def work(crew: Crew[Following]) -> None:
        with crew.others(Following.follow):
            raise Stopped(15, "stopped by SIGTERM")

    with pytest.raises(Stopped) as stop:
        LocalNetwork(1, timeout=20).run(lambda rank: lead(rank, Following(rank), work))
    assert stop.value.signal == 15


def test_a_generator_that_is_closed_early_leaves_the_ranks_together() -> None:
    def words(transport: Transport, worker: Following) -> Generator[str, None, None]:
        with leading(transport, worker) as crew:
            if crew is not None:
                with crew.others(Following.follow):
                    try:
                        yield "first"
                    finally:
                        say(transport, "enough")
                        say(transport, None)
                yield "never"

    def rank(transport: Transport) -> list[str]:
        worker = Following(transport)
        with closing(words(transport, worker)) as said:
            assert [*islice(said, 1)] == ["first"] * (transport.rank == 0)
        transport.barrier("all have left")
        return worker.told

    network = LocalNetwork(2, timeout=20)
    assert network.run(rank) == [[], ["enough"]]
    assert not any(network._sends.values())


@pytest.mark.parametrize("late", [0, 1])
def test_where_commands_follow_soon_no_rank_waits_long_for_one_that_does_nothing(late: int) -> None:
    """It lives, so that no heartbeat tells of it."""
    over = threading.Event()

    class Late(Worker):
        def wait(self, event: Any) -> int:
            if self._rank == late == 1:
                over.wait(60)
            return self._rank

    class Ending(LocalNetwork):
        def abort(self) -> None:
            super().abort()
            over.set()

    def work(crew: Crew[Late]) -> None:
        with crew.promptly():
            crew.all(Late.wait, None)
            over.wait(60)

    network = Ending(2, timeout=patience(0.3))
    with pytest.raises(TransportTimeout) as ended:
        network.run(lambda transport: lead(transport, Late(transport), work))
    waited = ("next command", "answer to wait")[late]
    assert waited in str(ended.value)


class Deaf(Following):
    """A worker of which every rank but 0 takes ``seconds`` to answer."""

    seconds = 0.0

    def sleep(self) -> int:
        if self._rank:
            time.sleep(self.seconds)
        return self._rank

    def follow(self) -> None:
        super().follow()
        self.sleep()

    @takes_long
    def load(self) -> int:
        return self.sleep()


def test_an_answer_may_take_as_long_as_a_message_unless_the_command_takes_long_or_leads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeout = patience(0.3)
    monkeypatch.setattr(Deaf, "seconds", 3 * timeout)

    def answers(method: Callable[[Deaf], int]) -> Any:
        def rank(transport: Transport) -> Any:
            return lead(transport, Deaf(transport), lambda crew: crew.all(method))

        return LocalNetwork(2, timeout=timeout).run(rank)[0]

    def lead_others(crew: Crew[Deaf]) -> str:
        with crew.others(Deaf.follow):
            say(crew.transport, None)
        return "has led"

    assert answers(Deaf.load) == [0, 1]
    network = LocalNetwork(2, timeout=timeout)
    assert network.run(lambda each: lead(each, Deaf(each), lead_others))[0] == "has led"
    with pytest.raises(TransportTimeout, match="answer to sleep, waiting for rank 1"):
        answers(Deaf.sleep)


def test_rank_0_may_think_for_longer_than_a_message_takes() -> None:
    """Before the first command, between two, and after a block of prompt ones."""
    timeout = patience(0.4)

    def work(crew: Crew[Worker]) -> list[Any]:
        time.sleep(1.5 * timeout)
        crew.all(Worker.tell, "first")
        time.sleep(1.5 * timeout)
        with crew.promptly():
            crew.all(Worker.tell, "soon")
        crew.all(Worker.tell, "later")
        time.sleep(1.5 * timeout)
        return crew.all(Worker.tell, "at last")

    (answers, _), *_ = on_ranks(work, timeout=timeout)
    assert [word for _, word in answers] == ["at last"] * RANKS


class Doing(Worker):
    """A worker that says what its rank is at."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.activity = transport.activity
        self.activity.begin("loading")

    def find_files(self) -> str:
        return str(self.activity)

    def step(self) -> None:
        self.activity.begin("step 1")


def test_a_rank_is_at_the_command_that_it_carries_out() -> None:
    """A rank that fails in it, or dies, is named with it."""

    def work(crew: Crew[Doing]) -> list[Any]:
        during = crew.all(Doing.find_files)
        between = str(crew.worker.activity)
        crew.all(Doing.step)
        after = crew.all(Doing.find_files)
        return [during, between, after, str(crew.worker.activity)]

    found, *_ = LocalNetwork(2, timeout=20).run(
        lambda transport: lead(transport, Doing(transport), work)
    )
    assert found == [["find files"] * 2, "loading", ["find files"] * 2, "step 1"]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_that_nobody_foresees_leaves_the_rank_at_its_command(rank: int) -> None:
    places: list[str] = []

    class Failing(Doing):
        def find_files(self) -> str:
            if self._rank == rank:
                raise KeyError("a fault")
            return ""

    def body(transport: Transport) -> None:
        try:
            lead(transport, Failing(transport), lambda crew: crew.all(Failing.find_files))
        except KeyError:
            places.append(transport.activity.where())
            raise

    with pytest.raises(KeyError, match="a fault"):
        LocalNetwork(2, timeout=20).run(body)
    assert places == [f"rank {rank} on localhost, find files"]


class Meeting(Worker):
    """A worker whose ranks wait for each other."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._transport = transport

    @together
    def meet(self, late: int) -> None:
        self.refuse(late)
        self._transport.barrier("meeting")


@pytest.mark.parametrize("late", [0, 1])
def test_what_a_rank_refuses_while_others_wait_for_it_ends_the_job(late: int) -> None:
    """They could give no answer, and would wait until a message times out."""

    def rank(transport: Transport) -> None:
        lead(transport, Meeting(transport), lambda crew: crew.all(Meeting.meet, late))

    with pytest.raises(UserError, match="the disk is full") as refused:
        LocalNetwork(2, timeout=60).run(rank)
    assert not isinstance(refused.value, AgreedError)


def test_what_a_rank_refuses_while_it_follows_ends_the_job() -> None:
    """Rank 0, which leads, waits for other messages."""

    def work(crew: Crew[Following]) -> None:
        with crew.others(Following.refuse, 1):
            crew.transport.receive_object(1, "word")

    with pytest.raises(UserError, match="the disk is full") as refused:
        LocalNetwork(2, timeout=20).run(lambda each: lead(each, Following(each), work))
    assert not isinstance(refused.value, AgreedError)


def test_rank_0_refuses_between_commands_once_ranks_have_met() -> None:
    def work(crew: Crew[Meeting]) -> None:
        crew.all(Meeting.meet, -1)
        assert not crew.is_followed
        raise UserError("bad", "mend it")

    def rank(transport: Transport) -> Exception | None:
        try:
            return lead(transport, Meeting(transport), work)
        except AgreedError as error:
            return error

    assert [str(error) for error in LocalNetwork(2, timeout=60).run(rank)] == ["bad: mend it"] * 2
