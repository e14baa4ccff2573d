"""Rank 0 and its crew: ranks die, fail and answer late at any command.

Ranks are threads of which one runs at a time: whenever it waits, the next event of the simulation
is taken. A rank that dies, or ends with an error of its own, is known to the others a while later,
as their watches would know it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardmlx.distributed.agreement import AgreedError
from shardmlx.distributed.crew import Crew, Pending, lead, takes_long, together
from shardmlx.distributed.messages import Handle, PeerLost, TransportTimeout, buffer_of
from shardmlx.errors import AgreedFailure, Stopped, UserError
from tests.helpers.local_transport import LocalNetwork, LocalTransport
from tests.helpers.worlds.rooms import Room
from tests.helpers.worlds.simulation import Simulation

TIMEOUT = 60.0
"""Seconds that a message may take."""

SECONDS_TO_KNOW = (0.2, 30.0)
"""From the end of a rank to the moment when others know of it."""

AGREED = (AgreedError, AgreedFailure, Stopped)


class Killed(BaseException):
    """The end of a rank's thread, in the place of SIGKILL."""


@dataclass
class _Seat:
    """A rank's thread: it has its turn, or waits for it."""

    turn: threading.Lock = field(default_factory=threading.Lock)
    transport: LocalTransport | None = None
    waits: int = 0
    handle: Handle | None = None
    is_killed: bool = False
    has_left: bool = False


class VirtualNetwork(LocalNetwork):
    """A world of ranks in the time of a simulation."""

    def __init__(self, size: int, simulation: Simulation) -> None:
        super().__init__(size, TIMEOUT)
        self.events = simulation
        self.random = random = simulation.random
        self.seats = [_Seat() for _ in range(size)]
        self._main = threading.Lock()
        self._main.acquire()
        self._slow = random.choice([0.001, 0.1, 2.0])
        self._is_buffered = random.random() < 0.5
        self._last: dict[tuple[int, int], float] = {}
        self._come: dict[tuple[int, int, int], deque[Handle]] = {}
        self._wanted: dict[tuple[int, int, int], deque[Handle]] = {}
        for seat in self.seats:
            seat.turn.acquire()

    @property
    def unread(self) -> int:
        """Messages that came and nobody received, and those that were awaited in vain."""
        queues = [*self._come.values(), *self._wanted.values()]
        return sum(map(len, queues))

    # On threads of ranks

    def run(self, work: Callable[[LocalTransport], Any]) -> list[Any]:
        def in_turn(transport: LocalTransport) -> Any:
            seat = self.seats[transport.rank]
            seat.transport = transport
            seat.turn.acquire()
            try:
                return work(transport)
            finally:
                seat.has_left = True
                self._main.release()

        return super().run(in_turn)

    def post(self, key: tuple[int, int, int], handle: Handle, is_send: bool) -> Handle:
        sender, receiver, _ = key
        self._check(sender if is_send else receiver)
        if not is_send:
            come = self._come.get(key)
            if come:
                self._hand_over(come.popleft(), handle)
                self.events.at(self.events.now, self._wake, sender)
            else:
                self._wanted.setdefault(key, deque()).append(handle)
            return handle
        arrives = max(self.events.now, self._last.get(key[:2], 0.0))
        arrives += self.random.uniform(0.0, self._slow)
        self._last[key[:2]] = arrives
        sent = handle
        if self._is_buffered:
            sent = Handle(np.frombuffer(bytes(buffer_of(handle.array)), np.uint8))
            handle.done = True
        self.events.at(arrives, self._arrive, key, sent)
        return handle

    def wait(self, handle: Handle, seconds: float, failed: Callable[[], bool]) -> bool:
        rank = threading.current_thread().name.removeprefix("rank-")
        until = self.events.now + seconds
        while not (handle.done or failed() or self.events.now >= until):
            self._pause(int(rank), until, handle)
        self._check(int(rank))
        return handle.done

    def sleep(self, rank: int, seconds: float) -> None:
        """Let virtual time pass on a rank, which computes."""
        until = self.events.now + seconds
        while self.events.now < until:
            self._pause(rank, until, None)
        self._check(rank)

    def _pause(self, rank: int, until: float, handle: Handle | None) -> None:
        seat = self.seats[rank]
        seat.waits += 1
        seat.handle = handle
        self.events.at(until, self._resume, seat, seat.waits)
        self._main.release()
        seat.turn.acquire()
        self._check(rank)

    def _check(self, rank: int) -> None:
        if self.seats[rank].is_killed:
            raise Killed

    # On the main thread

    def wake(self) -> None:
        """Wake nobody: who waits is woken by its event."""

    def _attend(self, ended: Sequence[threading.Event]) -> None:
        while any(seat.transport is None for seat in self.seats):
            time.sleep(0)
        for seat in self.seats:
            self.events.at(0.0, self._resume, seat, 0)
        self.events.run(goes_on=lambda: not all(seat.has_left for seat in self.seats))
        stuck = [rank for rank, seat in enumerate(self.seats) if not seat.has_left]
        for rank in stuck:
            self.kill(rank)
        super()._attend(ended)
        assert not stuck, f"ranks {stuck} wait for nothing"

    def _resume(self, seat: _Seat, waits: int) -> None:
        if not seat.has_left and seat.waits == waits:
            seat.turn.release()
            self._main.acquire()

    def _arrive(self, key: tuple[int, int, int], sent: Handle) -> None:
        wanted = self._wanted.get(key)
        if not wanted:
            self._come.setdefault(key, deque()).append(sent)
            return
        target = wanted.popleft()
        self._hand_over(sent, target)
        self._wake(key[1])
        self._wake(key[0])

    def _wake(self, rank: int) -> None:
        """Give a rank its turn if what it waits for is done."""
        seat = self.seats[rank]
        if seat.handle is not None and seat.handle.done:
            self._resume(seat, seat.waits)

    def _hand_over(self, sent: Handle, target: Handle) -> None:
        buffer_of(target.array)[:] = buffer_of(sent.array)
        sent.done = target.done = True

    def kill(self, rank: int) -> None:
        """End a rank where it is."""
        seat = self.seats[rank]
        if not seat.has_left:
            seat.is_killed = True
            self._resume(seat, seat.waits)

    def tell_of(self, rank: int) -> None:
        """Let all others know, a little later, that a rank has ended without them."""
        for other, seat in enumerate(self.seats):
            if other != rank:
                seconds = self.random.uniform(*SECONDS_TO_KNOW)
                self.events.after(seconds, self._fail, seat, rank)

    def _fail(self, seat: _Seat, rank: int) -> None:
        if seat.has_left or seat.is_killed or seat.transport is None:
            return
        seat.transport.fail(PeerLost(f"{seat.transport.name(rank)} has ended"))
        if seat.handle is not None:
            self._resume(seat, seat.waits)


@dataclass(frozen=True)
class Fault:
    """What goes wrong on a ``rank`` at a command: it spends ``seconds``, and then raises an
    ``error`` if there is one."""

    rank: int
    command: int
    seconds: float = 0.0
    error: BaseException | None = None


class Part:
    """A part of a worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def tell(self, number: int) -> tuple[int, int]:
        """Do command ``number``."""
        return self._worker.tell(number)


class Worker:
    """What a rank can do: ``log`` has the numbers of the commands that it was given."""

    def __init__(self, world: World, transport: LocalTransport) -> None:
        self.world = world
        self.transport = transport
        self.rank = transport.rank
        self.log: list[int] = []
        self.parts = [Part(self)]

    def tell(self, number: int) -> tuple[int, int]:
        """Do command ``number``."""
        return self._do(number)

    @takes_long
    def load(self, number: int) -> tuple[int, int]:
        """Do command ``number``, which may take hours."""
        return self._do(number)

    @together
    def meet(self, number: int) -> tuple[int, int]:
        """Do command ``number``, within which ranks wait for each other."""
        done = self._do(number)
        self.transport.barrier("meeting")
        return done

    def follow(self, number: int) -> None:
        """Do command ``number``, and what rank 0 says then."""
        self._do(number)
        while (word := self.transport.receive_object(0, "word")) is not None:
            self.log.append(word)

    def _do(self, number: int) -> tuple[int, int]:
        self.log.append(number)
        self.world.meet_faults(self.rank, number)
        return self.rank, number


KINDS = ("all", "all", "begin", "begin", "each", "part", "long", "meet", "others", "think", "ask")


class World:
    """A job: what rank 0 commands ``kind`` of workers, what goes wrong, and what came of it."""

    def __init__(self, simulation: Simulation, kind: type[Worker] = Worker) -> None:
        self._kind = kind
        self.simulation = simulation
        random = self.random = simulation.random
        self.size = random.randint(2, 4)
        self.network = VirtualNetwork(self.size, simulation)
        self.workers: dict[int, Worker] = {}
        self.given: list[int] = []
        self.acknowledged: set[int] = set()
        self.ended: list[BaseException | None] = [None] * self.size
        self._plan = [random.choice(KINDS) for _ in range(random.randint(1, 14))]
        if random.random() < 0.1:
            self._plan = ["begin"] * 40
        self._is_prompt = random.random() < 0.2
        self._pending: list[tuple[int, Pending[tuple[int, int]]]] = []
        self.faults: list[Fault] = [self._fault() for _ in range(random.choice([0, 0, 1, 1, 1, 2]))]
        self.killed: set[int] = set()
        if random.random() < 0.3:
            rank = random.randrange(self.size)
            at = random.choice([0.0, 1.0, 5.0, 100.0]) * random.random()
            self.simulation.at(at, self._kill, rank)
        self.last_fault = 0.0

    def _fault(self) -> Fault:
        random = self.random
        rank = random.randrange(self.size)
        command = random.randrange(len(self._plan))
        seconds = random.choice([0.0, 1.0, 50.0, 90.0, 1000.0])
        error: BaseException | None = random.choice(
            [
                None,
                UserError(f"the disk of {rank} is full", "free some room"),
                KeyError(f"a fault of {rank}"),
            ]
        )
        return Fault(rank, command, seconds, error)

    def note(self, what: str) -> None:
        """Remember that something happens."""
        self.simulation.note(what)

    def _kill(self, rank: int) -> None:
        if self.network.seats[rank].has_left:
            return
        self.killed.add(rank)
        self.note(f"rank {rank} is killed")
        self.last_fault = self.simulation.now
        self.network.kill(rank)

    def meet_faults(self, rank: int, number: int) -> None:
        """Spend the time of a command on a rank, and raise what goes wrong there."""
        self.note(f"rank {rank} does {number}")
        for fault in self.faults:
            if (fault.rank, fault.command) == (rank, number):
                self.network.sleep(rank, fault.seconds)
                self.last_fault = self.simulation.now
                if fault.error is not None:
                    self.note(f"rank {rank} fails with {fault.error!r}")
                    raise fault.error

    def run(self) -> None:
        """Let all ranks run to their ends, and check what came of it."""

        def rank(transport: LocalTransport) -> None:
            worker = self.workers[transport.rank] = self._kind(self, transport)
            error: BaseException | None = None
            try:
                lead(transport, worker, self._lead)
            except BaseException as raised:
                error = raised
            self.ended[transport.rank] = error
            self.note(f"rank {transport.rank} ends: {error!r}")
            if error is not None and not isinstance(error, AGREED):
                self.last_fault = max(self.last_fault, self.simulation.now)
                self.network.tell_of(transport.rank)

        self.network.run(rank)
        self._check()

    def _lead(self, crew: Crew[Worker]) -> None:
        if self._is_prompt:
            with crew.promptly():
                self._command(crew)
        else:
            self._command(crew)

    def _command(self, crew: Crew[Worker]) -> None:
        for number, kind in enumerate(self._plan):
            self.note(f"{kind} {number}")
            if kind == "think":
                self.network.sleep(0, self.random.choice([0.1, 5.0, 50.0]))
            elif kind == "ask":
                self._ask()
            else:
                self.given.append(number)
                self._give(crew, kind, number)
        while self.random.random() < 0.7 and self._pending:
            self._ask()

    def _give(self, crew: Crew[Worker], kind: str, number: int) -> None:
        match kind:
            case "all":
                self._took(number, crew.all(Worker.tell, number))
            case "long":
                self._took(number, crew.all(Worker.load, number))
            case "meet":
                self._took(number, crew.all(Worker.meet, number))
            case "part":
                self._took(number, crew.part(Part, "parts", 0).all(Part.tell, number))
            case "begin":
                self._pending.append((number, crew.begin(Worker.tell, number)))
            case "each":
                arguments = [(number,) for _ in range(self.size)]
                self._pending.append((number, crew.begin_each(Worker.tell, arguments)))
            case "others":
                with crew.others(Worker.follow, number):
                    self.workers[0].log.append(number)
                    self.meet_faults(0, number)
                    for word in (100 + number, 200 + number, None):
                        for peer in range(1, self.size):
                            crew.transport.send_object(word, peer, "word")
                        self.workers[0].log += [] if word is None else [word]
                self.acknowledged.add(number)

    def _ask(self) -> None:
        if self._pending:
            place = self.random.randrange(len(self._pending))
            number, pending = self._pending.pop(place)
            self._took(number, pending.values())

    def _took(self, number: int, values: list[tuple[int, int]]) -> None:
        assert values == [(rank, number) for rank in range(self.size)]
        self.acknowledged.add(number)

    # What must be so

    def _check(self) -> None:
        self._check_commands()
        errors = {rank: error for rank, error in enumerate(self.ended) if error is not None}
        assert {rank for rank, e in errors.items() if isinstance(e, Killed)} == self.killed
        blame = self._to_blame()
        if not errors:
            assert not self.network.unread, "messages that nobody received"
            assert self.acknowledged.issuperset(self.given) or self._pending
            return
        assert blame, f"nothing was wrong, and {errors}"
        agreed = [each for each in errors.values() if isinstance(each, AGREED)]
        if agreed and len(agreed) == self.size:
            assert len({str(each) for each in agreed}) == 1
            assert not self.network.unread, "messages that nobody received"
        for rank, error in errors.items():
            self._check_error(rank, error, blame)
        told = " ".join(str(each) for each in errors.values() if not isinstance(each, Killed))
        named = any(f"rank {each} on" in told or f" of {each}" in told for each in blame)
        assert named or not told, f"{told} names none of {blame}"
        late = self.simulation.now - self.last_fault
        assert late <= 4 * TIMEOUT, f"ended {late:.0f} s after the last fault"

    def _check_commands(self) -> None:
        """Each rank was given the same commands in one order, each once; all did what was
        acknowledged."""
        told = max((worker.log for worker in self.workers.values()), key=len, default=[])
        assert [each for each in told if each < 100] == sorted(
            {each for each in told if each < 100}
        )
        for worker in self.workers.values():
            assert worker.log == told[: len(worker.log)], f"rank {worker.rank}: {worker.log}"
            if worker.rank not in self.killed:
                assert self.acknowledged <= set(worker.log)

    def _to_blame(self) -> set[int]:
        """Return the ranks on which something has gone wrong that can end a job."""
        failed = {
            fault.rank
            for fault in self.faults
            if (fault.error is not None or fault.seconds > TIMEOUT / 2)
            and fault.rank in self.workers
            and fault.command in self.workers[fault.rank].log
        }
        thinks_long = self._is_prompt and self._plan.count("think") > 1
        return failed | self.killed | ({0} if thinks_long else set())

    def _check_error(self, rank: int, error: BaseException, blame: set[int]) -> None:
        """Raise ``AssertionError`` unless the error of a rank names one that is to blame."""
        text = str(error)
        if isinstance(error, (Killed, KeyError)):
            assert rank in blame
        elif isinstance(error, AgreedError):
            assert any(f"the disk of {each} is full" in text for each in blame), text
            named = any(text.startswith(f"rank {each} on localhost: ") for each in blame)
            assert named or "the disk of 0" in text
        elif isinstance(error, UserError):
            assert rank in blame
        elif isinstance(error, TransportTimeout):
            waited = text.partition("waiting for ")[2] or text.partition("sending to ")[2]
            peer = next(each for each in range(self.size) if waited.startswith(f"rank {each} "))
            # Where it waits itself, it says for whom.
            assert peer in blame or self.ended[peer] is not None, text
        else:
            assert isinstance(error, PeerLost), repr(error)
            ended = {each for each, other in enumerate(self.ended) if other is not None}
            assert any(f"rank {each} on localhost has ended" in text for each in ended), text


def play(simulation: Simulation) -> None:
    """Ranks take the same commands in one order, each once; all did what was acknowledged. An error
    names a rank at fault. Nobody waits for ever, and without a fault nothing fails."""
    World(simulation).run()


COMMANDS = Room("commands", play)
