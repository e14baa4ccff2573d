"""Ranks as threads of one process."""

from __future__ import annotations

import atexit
import functools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

import mlx.core as mx

from shardmlx.distributed.messages import Array, Handle, buffer_of
from shardmlx.distributed.transport import Activity, Transport

T = TypeVar("T")


class LocalTransport(Transport):
    """A rank on a thread, in the world of its ``LocalNetwork``."""

    def __init__(self, network: LocalNetwork, rank: int) -> None:
        super().__init__(rank, ("localhost",) * network.size, network.timeout)
        self._network = network
        self.activity = network.activity_of(self.name(rank))

    def send(self, array: Array, peer: int, tag: int) -> Handle:
        return self._network.post((self.rank, peer, tag), Handle(array), is_send=True)

    def receive(self, array: Array, peer: int, tag: int) -> Handle:
        return self._network.post((peer, self.rank, tag), Handle(array), is_send=False)

    def progress(self, handle: Handle, seconds: float) -> bool:
        return self._network.wait(handle, seconds, lambda: self.activity.failure is not None)

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

    def activity_of(self, name: str) -> Activity:
        """Return the activity of the rank of that name."""
        return Activity(name)

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
        with self._changed:
            self._changed.notify_all()

    def abort(self) -> None:
        self._aborted = True
        self.wake()

    def run(self, work: Callable[[LocalTransport], Any]) -> list[Any]:
        """Run ``work`` on a thread for each rank; return its results by rank, or raise the first
        error."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            threading.current_thread().name = f"rank-{rank}"
            try:
                results[rank] = work(LocalTransport(self, rank))
            except BaseException as error:
                errors.append(error)
                self.abort()

        done = [_worker().start(functools.partial(body, rank)) for rank in range(self.size)]
        self._attend(done)
        if errors:
            raise errors[0]
        return results

    def _attend(self, ended: Sequence[threading.Event]) -> None:
        """Return once all ranks have ended."""
        for event in ended:
            event.wait()


def alone(work: Callable[[LocalTransport], T]) -> T:
    """Return what ``work`` returns as the only rank of a job, which waits for no other."""
    result: T
    (result,) = LocalNetwork(1).run(work)
    return result


class _Worker:
    """A thread of its own, which goes into ``idle`` after each work, to be used again.

    MLX adds a thread to every thread that computes, and never ends it: with new threads for each
    run, a process of many runs would have thousands.
    """

    def __init__(self, idle: list[_Worker]) -> None:
        self._idle = idle
        self._works: SimpleQueue[tuple[Callable[[], None], threading.Event] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def start(self, work: Callable[[], None]) -> threading.Event:
        """Begin ``work``, which must not raise; return an event that is set when it is done."""
        done = threading.Event()
        self._works.put((work, done))
        return done

    def _run(self) -> None:
        while (item := self._works.get()) is not None:
            work, done = item
            work()
            del item, work  # free all that it holds
            self._idle.append(self)
            done.set()
        mx.clear_streams()  # MLX requires this of each thread at its end

    def _end(self) -> None:
        self._works.put(None)
        self._thread.join(1.0)


@functools.cache
def _idle_workers() -> list[_Worker]:
    return []


def _worker() -> _Worker:
    idle = _idle_workers()
    try:
        return idle.pop()
    except IndexError:
        return _Worker(idle)
