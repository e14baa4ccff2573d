"""The watch that each rank keeps over the job, on a thread of its own.

It sends this rank's signs of life, hears its peers' and the signals of this process, tells
``JobFate``, and carries out its actions: this rank fails by name, or prints the job's last line and
ends it. ``MPITransport`` makes the ``JobWatch``, which makes ``Signals`` and is given ``Activity``,
``JobFate``, ``BeatChannel``, and ``end``, which ends all ranks.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from shardmlx.distributed.fate import JobFate
from shardmlx.distributed.fate_events import Action, Beat, Do, End, Fail, Look, Send, State
from shardmlx.distributed.messages import PeerLost
from shardmlx.distributed.processes import process_state
from shardmlx.distributed.shutdown import JobShutdown
from shardmlx.distributed.signals import Signals
from shardmlx.distributed.times import HURRY, SECONDS_TO_RAISE
from shardmlx.distributed.transport import Activity


class BeatChannel(Protocol):
    """A carrier of small messages between ranks. Thread-safe; never waits, and never raises."""

    def post(self, peer: int, data: bytes, *, is_repeated: bool) -> None:
        """Send, once the message before is no longer on its way. One that ``is_repeated`` is left
        out if a newer one comes meanwhile."""

    def fetch(self) -> Iterable[tuple[int, bytes]]:
        """Yield sender and data of each message that has come, and send what waits for its turn.
        Meanwhile ``post`` may wait."""

    def close(self) -> None:
        """Receive no more."""


class JobWatch:
    """The thread that feeds a rank's ``fate``, and obeys it, until ``close``.

    ``pids`` are the processes of ranks on this host. ``end(code, reason)`` ends all ranks; a reason
    is first told to the clients of this rank. Must be made on the main thread, which alone hears
    signals.
    """

    def __init__(
        self,
        shutdown: JobShutdown,
        activity: Activity,
        fate: JobFate,
        pids: Mapping[int, int],
        channel: BeatChannel,
        end: Callable[[int, str], None],
    ) -> None:
        self.fate = fate
        self._shutdown = shutdown
        self._activity = activity
        # In a container, a peer's process may have no number that is valid here.
        self._pids = {
            peer: pids[peer]
            for peer in fate.others
            if peer in pids and process_state(pids[peer]) != "gone"
        }
        self._channel = channel
        self._end = end
        self._signals = Signals()
        self._closed = False
        self._in_hurry = False
        self._reports = False
        self._is_report_known = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        shutdown.on_turn = self._claim
        shutdown.on_reported = self._tell_peers
        shutdown.leaves_report = self._leaves_report
        self._thread.start()

    def _claim(self) -> None:
        """Tell the peers, unless one has told so, that this rank is about to report a failure."""
        self._reports = True
        self._listen()

    def _listen(self) -> None:
        """Wake at once, from now on, when a peer reports."""
        if not self._closed:
            self._in_hurry = True
            self._signals.wake()

    def _leaves_report(self) -> bool:
        return self.fate.leaves_report(time.monotonic())

    def _tell_peers(self) -> None:
        if not self._closed:
            self._spread(State.REPORTED)

    def _spread(self, state: State) -> None:
        """Tell all ranks now, not only those that listen for this rank's signs of life."""
        self._send(self.fate.others, Beat(str(self._activity), (), state))

    def fail(self, error: Exception) -> None:
        """Make the main thread's next wait raise ``error``; end the job if none comes soon."""
        self._activity.fail(error)
        self._listen()

    def close(self) -> None:
        """Leave in order."""
        self._closed = True
        self._signals.wake()
        self._thread.join()
        self._spread(State.LEFT)
        self._channel.close()
        self._signals.close()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._look()
        except Exception as error:
            self.fail(error)  # otherwise the others would find this rank silent
            time.sleep(SECONDS_TO_RAISE)
            self._give_up()

    def _look(self) -> None:
        states = {peer: process_state(pid) for peer, pid in self._pids.items()}
        failed = self._activity.failure is not None
        look = Look(
            str(self._activity),
            states,
            self._shutdown.launched(),
            failed,
            self._is_report_known,
        )
        self._obey(self.fate.looked(look, time.monotonic()))
        numbers = self._signals.wait(HURRY if self._in_hurry else self.fate.pause)
        self._is_report_known = self._reports  # once all is heard that has come before
        if numbers:
            self._obey(self.fate.signalled(numbers, time.monotonic()))
        for peer, data in list(self._channel.fetch()):  # all, before any is answered
            self._obey(self.fate.heard(peer, pickle.loads(data), time.monotonic()))

    def _obey(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send(peers, beat):
                    self._send(peers, beat)
                case Do.STAY_SILENT:
                    self._shutdown.reported.set()
                case Fail(reason):
                    self.fail(PeerLost(reason))
                case End(code, reason, died):
                    text = reason
                    if died:
                        # mpirun leaves no time for the main thread to report it.
                        self._activity.failure = PeerLost(reason)
                        text = f"failed: {self._activity.where()}: {reason}"
                    self._shutdown.say(text)
                    self._end(code, reason)
                case Do.GIVE_UP:
                    self._give_up()
                case Do.EXIT:
                    self._shutdown.ensure_mpirun_ends()
                    os._exit(1)

    def _send(self, peers: Iterable[int], beat: Beat) -> None:
        data = pickle.dumps(beat)
        for peer in peers:
            self._channel.post(peer, data, is_repeated=beat.is_repeated)

    def _give_up(self) -> None:
        try:
            self._activity.check(self._activity.where)
        except Exception as error:
            self._shutdown.report(error, at_once=True)  # this thread hears nobody meanwhile
            self._end(1, "")
