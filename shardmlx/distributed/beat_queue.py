"""Small messages to peers, of which one at a time is on its way to each. No MPI, no threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

R = TypeVar("R")


class BeatQueue(Generic[R]):
    """Messages that ``send`` begins to send to a peer, each once ``is_done`` says so of the request
    that it returned for the message before."""

    def __init__(self, send: Callable[[int, bytes], R], is_done: Callable[[R], bool]) -> None:
        self._send = send
        self._is_done = is_done
        self._sending: dict[int, R] = {}
        self._waiting: dict[int, deque[tuple[bytes, bool]]] = {}

    def post(self, peer: int, data: bytes, *, is_repeated: bool) -> None:
        """Send a message, or let it wait while others are on their way. The newest alone waits
        of those in a row that are ``is_repeated``: it tells what the others do."""
        waiting = self._waiting.setdefault(peer, deque())
        if waiting and is_repeated and waiting[-1][1]:
            waiting.pop()
        waiting.append((data, is_repeated))
        self.send_waiting(peer)

    @property
    def waiting(self) -> list[int]:
        """Peers for whom something waits for its turn."""
        return [peer for peer, waiting in self._waiting.items() if waiting]

    def send_waiting(self, peer: int) -> bool:
        """Send what waits for its turn, as far as that has come; return whether nothing waits."""
        waiting = self._waiting.get(peer)
        while waiting and self._is_free(peer):
            data, _ = waiting.popleft()
            self._sending[peer] = self._send(peer, data)
        return not waiting

    def _is_free(self, peer: int) -> bool:
        return peer not in self._sending or self._is_done(self._sending[peer])
