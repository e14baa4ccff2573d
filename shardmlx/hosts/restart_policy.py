"""What follows when a job has ended: nothing, another start, or giving up. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from shardmlx.common.cli import BAD_INPUT

FAILED = 1
LONGEST_PAUSE = 60.0
"""Seconds: a machine that restarts needs about that."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """How one start of a job ended.

    ``gained`` says whether it left a newer checkpoint than it found; None where that cannot be
    seen from here.
    """

    status: int
    hosts: tuple[str, ...] = ()
    gained: bool | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """``status`` to end with, and why; or None, and the seconds before the next start."""

    status: int | None
    reason: str = ""
    pause: float = 0.0


def after(attempts: Sequence[Attempt], max_restarts: int, stopped_by: int | None) -> Verdict:
    """What to do after the last of ``attempts``; ``stopped_by`` is a signal that we passed on."""
    last = attempts[-1]
    if last.status == 0:
        return Verdict(0)
    if stopped_by is not None:
        return Verdict(128 + stopped_by)
    if last.status == 128 + signal.SIGUSR1:  # somebody asked mpirun itself to stop in order
        return Verdict(last.status)
    if last.status == BAD_INPUT:
        return Verdict(BAD_INPUT)
    if max_restarts == 0:
        return Verdict(FAILED)
    if len(attempts) > max_restarts:
        times = f"{max_restarts} restart{'s' if max_restarts > 1 else ''}"
        return Verdict(FAILED, f"{times} used up (see --max-restarts)")
    if len(attempts) > 1 and _is_stuck(attempts[-2], last):
        return Verdict(
            FAILED,
            "failed twice in a row on the same hosts without a new checkpoint: a third start would "
            "most likely fail too; mend what is said above, or save more often "
            "(--checkpoint-every)",
        )
    return Verdict(None, pause=min(2.0 ** (len(attempts) - 1), LONGEST_PAUSE))


def _is_stuck(a: Attempt, b: Attempt) -> bool:
    return a.hosts == b.hosts and a.gained is False and b.gained is False


def status_of(returncode: int) -> int:
    """A process's return code as a shell counts: 128 + n after signal n."""
    return 128 - returncode if returncode < 0 else returncode


def changes(before: Sequence[str], now: Sequence[str]) -> tuple[list[str], list[str]]:
    """(hosts that were there and are not, hosts that are there and were not)."""
    return [host for host in before if host not in now], [
        host for host in now if host not in before
    ]
