"""Ranks as threads of one process."""

from __future__ import annotations

import functools
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from shardmlx.distributed.messages import Array, Handle, buffer_of
from shardmlx.distributed.transport import Transport


class LocalTransport(Transport):
    """A rank on a thread, in the world of its ``LocalNetwork``."""

    def __init__(self, network: LocalNetwork, rank: int) -> None:
        super().__init__(rank, ("localhost",) * network.size, network.timeout)
        self._network = network

    def send(self, array: Array, peer: int, tag: int) -> Handle:
        return self._network.post((self.rank, peer, tag), Handle(array), is_send=True)

    def receive(self, array: Array, peer: int, tag: int) -> Handle:
        return self._network.post((peer, self.rank, tag), Handle(array), is_send=False)

    def progress(self, handle: Handle, seconds: float) -> bool:
        return self._network.wait(handle, seconds, lambda: self.failure is not None)

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self._network.wake()

    def abort(self, code: int) -> None:
        self._network.abort()


class LocalNetwork:
    """A world of ``size`` ranks: the state that their threads share."""

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.size = size
        self.timeout = timeout
        self._aborted = False
        self._changed = threading.Condition()
        self._sends: defaultdict[tuple[int, int, int], deque[Handle]] = defaultdict(deque)
        self._receives: defaultdict[tuple[int, int, int], deque[Handle]] = defaultdict(deque)

    def post(self, key: tuple[int, int, int], handle: Handle, is_send: bool) -> Handle:
        """Match a send with a receive, in order; the later of the two copies."""
        if key[0] == key[1]:
            raise ValueError(f"rank {key[0]} sends to itself")
        ours, theirs = self._sends, self._receives
        if not is_send:
            ours, theirs = theirs, ours
        with self._changed:
            if not theirs[key]:
                ours[key].append(handle)
                return handle
            other = theirs[key].popleft()
        source, target = (handle, other) if is_send else (other, handle)
        if source.array.nbytes == target.array.nbytes:
            buffer_of(target.array)[:] = buffer_of(source.array)
            target.done = True
        else:
            target.error = ValueError(
                f"message {key}: {source.array.shape} sent, {target.array.shape} due"
            )
        source.done = True
        self.wake()
        return handle

    def wait(self, handle: Handle, seconds: float, failed: Callable[[], bool]) -> bool:
        """Return whether ``handle`` is done within ``seconds``, or before its rank has ``failed``.

        Raises its error, and ``RuntimeError`` once another rank has aborted.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: handle.done or handle.error or self._aborted or failed(), seconds
            )
        if handle.error is not None:
            raise handle.error
        if not handle.done and self._aborted:
            raise RuntimeError("another rank failed")
        return handle.done

    def wake(self) -> None:
        """Let all ranks that wait look again."""
        with self._changed:
            self._changed.notify_all()

    def abort(self) -> None:
        """End the waits of all ranks."""
        self._aborted = True
        self.wake()

    def run(self, work: Callable[[LocalTransport], Any]) -> list[Any]:
        """Run ``work`` on a thread for each rank; return its results by rank, or raise the first
        error."""
        errors: list[BaseException] = []

        def body(rank: int) -> Any:
            threading.current_thread().name = f"rank-{rank}"
            try:
                return work(LocalTransport(self, rank))
            except BaseException as error:
                errors.append(error)
                self.abort()

        done = [_threads().submit(body, rank) for rank in range(self.size)]
        wait(done)
        if errors:
            raise errors[0]
        return [each.result() for each in done]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return threads that are used again: MLX adds one to each that computes, and never ends it."""
    return ThreadPoolExecutor(64)
