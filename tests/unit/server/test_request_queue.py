"""Requests from an event loop, deltas from the thread that generates."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from shardmlx.server.answer_parts import AnswerPart
from shardmlx.server.request_queue import (
    MOST_TOGETHER,
    Delta,
    GenerationRequest,
    PendingAnswers,
    QueueFull,
    RequestQueue,
    ServiceEnded,
)
from tests.helpers.http_serving import Parrot

Session = Callable[[RequestQueue, Parrot], Awaitable[None]]


def run(session: Session, parrot: Parrot | None = None, most_open: int = 8) -> BaseException | None:
    """A session against a service that runs; what ``RequestQueue.run`` raised."""
    parrot = parrot or Parrot()
    service = RequestQueue(most_open)
    raised: list[BaseException | None] = []

    def generate() -> None:
        try:
            service.run(parrot)
            raised.append(None)
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=generate)

    async def both() -> None:
        thread.start()
        try:
            await session(service, parrot)
        finally:
            service.close(0)
            await asyncio.to_thread(thread.join)

    asyncio.run(both())
    return raised[0]


def request(prompt: str, max_tokens: int = 6, *, stop: tuple[str, ...] = ()) -> GenerationRequest:
    return GenerationRequest(tokens=tuple(map(ord, prompt)), max_tokens=max_tokens, stop=stop)


async def deltas_of(answers: PendingAnswers) -> list[Delta]:
    return [each.delta async for come in answers.news(60) for each in come]


async def text_of(answers: PendingAnswers) -> str:
    deltas = await deltas_of(answers)
    return "".join(part.text for delta in deltas for part in delta.parts)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


def test_an_answer_is_its_pieces_in_order_up_to_the_one_with_a_reason() -> None:
    async def session(service: RequestQueue, parrot: Parrot) -> None:
        deltas = await deltas_of(service.submit([request("ab", 3)]))
        assert [part.text for delta in deltas for part in delta.parts] == ["a", "b", "a"]
        assert [delta.generated for delta in deltas] == [1, 2, 3]
        assert [delta.finish_reason for delta in deltas] == [None, None, "length"]

    assert run(session) is None


def test_the_generator_is_called_on_one_thread_in_the_order_of_requests() -> None:
    async def session(service: RequestQueue, parrot: Parrot) -> None:
        prompts = [chr(ord("a") + place) for place in range(8)]
        await asyncio.gather(*(text_of(service.submit([request(each)])) for each in prompts))
        assert [chr(each.tokens[0]) for each in parrot.added] == prompts
        assert len(parrot.threads) == 1
        assert threading.get_ident() not in parrot.threads

    run(session)


def test_more_than_fits_is_refused_and_fits_again_when_a_text_has_ended() -> None:
    async def session(service: RequestQueue, parrot: Parrot) -> None:
        parrot.goes_on.clear()
        answers = [service.submit([request("a")]) for _ in range(2)]
        with pytest.raises(QueueFull, match=r"^2 requests are open already: try again later$"):
            service.submit([request("a")])
        parrot.goes_on.set()
        await asyncio.gather(*map(text_of, answers))
        assert await text_of(service.submit([request("a")])) == "aaaaaa"

    run(session, most_open=2)


def test_load_counts_texts_from_their_first_piece() -> None:
    async def session(service: RequestQueue, parrot: Parrot) -> None:
        assert service.load == (0, 0)
        answers = [service.submit([request("a")]) for _ in range(3)]
        await until(lambda: (*service.load, service.kept_tokens) == (1, 2, 7))
        parrot.goes_on.set()
        await asyncio.gather(*map(text_of, answers))
        assert (*service.load, service.kept_tokens) == (0, 0, 7)

    fresh = RequestQueue(1)
    assert (*fresh.load, fresh.kept_tokens) == (0, 0, 0)
    run(session, Parrot(at_once=1, steps=1))


def test_a_step_that_does_not_end_is_seen() -> None:
    """Not one of many that do."""

    async def session(service: RequestQueue, parrot: Parrot) -> None:
        await until(lambda: parrot.is_idle and service.stalled > 0)
        answer = service.submit([request("aaa")])
        await text_of(answer)
        assert service.stalled < 5
        parrot.lasts = threading.Event()
        answer = service.submit([request("aaa")])
        await until(lambda: service.stalled > 1.2)  # a rest lasts one second
        parrot.lasts.set()
        await text_of(answer)
        await until(lambda: service.stalled < 1.2)

    assert RequestQueue(1).stalled == 0
    run(session)


def test_a_text_is_cancelled_while_it_waits_and_while_it_is_made() -> None:
    async def session(service: RequestQueue, parrot: Parrot) -> None:
        first, second = (service.submit([request("a")]) for _ in range(2))
        await until(lambda: (*service.load, service.kept_tokens) == (1, 1, 7))
        second.cancel()
        await until(lambda: parrot.cancelled == [1])
        first.cancel()
        await until(lambda: parrot.cancelled == [1, 0])
        assert (*service.load, service.kept_tokens) == (0, 0, 7)

    run(session, Parrot(at_once=1, steps=1))


def test_an_error_of_the_generator_ends_all_texts_and_is_raised() -> None:
    async def session(service: RequestQueue, parrot: Parrot) -> None:
        parrot.goes_on.clear()
        answers = [service.submit([request("a")]) for _ in range(3)]
        parrot.fails = "rank 1 on there:\n is gone"
        for answer in answers:
            with pytest.raises(ServiceEnded, match=r": rank 1 on there: is gone$"):
                await text_of(answer)
        assert service.ended == "rank 1 on there: is gone"
        with pytest.raises(ServiceEnded, match=r"rank 1"):
            service.submit([request("a")])

    assert str(run(session)) == "rank 1 on there:\n is gone"


def test_pieces_that_came_before_an_error_are_delivered_before_it() -> None:
    async def session(service: RequestQueue, parrot: Parrot) -> None:
        steps = iter([[(0, Delta((AnswerPart("said", "a"),), (), 1))]])

        def step() -> list[tuple[int, Delta]]:
            return [] if parrot.is_idle else next(steps, []) or fail()

        parrot.step = step  # type: ignore[method-assign]
        deltas = service.submit([request("a")]).news(60)
        (first,) = await anext(deltas)
        assert (first.index, first.delta) == (0, Delta((AnswerPart("said", "a"),), (), 1))
        with pytest.raises(ServiceEnded, match=r"later"):
            await anext(deltas)

    def fail() -> list[tuple[int, Delta]]:
        raise RuntimeError("later")

    run(session)


def test_close_lets_open_texts_end_and_takes_no_more() -> None:
    async def session(service: RequestQueue, parrot: Parrot) -> None:
        parrot.goes_on.clear()
        answer = service.submit([request("a")])
        service.close(60)
        assert service.ended == "the server is stopping"
        with pytest.raises(ServiceEnded, match=r": the server is stopping$"):
            service.submit([request("a")])
        parrot.goes_on.set()
        assert await text_of(answer) == "aaaaaa"

    assert run(session) is None


def test_close_with_a_deadline_ends_what_is_open_then() -> None:
    async def session(service: RequestQueue, parrot: Parrot) -> None:
        parrot.goes_on.clear()
        answer = service.submit([request("a")])
        service.close(60)
        service.close(0.01)  # the shorter counts
        with pytest.raises(ServiceEnded, match=r": the server is stopping$"):
            await text_of(answer)

    assert run(session) is None


def test_fail_ends_what_is_open_at_once_and_says_why() -> None:
    """However long the generator takes for its step."""

    async def session(service: RequestQueue, parrot: Parrot) -> None:
        in_step, goes_on = threading.Event(), threading.Event()

        def step() -> list[tuple[int, Delta]]:
            in_step.set()
            goes_on.wait(30)
            return [(0, Delta((AnswerPart("said", "too late"),), (), 1))]

        parrot.step = step  # type: ignore[method-assign]
        answer = service.submit([request("a")])
        await asyncio.to_thread(in_step.wait, 30)
        service.fail("rank 1 is lost")
        with pytest.raises(ServiceEnded, match=r": rank 1 is lost$"):
            await text_of(answer)
        goes_on.set()
        await until(lambda: (*service.load, service.kept_tokens) == (0, 0, 7))
        ended.append(service)

    ended: list[RequestQueue] = []
    assert run(session) is None
    assert ended[0].ended == "rank 1 is lost"


def test_nobody_need_listen_any_more() -> None:
    """A loop that has ended does not end the service."""
    parrot = Parrot()
    service = RequestQueue(8)
    parrot.goes_on.clear()

    async def ask() -> None:
        service.submit([request("a")])

    asyncio.run(ask())
    thread = threading.Thread(target=service.run, args=(parrot,))
    thread.start()
    parrot.goes_on.set()
    service.close(60)
    thread.join(30)
    assert not thread.is_alive()
    assert parrot.is_idle


def test_what_comes_together_is_told_together_and_silence_too() -> None:
    """A few at a time: of a client who reads slowly no more is told before it reads."""

    async def session() -> list[list[int]]:
        answers = PendingAnswers(RequestQueue(8), range(5, 6))
        told: list[list[int]] = []
        async for come in answers.news(0.02):
            told.append([each.delta.generated for each in come])
            if told == [[]]:
                for made in range(1, 41):
                    answers.put(5, Delta((), (), made))
                answers.put(5, Delta((), (), 41, finish_reason="stop"))
        return told

    # A loop that had no core may tell of one more silence, before what came meanwhile.
    silence, *silences, first, rest = asyncio.run(session())
    assert not any((silence, *silences))
    assert first == list(range(1, MOST_TOGETHER + 1))
    assert rest == list(range(MOST_TOGETHER + 1, 42))


def test_what_comes_later_is_told_with_what_came_before_the_end_of_the_service() -> None:
    async def session() -> None:
        answers = PendingAnswers(RequestQueue(8), range(2))
        answers.put(0, Delta((), (), 1))
        answers.put(1, ServiceEnded("it is late"))
        news = answers.news(60)
        (only,) = await anext(news)
        assert (only.index, only.delta.generated) == (0, 1)
        with pytest.raises(ServiceEnded, match="it is late"):
            await anext(news)

    asyncio.run(session())
