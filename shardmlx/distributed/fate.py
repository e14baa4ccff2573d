"""The fate of a job, as one rank sees it: events go in, actions come out.

Rank 0 hears every rank, and every rank hears rank 0; in an alarm all hear all (``alarm``).
``JobFate`` decides: each event is a call, at a time in seconds of any clock. The thread of
``job_watch`` makes the calls, and carries out the actions. No MLX, no MPI, no messages, no threads,
no clocks.

A death is known for certain where its process is gone: ranks of that host see it, and tell the
others. Elsewhere it is concluded: mpirun ends the job, and one rank does not answer.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardmlx.common.environment import signal_name
from shardmlx.distributed.alarm import Alarm
from shardmlx.distributed.fate_events import Action, Beat, Do, End, Fail, Look, Send, State
from shardmlx.distributed.signals import STOPS
from shardmlx.distributed.times import (
    HURRY,
    OWN_SLEEP,
    PERIOD,
    SECONDS_FOR_LOWER_RANKS,
    SECONDS_OF_QUIET,
    SECONDS_TO_BE_ENDED,
    SECONDS_TO_BE_HEARD,
    SECONDS_TO_BE_MUTE,
    SECONDS_TO_RAISE,
    turn,
)

NEVER = float("inf")


@dataclass(slots=True)
class _Peer:
    name: str
    heard: float
    is_watched: bool
    last: Beat = field(default_factory=lambda: Beat("starting"))
    gone_since: float = NEVER
    signs: int = 0
    """Signs of life that came since this rank's last look."""

    def has_died(self, before: float = NEVER) -> bool:
        """Return whether its process was gone before then, and it neither left nor ends the job."""
        return self.gone_since < before and self.last.state is State.ALIVE


class JobFate:
    """State of the job whose ranks are called ``names``, as ``rank`` knows it since ``now``.

    ``limit`` is the seconds after which a silent rank is lost.
    """

    def __init__(self, rank: int, names: Sequence[str], limit: float, now: float) -> None:
        self.rank = rank
        self.limit = limit
        self.quiet: str | None = None
        """The rank in doubt, in words, if there is one."""
        self.pause = PERIOD
        """Seconds until the next look."""
        self.others = tuple(peer for peer in range(len(names)) if peer != rank)
        self.watched = self.others if rank == 0 else (0,)
        """Ranks that this one hears, without an alarm."""
        self._peers = {peer: _Peer(names[peer], now, peer in self.watched) for peer in self.others}
        self._alarm = Alarm(rank)
        self._looked = now
        self._woke = -NEVER
        self._given_up_until = -NEVER
        self._lower_learned = -NEVER
        self._sent: float | None = None
        self._own: tuple[str, ...] = ()
        self._expects_stop = False
        self._failure_reported_at: float | None = None
        self._failed: float | None = None
        self._lost: float | None = None
        self._blames_silence = False
        self._claims: bool | None = None
        self._over = False
        self._activity = "starting"

    def last_activity(self, peer: int) -> str | None:
        """Return a rank's activity at its last sign of life, if this rank watches it."""
        return self._peers[peer].last.activity if peer in self.watched else None

    def stop_requested(self) -> int | None:
        """Return the first signal that asked a rank to stop. The run is then expected to stop in
        order, so a first signal no longer interrupts it."""
        self._expects_stop = True
        return self._stop()

    def leaves_report(self, now: float) -> bool:
        """Return whether another rank is about to report the end of the job.

        That is a lower one in an alarm; and of those that fail, the first, or the lowest of several
        that do so before they hear of each other.
        """
        if self._claims is False or self._leaves_verdict(now) or self._is_given_up(now):
            return True
        return any(self._peers[rank].last.fails for rank in self._lower(now))

    def _is_given_up(self, now: float) -> bool:
        """Return whether a peer was awake while this rank was silent for the limit, and may have
        reported it. The report may be lost behind signs of life that this rank did not fetch, and
        what ends then is ended because of it."""
        return now < self._given_up_until

    def _leaves_verdict(self, now: float) -> bool:
        """Return whether a lower rank lives, in an alarm: it knows as much as this one."""
        return bool(self._lower_living(now))

    def _lower_living(self, now: float) -> list[int]:
        living = self._alarm.living(now)
        return [rank for rank in self._lower(now) if rank in living]

    def _is_mute(self, rank: int, now: float) -> bool:
        """Return whether a rank gave a sign of life in this alarm, and then no more: it died since,
        or was stopped."""
        return self._alarm.since <= self._peers[rank].heard < now - SECONDS_TO_BE_MUTE

    def _lower(self, now: float) -> list[int]:
        gone = self._gone(now - SECONDS_TO_BE_HEARD)
        return [rank for rank in range(self.rank) if rank not in gone]

    def _stop(self) -> int | None:
        heard = (peer.last.signals[0] for peer in self._peers.values() if peer.last.signals)
        name = self._own[0] if self._own else next(heard, None)
        return None if name is None else signal.Signals[name]

    def signalled(self, numbers: Iterable[int], now: float) -> list[Action]:
        """Return the actions after this process was sent signals."""
        for number in numbers:
            if number == signal.SIGCONT:
                self._alarm.sound(now)
            elif number in STOPS:
                self._own += (signal.Signals(number).name,)
                if number == signal.SIGTERM:
                    self._alarm.terminated(now)
        return [self._send(now)]

    def heard(self, peer: int, beat: Beat, now: float) -> list[Action]:
        """Return the actions after a sign of life has come."""
        sender = self._peers[peer]
        signals = beat.signals[len(sender.last.signals) :]
        was_away = any(sender.heard <= self._peers[rank].gone_since for rank in self._gone())
        if peer in self._lower(now) and (was_away or not {*beat.gone} <= {*sender.last.gone}):
            self._lower_learned = now
        sender.heard = now
        sender.signs += 1
        sender.last = beat
        asked = beat.asks and not self._alarm.is_on(now)
        if asked:
            self._alarm.sound(now, first_hand=False)
        self._alarm.answered(beat.living)
        if signal.SIGTERM.name in signals:
            self._alarm.terminated(now)
        for rank in {*beat.gone} - {self.rank, *self._gone()}:
            self._peers[rank].gone_since = now
        actions: list[Action] = [self._send(now)] if asked else []
        if beat.state is State.REPORTED and self._failure_reported_at is None:
            self._failure_reported_at = now
            actions.append(Do.STAY_SILENT)
        return actions

    def looked(self, look: Look, now: float) -> list[Action]:
        """Return the actions after a look at this host, when time has passed."""
        if self._over:
            return []
        self._activity = look.activity
        if look.failed and self._failed is None:
            self._failed = now
        self._see(look.processes, now)
        self.quiet = self._silent_for(now, SECONDS_OF_QUIET, look)
        verdict = self._verdict(look, now)
        actions: list[Action] = []
        alarmed = self._alarm.is_on(now)
        if look.reports and self._claims is None:
            self._claims = not any(peer.last.fails for peer in self._peers.values())
            actions.append(self._send(now))
        elif self._sent is None or now - self._sent >= (
            SECONDS_TO_BE_HEARD if alarmed else PERIOD / 2
        ):
            actions.append(self._send(now))
        if verdict is not None:
            actions.append(verdict)
            self._over = not isinstance(verdict, Fail)
        # A silent rank is to be named before a wait for another rank ends.
        hurries = alarmed or self._gone() or self._silent_for(now, self.limit - PERIOD, look)
        self.pause = HURRY if hurries else PERIOD
        return actions

    def _see(self, processes: Mapping[int, str | None], now: float) -> None:
        """Take note of the processes on this host, and of this one's own sleep."""
        seconds = now - self._looked
        slept = seconds > OWN_SLEEP
        self._looked = now
        if slept:
            self._woke = now
        was_heeded = any(peer.signs >= OWN_SLEEP / PERIOD for peer in self._peers.values())
        if seconds > self.limit - PERIOD and was_heeded:
            self._given_up_until = now + SECONDS_TO_BE_ENDED
        for rank, peer in self._peers.items():
            peer.signs = 0
            if slept:
                peer.heard = now
                peer.gone_since = NEVER
            if rank not in processes:
                continue  # it is on another host, whose ranks may tell
            if processes[rank] != "gone":
                peer.gone_since = NEVER
            elif peer.gone_since == NEVER:
                peer.gone_since = now
                if peer.has_died():
                    self._alarm.sound(now)

    def _send(self, now: float) -> Send:
        # To all ranks on the first time: when a rank has died, connecting takes too long.
        to_all = self._sent is None or self._alarm.is_on(now) or self._claims is True
        self._sent = now
        beat = Beat(
            self._activity,
            self._own,
            asks=self._alarm.asks(now),
            living=self._alarm.living(now),
            gone=self._gone(),
            fails=self._claims is True,
        )
        return Send(self.others if to_all else self.watched, beat)

    def _verdict(self, look: Look, now: float) -> Action | None:
        if not look.launched:
            return Do.EXIT
        if self._failed is not None and now - self._failed >= self._seconds_to_raise():
            return Do.GIVE_UP
        if self._failure_reported_at is not None:
            return Do.EXIT if now - self._failure_reported_at > SECONDS_TO_BE_ENDED else None
        death = self._seen_death(now) or self._concluded_death(now)
        if death is not None:
            return None if self._is_given_up(now) else death
        return self._interruption(now) or self._silence(look, now)

    def _seconds_to_raise(self) -> float:
        """Return the seconds that the main thread has to report a failure. Lower ranks have had
        their turns before this one says that a peer is silent."""
        return SECONDS_TO_RAISE + (0.0 if self._blames_silence else turn(self.rank))

    def _gone(self, before: float = NEVER) -> tuple[int, ...]:
        """Return the ranks that have died, whose process was gone before then."""
        return tuple(rank for rank, peer in self._peers.items() if peer.has_died(before))

    def _seen_death(self, now: float) -> Action | None:
        """Return the end because a process is gone, once its last message would have come.

        Lower ranks have their turns first, from when the last of them has learned of it, or was
        heard again: their host may have slept meanwhile.
        """
        if now - self._woke < PERIOD:
            return None  # a peer that was awake may have reported it
        lower = len(self._lower(now))
        wait = SECONDS_FOR_LOWER_RANKS + turn(lower - 1) if lower else SECONDS_TO_BE_HEARD
        if lower and now - self._lower_learned < wait:
            return None
        gone = self._gone(now - wait)
        return self._died(gone, now) if gone else None

    def _concluded_death(self, now: float) -> Action | None:
        """Return the end because mpirun ends the job, and a rank has not answered.

        mpirun's signals come to all ranks, this one too: others come to one.
        """
        is_due = self._is_time_to_conclude(now) and self._alarm.asks(now)
        if not is_due or not all(self._is_mute(rank, now) for rank in self._lower_living(now)):
            return None
        gone = self._gone(now - SECONDS_TO_BE_HEARD)
        living = self._alarm.living(now)
        missing = gone or tuple(
            rank
            for rank, peer in self._peers.items()
            if peer.last.state is State.ALIVE and rank not in living
        )
        if not missing:
            return None
        # Who was silent long before does not live, or is asleep: another one has just died.
        lately = [rank for rank in missing if self._was_heard_lately(rank)]
        return self._died(lately or missing, now)

    def _was_heard_lately(self, rank: int) -> bool:
        """Return whether a rank gave signs of life until the alarm, as far as rank 0 knows."""
        return self.rank != 0 or self._alarm.since - self._peers[rank].heard < OWN_SLEEP

    def _is_time_to_conclude(self, now: float) -> bool:
        """Return whether mpirun's SIGTERM came so long ago that every living rank has answered.

        The wait is short, since mpirun kills this process next. Each lower rank whose answer did
        not come has its turn before this one: it may yet live.
        """
        killed = self._alarm.killed(now)
        turns = min(max(self.rank - 1, 0), 3) * 1.5 * HURRY
        return killed is not None and now >= killed + SECONDS_TO_BE_HEARD + turns

    def _died(self, ranks: Sequence[int], now: float) -> End:
        """Return the end because a rank has died: one of these."""
        peers = [self._peers[rank] for rank in ranks]
        question = "died (was it killed, or out of memory?)"
        if len(peers) > 1:
            names = " or ".join(peer.name + _last(peer, " ({})") for peer in peers)
            return End(1, f"{names} {question}", died=True)
        (peer,) = peers
        silence = now - peer.heard
        if peer.is_watched and peer.gone_since == NEVER and silence > SECONDS_OF_QUIET:
            question = f"died, or sleeps: it has given no sign of life for {silence:.0f} s"
        return End(1, f"{peer.name} {question}{_last(peer)}", died=True)

    def _interruption(self, now: float) -> Action | None:
        number = self._stop()
        if self.rank != 0 or number is None:
            return None
        if self._alarm.killed(now) is not None and not self._is_time_to_conclude(now):
            return None  # perhaps because a rank died
        signals = [self._own, *(peer.last.signals for peer in self._peers.values())]
        if self._expects_stop and all(len(each) < 2 for each in signals):
            return None
        return End(128 + number, f"interrupted by {signal_name(number)}")

    def _silence(self, look: Look, now: float) -> Action | None:
        text = self._silent_for(now, self.limit, look)
        if text is None or look.failed:
            self._lost = None
            return None
        if self._lost is None:
            self._lost = now
        if self.rank > 1:
            # Several ranks miss rank 0, and one is to report: the lowest that answers.
            self._alarm.sound(now)
            wait = SECONDS_FOR_LOWER_RANKS
            if self._leaves_verdict(now):
                wait += SECONDS_TO_RAISE + turn(self.rank)
            if now - self._lost < wait:
                return None
        self._blames_silence = True
        return Fail(text)

    def _silent_for(self, now: float, seconds: float, look: Look) -> str | None:
        """Return in words which rank has been silent for so long."""
        silent = [
            rank
            for rank in self.watched
            if self._peers[rank].last.state is State.ALIVE
            and now - self._peers[rank].heard >= seconds
        ]
        if not silent:
            return None
        peer = self._peers[silent[0]]
        stopped = look.processes.get(silent[0]) == "stopped"
        return (
            f"{peer.name} has given no sign of life for {seconds:g} s"
            f"{': its process is stopped' if stopped else ''}{_last(peer)}"
        )


def _last(peer: _Peer, form: str = "; {}") -> str:
    """Return in words what a rank was doing last; nothing of one that this rank does not hear."""
    return form.format(f"it was last in {peer.last.activity}") if peer.is_watched else ""
