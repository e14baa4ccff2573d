"""Rank 0 decides, and all ranks do: commands go out from rank 0, and answers come back.

::

    rank 0                                ranks 1 .. n-1
    crew.all(Worker.load, job)  ------->  load(job), the same method of their own worker
    its own worker's load(job)
                                <-------  the answer, or the error that it ended with

Whatever rank 0 does between two commands is plain Python: no other rank has a part in it. Ranks
take commands in the order in which rank 0 gives them, so they cannot disagree about what comes
next. Inside a command ranks may send to each other, and sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from shardmlx.distributed.agreement import AgreedError
from shardmlx.distributed.transport import Transport
from shardmlx.errors import AgreedFailure, Stopped, UserError

W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)
P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")

SECONDS_TO_DECIDE = 12 * 3600.0
"""Seconds that ranks wait for the next command, and rank 0 for an answer: between them a large
model is downloaded, or much data read. The heartbeat finds a rank that is lost in the meantime."""


@dataclass(frozen=True, slots=True)
class _Command:
    """A call of a method of a worker, or of its ``part``."""

    part: str
    method: str
    args: Sequence[Any]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Dismissal:
    """The last command: all ranks leave, with rank 0's error if there is one."""

    error: Exception | None


@dataclass(frozen=True, slots=True)
class _Answer:
    """The value that a command has returned on a rank, or the error that ended it. Errors that no
    rank foresees are no answers: they end the job."""

    value: Any = None
    error: Exception | None = None


class Crew(Generic[W_co]):
    """The ranks of a job as rank 0 commands them, each with a worker. Only rank 0 has a crew."""

    def __init__(self, transport: Transport, worker: W_co, part: str = "") -> None:
        self.transport = transport
        self._worker = worker
        self._part = part
        self.is_followed = False
        """True while other ranks do what the block of ``others`` alone can end."""

    @property
    def worker(self) -> W_co:
        """The worker of rank 0, or the part of it that is commanded."""
        return self._worker

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.transport.size

    def part(self, name: str, kind: type[V]) -> Crew[V]:
        """Return the crew of the attributes ``name`` of all workers, which are of this kind."""
        part = getattr(self.worker, name)
        if not isinstance(part, kind):
            raise TypeError(f"{name} of {type(self.worker).__name__} is not a {kind.__name__}")
        return Crew(self.transport, part, name)

    def all(
        self, method: Callable[Concatenate[W_co, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call a method on the worker of every rank; return what it returns, by rank.

        Arguments and results are pickled. Raises ``AgreedError``, which names the rank unless it is
        rank 0, if the method raises ``UserError`` on any rank; ``AgreedFailure`` and ``Stopped`` as
        they come.
        """
        command = _Command(self._part, method.__name__, args, kwargs)
        self._send(command, command.method)
        return self._values([_carried_out(self._worker, command), *self._others(command)])

    @contextmanager
    def others(
        self, method: Callable[Concatenate[W_co, P], object], /, *args: P.args, **kwargs: P.kwargs
    ) -> Iterator[None]:
        """Let all other ranks call a method while rank 0 does the block, which makes them end it.

        Raises as ``all``. An error of the block itself ends the job, since nobody else can end the
        method; a generator may be closed in it.
        """
        command = _Command(self._part, method.__name__, args, kwargs)
        self._send(command, command.method)
        self.is_followed = True
        try:
            yield
        except GeneratorExit:
            self._end_others(command)
            raise
        self._end_others(command)

    def _end_others(self, command: _Command) -> None:
        self.is_followed = False
        self._values([_Answer(), *self._others(command)])

    def dismiss(self, error: Exception | None) -> None:
        """Let the other ranks leave, with this ``error`` if there is one."""
        self._send(_Dismissal(error), "leaving")

    def _others(self, command: _Command) -> Iterator[_Answer]:
        """Yield the answers of all ranks but 0 to a command that they have."""
        with self.transport.longer_timeout(SECONDS_TO_DECIDE):
            for peer in range(1, self.size):
                yield self.transport.receive_object(peer, f"answer to {command.method}")

    def _values(self, answers: Iterable[_Answer]) -> list[Any]:
        """Return the values of answers by rank, or raise the first error."""
        found = list(answers)
        for rank, answer in enumerate(found):
            if answer.error is not None:
                raise self._named(rank, answer.error)
        return [answer.value for answer in found]

    def _send(self, message: _Command | _Dismissal, what: str) -> None:
        self.transport.broadcast(message, what)

    def _named(self, rank: int, error: Exception) -> Exception:
        """Return the error of a rank as that of the whole job."""
        if isinstance(error, UserError) and not isinstance(error, AgreedError):
            where = "" if rank == 0 else f"{self.transport.name(rank)}: "
            return AgreedError(f"{where}{error.problem}", error.remedy)
        return error


@contextmanager
def leading(transport: Transport, worker: W) -> Iterator[Crew[W] | None]:
    """Give rank 0 its crew for a block. The other ranks carry out commands until rank 0 has left
    its block, and are given None for theirs. All ranks must call it.

    If rank 0's block raises ``UserError``, ``AgreedFailure`` or ``Stopped`` between two commands,
    all ranks raise it, the first as ``AgreedError``.
    """
    if transport.rank != 0:
        _follow(transport, worker)
        yield None
        return
    crew = Crew(transport, worker)
    try:
        yield crew
    except UserError as error:
        if crew.is_followed:
            raise
        agreed = AgreedError(error.problem, error.remedy)
        crew.dismiss(agreed)
        raise agreed from error
    except (AgreedFailure, Stopped) as error:
        if not crew.is_followed:
            crew.dismiss(error)
        raise
    except GeneratorExit:
        crew.dismiss(None)
        raise
    crew.dismiss(None)


def lead(transport: Transport, worker: W, work: Callable[[Crew[W]], T]) -> T | None:
    """Do ``work`` on rank 0, with the workers of all ranks; return its result there, and None on
    the others, which carry out commands until it is done. All ranks must call it. Raises as
    ``leading``."""
    with leading(transport, worker) as crew:
        return None if crew is None else work(crew)


def _follow(transport: Transport, worker: Any) -> None:
    """Carry out rank 0's commands until it has no more."""
    while True:
        with transport.longer_timeout(SECONDS_TO_DECIDE):
            message = transport.broadcast(None, "next command")
        if isinstance(message, _Dismissal):
            if message.error is not None:
                raise message.error
            return
        of_part = getattr(worker, message.part) if message.part else worker
        answer = _carried_out(of_part, message)
        transport.send_object(answer, 0, f"answer to {message.method}")


def _carried_out(worker: Any, command: _Command) -> _Answer:
    try:
        return _Answer(getattr(worker, command.method)(*command.args, **command.kwargs))
    except (AgreedError, AgreedFailure, Stopped) as error:
        return _Answer(error=error)
    except UserError as error:
        # Its subclasses are built of other things than their two texts.
        return _Answer(error=UserError(error.problem, error.remedy))
