"""The watch that each rank keeps over the job, on a thread of its own.

It sends this rank's signs of life, hears those of its peers and the signals of this process, lets
the monitor judge, and acts: this rank fails by name, or says the job's last line and ends it.
Who knows whom: ``MPITransport`` makes the ``JobWatch``, which makes ``Signals`` and is given all
else: ``Activity``, ``Monitor`` and ``Mail`` below it, and ``end``, the way to end all ranks.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from shardmlx.distributed.activity import Activity
from shardmlx.distributed.heartbeat import (
    HURRY,
    PERIOD,
    Beat,
    Fate,
    Judgement,
    Monitor,
    State,
    silence_limit,
)
from shardmlx.distributed.messages import PeerLost
from shardmlx.distributed.processes import process_state
from shardmlx.distributed.shutdown import JobShutdown
from shardmlx.distributed.signals import Signals

SECONDS_TO_RAISE = 4.0
"""Seconds for the main thread to come to a wait and say what it waited for, after a failure."""


class Mail(Protocol):
    """A carrier of small messages between ranks. Thread-safe; never waits, and never raises."""

    def post(self, peer: int, data: bytes) -> None:
        """Send, unless the message before is still on its way."""

    def fetch(self) -> Iterable[tuple[int, bytes]]:
        """Yield sender and data of what has come."""

    def close(self) -> None:
        """Receive no more."""


class JobWatch(JobShutdown):
    """A rank's part in the end of a job whose ranks hear each other.

    ``earlier`` is its part before they could. ``peers`` are all other ranks. ``end(code, reason)``
    ends all ranks, after the last words to those whom this rank serves if there is a reason.
    Made on the main thread, which alone hears signals.
    """

    def __init__(
        self,
        earlier: JobShutdown,
        activity: Activity,
        monitor: Monitor,
        peers: Iterable[int],
        mail: Mail,
        end: Callable[[int, str], None],
    ) -> None:
        super().__init__(earlier.rank, earlier)
        self.monitor = monitor
        self._activity = activity
        self._peers = tuple(peers)
        self._usual = self._peers if monitor.rank == 0 else (0,)
        self._mail = mail
        self._end = end
        self._signals = Signals()
        self._closed = False
        self._in_hurry = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def say(self, text: str, turn: float = 0.0) -> bool:
        """Print ``shardmlx: TEXT`` as ``JobShutdown`` does; the peers then say nothing."""
        if turn and not self._closed:
            self._in_hurry = True  # to hear at once if a peer speaks
            self._signals.wake()
        spoken = super().say(text, turn)
        if spoken and not self._closed:
            self._spread(State.SPOKEN)
        return spoken

    def fail(self, error: Exception) -> None:
        """Let the main thread's next wait raise ``error``; end the job if it comes to none soon."""
        if self._activity.failure is None:
            self._activity.failure = error
            threading.Thread(target=self._end_if_stuck, name="failing", daemon=True).start()

    def stop_requested(self) -> int | None:
        """Return the first signal that asked a rank to stop; it is no longer an interruption."""
        self.monitor.expects_stop = True
        return self.monitor.stop()

    def close(self) -> None:
        """Leave in order."""
        self._closed = True
        self._signals.wake()
        self._thread.join()
        self._spread(State.LEFT)
        self._mail.close()
        self._signals.close()

    def _run(self) -> None:
        try:
            self._keep_watch()
        except Exception as error:
            self.fail(error)  # else the others would find this rank silent

    def _keep_watch(self) -> None:
        # To all, once: when a rank has died there is no time left to make connections.
        self._beat(self._peers)
        last_beat = time.monotonic()
        while not self._closed:
            in_hurry = self._in_hurry or self.monitor.in_hurry
            numbers = self._signals.wait(HURRY if in_hurry else PERIOD)
            for number in numbers:
                self.monitor.signalled(number)
            now = time.monotonic()
            if numbers or now - last_beat >= PERIOD / 2:
                last_beat = now
                self._beat(self._usual)
            for peer, data in self._mail.fetch():
                self.monitor.heard(peer, pickle.loads(data))
            if self.monitor.hushed:
                self.line.hush()
            judgement = self.monitor.look()
            if judgement is not None and not self._closed:
                self._act(judgement)

    def _beat(self, peers: Iterable[int]) -> None:
        mine = pickle.dumps(self.monitor.beat(str(self._activity)))
        for peer in peers:
            self._mail.post(peer, mine)

    def _spread(self, state: State) -> None:
        """Tell all ranks, now and not only those that listen for this rank's signs of life."""
        for peer in self._peers:
            self._mail.post(peer, pickle.dumps(Beat(str(self._activity), (), state)))

    def _act(self, judgement: Judgement) -> None:
        match judgement.fate:
            case Fate.LOST:
                self.fail(PeerLost(judgement.text))
            case Fate.DIED:
                # mpirun leaves no time for more.
                self._activity.failure = PeerLost(judgement.text)
                self.say(f"failed: {self._activity.where()}: {judgement.text}")
                self._end(1, judgement.text)
            case Fate.INTERRUPTED:
                self.say(judgement.text)
                self._end(128 + (judgement.signal or 0), judgement.text)
            case Fate.ENDED:
                self.see_off_mpirun()
                os._exit(1)

    def _end_if_stuck(self) -> None:
        time.sleep(SECONDS_TO_RAISE)
        try:
            self._activity.check(self._activity.where)
        except Exception as error:
            self.report(error)
            self._end(1, "")


def monitor_ranks(
    rank: int,
    names: Sequence[str],
    pids: Mapping[int, int],
    timeout: float,
    launched: Callable[[], bool],
) -> Monitor:
    """Return the monitor of the ranks that ``rank`` watches, of those called ``names``.

    ``pids`` are the processes of the ranks on its host; a message may take ``timeout`` seconds.
    """
    watched = range(1, len(names)) if rank == 0 else (0,)
    # From inside a container the number of a peer's process may be none.
    seen = {peer for peer in watched if peer in pids and process_state(pids[peer]) != "gone"}
    return Monitor(
        rank,
        {peer: names[peer] for peer in watched},
        silence_limit(timeout),
        lambda peer: process_state(pids[peer]) if peer in seen else None,
        launched,
    )
