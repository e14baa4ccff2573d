"""The alarm that shows which ranks live while a job may be ending.

No MLX, no MPI, no messages, no threads, no clocks.

mpirun ends a job with signals to all ranks, a quarter of a second apart: SIGCONT, SIGTERM, SIGKILL.
It does so when a rank has died, and when it is itself asked to stop. The first signal is an alarm:
each rank that lives tells all others at once that it does, and whose answers it has. So all soon
know who is missing, and the lowest rank that lives is the one to report it.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardmlx.distributed.times import MPIRUN_KILLS


class Alarm:
    """The alarm of ``rank``: off at first. Times are seconds of any clock."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.since = -float("inf")
        """Start of the last alarm."""
        self._end = -float("inf")
        self._end_of_asking = -float("inf")
        self._living = {rank}
        self._killed: float | None = None

    def is_on(self, now: float) -> bool:
        """Return whether there is an alarm."""
        return now < self._end

    def asks(self, now: float) -> bool:
        """Return whether this rank has a reason of its own, so that who lives has to answer.

        An answer asks for none: otherwise late answers would keep an alarm alive.
        """
        return now < self._end_of_asking

    def sound(self, now: float, first_hand: bool = True) -> None:
        """Start an alarm, or prolong it; ``first_hand`` if not because another rank asks."""
        if not self.is_on(now):
            self.since = now
            self._living = {self.rank}
            self._killed = None
        self._end = now + MPIRUN_KILLS
        if first_hand:
            self._end_of_asking = self._end

    def terminated(self, now: float) -> None:
        """Take note that a rank was sent a SIGTERM during the alarm: mpirun's."""
        if self._killed is None:
            self._killed = now

    def killed(self, now: float) -> float | None:
        """Return when mpirun's SIGTERM first came to a rank, if it did so in this alarm."""
        return self._killed if self.is_on(now) else None

    def answered(self, ranks: Iterable[int]) -> None:
        """Take note that these ranks live, as themselves or others say."""
        self._living.update(ranks)

    def living(self, now: float) -> tuple[int, ...]:
        """Return the ranks that have lived since the alarm, in order; none if there is no alarm."""
        return tuple(sorted(self._living)) if self.is_on(now) else ()
