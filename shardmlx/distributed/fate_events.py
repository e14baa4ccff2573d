"""Events that a ``JobFate`` is told, and actions that it answers with. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto


class State(Enum):
    """State of a rank, as it reports itself."""

    ALIVE = auto()
    LEFT = auto()  # it has done its part, and leaves in order
    REPORTED = auto()  # it has reported the failure, and ends the job


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life: the rank's activity, and the names of the signals that asked it to stop so
    far: their numbers differ between Linux and macOS.

    In an alarm, ``living`` are the ranks that have answered it, the sender among them. If the
    sender ``asks``, who lives answers. ``gone`` are ranks whose processes ended on its host. One
    that ``fails`` is about to report a failure of its own.
    """

    activity: str
    signals: tuple[str, ...] = ()
    state: State = State.ALIVE
    asks: bool = False
    living: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    fails: bool = False

    @property
    def is_repeated(self) -> bool:
        """True if the next sign of life tells all that this one does. The end of a rank, and its
        wish to report a failure, are told once, or are needed at once."""
        return self.state is State.ALIVE and not self.fails


@dataclass(frozen=True, slots=True)
class Look:
    """The state of this host.

    ``processes`` has the peers' processes on it: None, or those that are ``gone`` or ``stopped``.
    ``launched`` tells whether mpirun, or its daemon, still runs, and ``failed`` whether this rank
    cannot go on, which its main thread is to report. ``reports`` tells whether that waits for its
    turn.
    """

    activity: str
    processes: Mapping[int, str | None] = field(default_factory=dict)
    launched: bool = True
    failed: bool = False
    reports: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """Action: give a sign of life."""

    peers: tuple[int, ...]
    beat: Beat


@dataclass(frozen=True, slots=True)
class Fail:
    """Action: make the main thread's next wait raise that a peer is lost."""

    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """Action: report the reason, and end all ranks with status ``code``. If a peer has ``died``,
    also report where this rank was."""

    code: int
    reason: str
    died: bool = False


class Do(Enum):
    """Actions without arguments."""

    STAY_SILENT = auto()  # report nothing more of the end of the job: a peer has
    GIVE_UP = auto()  # report the failure that the main thread has not raised, and end all ranks
    EXIT = auto()  # end this process: the job has ended without it


Action = Send | Fail | End | Do
