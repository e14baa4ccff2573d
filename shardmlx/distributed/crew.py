"""Rank 0 decides, and all ranks do: commands go out from rank 0, and answers come back.

::

    rank 0                                ranks 1 .. n-1
    crew.all(Worker.load, job)  ------->  load(job), the same method of their own worker
    its own worker's load(job)
                                <-------  the answer, or the error that it ended with

Whatever rank 0 does between two commands is plain Python: no other rank has a part in it. Ranks
take commands in the order in which rank 0 gives them, so they cannot disagree about what comes
next. Inside a command ranks may send to each other, and sum. With ``begin`` rank 0 goes on before
the others have answered, so that a training step waits for no answer. In a block of ``promptly``
the next command comes as soon as other messages: a rank 0 that lives, and does nothing more, ends
the job then.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from shardmlx.distributed.agreement import AgreedError
from shardmlx.distributed.tags import COMMAND_TAG
from shardmlx.distributed.transport import Outbox, Transport
from shardmlx.errors import AgreedFailure, Stopped, UserError, one_line

W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)
P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")
F = TypeVar("F", bound=Callable[..., Any])

_TAKES_LONG = "takes_long"
_IS_TOGETHER = "is_together"

LONG_SECONDS = 43_200.0
"""Seconds, 12 hours, that ranks wait for the next command, before which rank 0 may read much data,
and rank 0 for the answer to one that ``takes_long``. The heartbeat finds a rank that is lost
meanwhile."""

MOST_AHEAD = 16
"""Commands that rank 0 gives before it takes the answers to the first of them."""

MOST_UNDER_WAY = 1024
"""Messages of a rank that may be under way before it waits: more than those of so many commands to
30 ranks, or of the answers to them, so that no rank waits for another to take one."""


@dataclass(frozen=True, slots=True)
class _Command:
    """A call of a method of a worker, or of a part of it: attributes and places in lists."""

    part: tuple[str | int, ...]
    method: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    is_prompt: bool
    """True if the next command comes soon."""
    is_together: bool
    """True if ranks wait for each other in it: an error on one of them ends the job."""


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


def takes_long(method: F) -> F:
    """Mark a method of a worker that may take hours: it reads or writes weights, or waits for a
    network beyond the ranks'."""
    setattr(method, _TAKES_LONG, True)
    return method


def together(method: F) -> F:
    """Mark a method of a worker in which ranks wait for each other: a ``UserError`` on one of them
    is no answer then, since the others could give none. It ends the job."""
    setattr(method, _IS_TOGETHER, True)
    return method


def _is_marked(method: Callable[..., object], mark: str) -> bool:
    return bool(getattr(method, mark, False))


class Pending(Generic[T]):
    """A command that rank 0 has carried out, and to which other ranks may still have to answer."""

    def __init__(
        self, channel: _Channel, method: Callable[..., T], own: _Answer, *, is_long: bool = False
    ) -> None:
        self.method = method.__name__
        self.seconds = LONG_SECONDS if is_long or _is_marked(method, _TAKES_LONG) else 0.0
        """Seconds that answers may take, if longer than a message may."""
        self.answers = [own]
        self._channel = channel

    @property
    def own(self) -> T:
        """The value that the command has returned on rank 0."""
        value: T = self.answers[0].value
        return value

    def values(self) -> list[T]:
        """Wait for all answers; return what the command has returned, by rank. Raises as
        ``Crew.all``."""
        self._channel.settle(self)
        for rank, answer in enumerate(self.answers):
            if answer.error is not None:
                raise self._named(rank, answer.error)
        return [answer.value for answer in self.answers]

    def _named(self, rank: int, error: Exception) -> Exception:
        """Return the error of a rank as that of the whole job."""
        if isinstance(error, UserError) and not isinstance(error, AgreedError):
            where = "" if rank == 0 else f"{self._channel.transport.name(rank)}: "
            return AgreedError(f"{where}{error.problem}", error.remedy)
        return error


class _Channel:
    """The commands of rank 0 to the other ranks, and their answers, which come in order."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.is_followed = False
        """True while other ranks wait for messages of rank 0 that no answer ends."""
        self.is_prompt = False
        """True while commands follow each other soon."""
        self._unanswered: deque[Pending[Any]] = deque()
        self._outbox = Outbox(transport)

    def send(self, messages: Sequence[Any], what: str) -> None:
        """Begin to send each rank but 0 its message, ``messages[rank]``."""
        pickled: dict[int, bytes] = {}
        for peer in range(1, self.transport.size):
            message = messages[peer]
            payload = pickled.get(id(message)) or pickle.dumps(message)
            pickled[id(message)] = payload
            self._outbox.send_object(payload, peer, COMMAND_TAG, what)
        self._outbox.drain(MOST_UNDER_WAY)

    def expect(self, pending: Pending[Any]) -> None:
        """Expect the answers of the other ranks to a command that they were sent."""
        self._unanswered.append(pending)
        if len(self._unanswered) > MOST_AHEAD:
            self.settle(self._unanswered[0])

    def settle(self, last: Pending[Any]) -> None:
        """Receive all answers up to those to ``last``."""
        while len(last.answers) < self.transport.size and self._unanswered:
            first = self._unanswered.popleft()
            with self.transport.longer_timeout(first.seconds):
                for peer in range(1, self.transport.size):
                    what = f"answer to {first.method}"
                    first.answers.append(self.transport.receive_object(peer, what, COMMAND_TAG))

    def settle_all(self) -> list[Pending[Any]]:
        """Receive all answers that are to come; return their commands."""
        unanswered = list(self._unanswered)
        if unanswered:
            self.settle(unanswered[-1])
        return unanswered

    def dismiss(self, error: Exception | None) -> None:
        """Let the other ranks leave when all have answered, with this ``error`` if there is one."""
        self.settle_all()
        self.send([_Dismissal(error)] * self.transport.size, "leaving")
        self._outbox.drain(0)


class Crew(Generic[W_co]):
    """The ranks of a job as rank 0 commands them, each with a worker. Only rank 0 has a crew."""

    def __init__(
        self,
        transport: Transport,
        worker: W_co,
        part: tuple[str | int, ...] = (),
        channel: _Channel | None = None,
    ) -> None:
        self.transport = transport
        self._worker = worker
        self._part = part
        self._channel = channel or _Channel(transport)

    @property
    def worker(self) -> W_co:
        """The worker of rank 0, or the part of it that is commanded."""
        return self._worker

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.transport.size

    @property
    def is_followed(self) -> bool:
        """True while other ranks wait for messages of rank 0 that no answer ends."""
        return self._channel.is_followed

    def part(self, kind: type[V], *path: str | int) -> Crew[V]:
        """Return the crew of a part of all workers, of this kind: an attribute, or an element of
        it, such as ``"runs", 2``."""
        part = _part_of(self._worker, path)
        if not isinstance(part, kind):
            raise TypeError(f"{path} of {type(self.worker).__name__} is not a {kind.__name__}")
        return Crew(self.transport, part, (*self._part, *path), self._channel)

    def all(
        self, method: Callable[Concatenate[W_co, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call a method on the worker of every rank; return what it returns, by rank.

        Arguments and results are pickled. Raises ``AgreedError``, which names the rank unless it is
        rank 0, if the method raises ``UserError`` on any rank; ``AgreedFailure`` and ``Stopped`` as
        they come.
        """
        return self.begin(method, *args, **kwargs).values()

    def begin(
        self, method: Callable[Concatenate[W_co, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Pending[T]:
        """Do as ``all``, and return when rank 0 has done its part."""
        command = self._command(method, args, kwargs)
        return self._begin(method, [command] * self.size)

    def begin_each(
        self, method: Callable[..., T], args_of_ranks: Sequence[tuple[Any, ...]]
    ) -> Pending[T]:
        """Do as ``begin``, with other arguments for each rank; those that are one object are
        pickled once."""
        commands: dict[int, _Command] = {}
        for args in args_of_ranks:
            commands.setdefault(id(args), self._command(method, args, {}))
        return self._begin(method, [commands[id(args)] for args in args_of_ranks])

    def _command(
        self, method: Callable[..., object], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> _Command:
        """Return a call of a method; no command follows one that takes long on some rank soon."""
        is_prompt = self._channel.is_prompt and not _is_marked(method, _TAKES_LONG)
        is_together = _is_marked(method, _IS_TOGETHER)
        return _Command(self._part, method.__name__, args, kwargs, is_prompt, is_together)

    def _begin(self, method: Callable[..., T], commands: Sequence[_Command]) -> Pending[T]:
        own = commands[0]
        self._channel.send(commands, own.method)
        was_followed = self._channel.is_followed
        self._channel.is_followed |= own.is_together
        answer = _carried_out(self.transport, self._worker, own)
        self._channel.is_followed = was_followed
        pending = Pending(self._channel, method, answer)
        self._channel.expect(pending)
        if pending.answers[0].error is not None:
            pending.values()
        return pending

    @contextmanager
    def others(
        self, method: Callable[Concatenate[W_co, P], object], /, *args: P.args, **kwargs: P.kwargs
    ) -> Iterator[None]:
        """Let all other ranks call a method while rank 0 does the block, which makes them end it.

        Raises as ``all``. An error of the block itself ends the job, since nobody else can end the
        method, and so does an error of the method, which rank 0 would not hear; a generator may be
        closed in it.
        """
        command = replace(self._command(method, args, kwargs), is_together=True)
        self._channel.send([command] * self.size, command.method)
        # Rank 0 may lead for days.
        pending = Pending(self._channel, method, _Answer(), is_long=True)
        self._channel.expect(pending)
        self._channel.is_followed = True
        try:
            yield
        except GeneratorExit:
            self._channel.is_followed = False
            pending.values()
            raise
        self._channel.is_followed = False
        pending.values()

    @contextmanager
    def promptly(self) -> Iterator[None]:
        """Let other ranks wait for commands in the block only as long as for other messages, unless
        the last one takes long."""
        self._channel.is_prompt = True
        try:
            yield
        finally:
            self._channel.is_prompt = False

    def finish(self) -> None:
        """Wait until all ranks have done all that they were told to do. Raises as ``all``."""
        for pending in self._channel.settle_all():
            pending.values()

    def dismiss(self, error: Exception | None) -> None:
        """Let the other ranks leave, with this ``error`` if there is one."""
        self._channel.dismiss(error)


@contextmanager
def leading(transport: Transport, worker: W) -> Iterator[Crew[W] | None]:
    """Give rank 0 its crew for a block. The other ranks carry out commands until rank 0 has left
    its block, and are given None for theirs. All ranks must call it.

    If rank 0's block raises ``UserError``, ``AgreedFailure`` or ``Stopped`` between two commands,
    all ranks raise it, the first as ``AgreedError``. While the others follow it they hear of none:
    rank 0 alone raises it, as ``UserError`` or ``RuntimeError``, which ends the job.
    """
    if transport.rank != 0:
        _follow(transport, worker)
        yield None
        return
    crew = Crew(transport, worker)
    try:
        yield crew
        crew.finish()
    except UserError as error:
        if crew.is_followed and isinstance(error, AgreedError):
            raise UserError(error.problem, error.remedy) from error
        if crew.is_followed:
            raise
        agreed = AgreedError(error.problem, error.remedy)
        crew.dismiss(agreed)
        raise agreed from error
    except (AgreedFailure, Stopped) as error:
        if crew.is_followed and crew.size > 1:
            # If all ranks knew it, rank 0 would wait for the others to leave.
            raise RuntimeError(one_line(error)) from error
        crew.dismiss(error)
        raise
    except GeneratorExit:
        crew.dismiss(None)
        raise
    crew.dismiss(None)


def lead(transport: Transport, worker: W, work: Callable[[Crew[W]], T]) -> T | None:
    """Do ``work`` on rank 0, with the workers of all ranks; return its result there, and None on
    the others, which carry out commands until it is done: see ``leading``."""
    with leading(transport, worker) as crew:
        return None if crew is None else work(crew)


def _follow(transport: Transport, worker: Any) -> None:
    """Carry out rank 0's commands until it has no more."""
    # Answers wait for nobody: rank 0 may take them after further commands.
    answers = Outbox(transport)
    is_prompt = False
    while True:
        with transport.longer_timeout(0.0 if is_prompt else LONG_SECONDS):
            message = transport.receive_object(0, "next command", COMMAND_TAG)
        if isinstance(message, _Dismissal):
            answers.drain(0)
            if message.error is not None:
                raise message.error
            return
        is_prompt = message.is_prompt
        answer = _carried_out(transport, _part_of(worker, message.part), message)
        what = f"answer to {message.method}"
        answers.send_object(pickle.dumps(answer), 0, COMMAND_TAG, what)
        answers.drain(MOST_UNDER_WAY)


def _part_of(worker: Any, path: Sequence[str | int]) -> Any:
    """Return a part of a worker: the attribute, or the element of a list, that a path leads to."""
    for step in path:
        worker = getattr(worker, step) if isinstance(step, str) else worker[step]
    return worker


def _carried_out(transport: Transport, worker: Any, command: _Command) -> _Answer:
    """Carry out a command on this rank, which says so where it fails, or is lost."""
    try:
        with transport.activity.during(command.method.replace("_", " ")):
            return _Answer(getattr(worker, command.method)(*command.args, **command.kwargs))
    except (AgreedError, AgreedFailure, Stopped) as error:
        # Without the places that it came by, which would keep what was held there.
        return _Answer(error=error.with_traceback(None))
    except UserError as error:
        if command.is_together:
            raise
        # Its subclasses are built of other things than their two texts.
        return _Answer(error=UserError(error.problem, error.remedy))
