"""Decides how to go on at the end of a job: no further start, another one, or giving up."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from shardmlx.common.cli import BAD_INPUT

FAILED = 1
LONGEST_PAUSE = 60.0
"""Seconds, about as many as a machine needs to restart."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """The end of one start of a job.

    ``gained`` says whether it left a newer checkpoint than it found; None if that cannot be seen
    from here.
    """

    status: int
    hosts: tuple[str, ...] = ()
    gained: bool | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The final ``status`` and its reason; or None, and the seconds before the next start."""

    status: int | None
    reason: str = ""
    pause: float = 0.0


def after(attempts: Sequence[Attempt], max_restarts: int, stopped_by: int | None) -> Decision:
    """Decide how to go on after the last of ``attempts``.

    ``stopped_by`` is a signal that was passed on to the job.
    """
    last = attempts[-1]
    if last.status == 0:
        return Decision(0)
    if stopped_by is not None:
        return Decision(128 + stopped_by)
    if last.status == 128 + signal.SIGUSR1:  # mpirun itself was asked to stop in order
        return Decision(last.status)
    if last.status == BAD_INPUT:
        return Decision(BAD_INPUT)
    if max_restarts == 0:
        return Decision(FAILED)
    if len(attempts) > max_restarts:
        times = f"{max_restarts} restart{'s' if max_restarts > 1 else ''}"
        return Decision(FAILED, f"{times} used up (see --max-restarts)")
    if len(attempts) > 1 and _is_stuck(attempts[-2], last):
        return Decision(
            FAILED,
            "failed twice in a row on the same hosts without a new checkpoint: a third start would "
            "most likely fail too; mend what is said above, or save more often "
            "(--checkpoint-every)",
        )
    return Decision(None, pause=min(2.0 ** (len(attempts) - 1), LONGEST_PAUSE))


def _is_stuck(a: Attempt, b: Attempt) -> bool:
    return a.hosts == b.hosts and a.gained is False and b.gained is False


def status_of(returncode: int) -> int:
    """Return a process's status as a shell counts it: 128 + n after signal n."""
    return 128 - returncode if returncode < 0 else returncode


def changes(before: Sequence[str], now: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the hosts that have gone and those that have come."""
    return [host for host in before if host not in now], [
        host for host in now if host not in before
    ]
