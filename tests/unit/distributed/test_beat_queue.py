"""Messages of which one at a time is on its way: which wait, and which are left out."""

from __future__ import annotations

from shardmlx.distributed.beat_queue import BeatQueue


class Wire:
    """Keeps what was sent; a message is on its way until it is in ``done``."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self.done: set[int] = set()
        self.outgoing = BeatQueue[int](self._send, lambda request: request in self.done)

    def _send(self, peer: int, data: bytes) -> int:
        self.sent.append((peer, data))
        return len(self.sent) - 1


def test_of_messages_that_are_repeated_the_newest_waits_for_the_one_that_is_on_its_way() -> None:
    wire = Wire()
    for data in (b"1", b"2", b"3"):
        wire.outgoing.post(1, data, is_repeated=True)
    wire.outgoing.post(2, b"1", is_repeated=True)
    assert wire.sent == [(1, b"1"), (2, b"1")]
    wire.done.add(0)
    assert wire.outgoing.waiting == [1]
    assert wire.outgoing.send_waiting(1)
    assert wire.outgoing.waiting == []
    assert wire.sent[2:] == [(1, b"3")]


def test_one_that_comes_once_waits_for_its_turn_and_is_not_overtaken() -> None:
    wire = Wire()
    wire.outgoing.post(1, b"alive", is_repeated=True)
    for data in (b"fails", b"reported"):
        wire.outgoing.post(1, data, is_repeated=False)
    wire.outgoing.post(1, b"alive", is_repeated=True)
    assert not wire.outgoing.send_waiting(1)
    assert wire.sent == [(1, b"alive")]
    for number in range(3):
        assert not wire.outgoing.send_waiting(1)
        wire.done.add(number)
    assert wire.outgoing.send_waiting(1)
    assert wire.outgoing.send_waiting(2)
    assert wire.sent[1:] == [(1, b"fails"), (1, b"reported"), (1, b"alive")]
