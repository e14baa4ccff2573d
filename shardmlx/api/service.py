"""Carry out the requests of training loops: rank 0's part, on its main thread.

Each model has a queue. The requests that stand first in all queues go to the ranks together:
micro-batches of several models fill each other's bubbles. An update begins right behind the
gradients that it needs, before their results have come. Samples have no queue; the service computes
them by turns.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from shardmlx.api.checks import Checker
from shardmlx.api.models import Models
from shardmlx.api.open_requests import OpenLoss, OpenRequest
from shardmlx.api.requests import (
    CreateModel,
    DeleteState,
    DropSnapshot,
    ForwardBackward,
    LoadState,
    LoopEnded,
    OptimStep,
    Request,
    SamplePrompt,
    SavedState,
    SaveState,
    TakeSnapshot,
    UnloadModel,
)
from shardmlx.api.sampling import Sampler
from shardmlx.api.worker import LoopWorker
from shardmlx.distributed.crew import Crew, Pending
from shardmlx.engine.engine import Results
from shardmlx.errors import UserError, one_line
from shardmlx.planning.loop import no_prompts_come_in

MOST_TOGETHER = 128
"""Micro-batches of each replica in one command, while nobody samples."""

TOGETHER_WHILE_SAMPLING = 8
"""Micro-batches of each replica for each of its ranks in one command, while somebody samples."""

SECONDS_BETWEEN_LOOKS = 0.25
"""Longest wait for a request before the service looks for signals."""

SECONDS_OF_SILENCE = 600.0
"""Time without a command after which ranks are told that rank 0 lives."""


@dataclass(eq=False)
class _Ordered:
    """A command under way, whose results are taken in by ``take``."""

    pending: Pending[Any]
    take: Callable[[list[Any]], None]


class TrainService:
    """The service of one crew, on rank 0. ``submit``, ``states``, ``export`` and ``close`` may be
    called on any thread, all else on the thread of the crew."""

    def __init__(
        self,
        crew: Crew[LoopWorker],
        checker: Checker,
        models: Models,
        sampler: Sampler | None = None,
    ) -> None:
        self._crew = crew
        self._plan = crew.worker.plan
        self._checker = checker
        self._models = models
        self.sampler = sampler
        """Samples, on the thread of the crew; None if the ranks cannot."""
        self._changed = threading.Condition()
        self._incoming: deque[OpenRequest] = deque()
        self._open: dict[Future[Any], OpenRequest] = {}
        self._ended: LoopEnded | None = None
        self._queues: dict[str, deque[OpenRequest]] = {}
        self._ordered: deque[_Ordered] = deque()
        self._done_samples: deque[str | None] = deque()
        """The snapshots of samples that are done, or that the client has cancelled."""
        self._last_command = time.monotonic()
        self._seconds_of_training = 0.0
        self._has_failed = False
        """True once an error has ended the service: other ranks may not listen."""

    # On any thread.

    def submit(self, request: Request) -> Future[Any]:
        """Take in a request; see ``requests.Service``."""
        future: Future[Any] = Future()
        try:
            self._checker.check(request)
        except UserError as error:
            future.set_exception(error)
            return future
        job = OpenRequest(request, future)
        if isinstance(request, ForwardBackward):
            job = OpenLoss(request, future, self._plan)
        with self._changed:
            if self._ended is not None:
                job.fail(self._ended)
                return future
            self._open[future] = job
            self._incoming.append(job)
            self._changed.notify_all()
        future.add_done_callback(self._forget)
        return future

    def states(self) -> Sequence[SavedState]:
        """Return all saved states, the oldest first."""
        return self._models.states()

    def export(self, state: str) -> bytes:
        """Return a tar archive of a saved state's adapter; see ``requests.Service``."""
        return self._models.export(state)

    def close(self, reason: str) -> None:
        """End the service: what is not done yet fails with ``LoopEnded``."""
        with self._changed:
            if self._ended is None:
                self._ended = LoopEnded(reason)
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """End the service at once, whatever the ranks are doing: what is not done yet has failed
        with ``LoopEnded``."""
        self.close(reason)
        with self._changed:
            still_open = [*self._open.values()]
            ended = self._ended
        assert ended is not None, "it was closed"
        for job in still_open:
            job.fail(ended)

    def wake(self) -> None:
        """Let ``run`` look again, if it waits for requests."""
        with self._changed:
            self._changed.notify_all()

    def _forget(self, future: Future[Any]) -> None:
        with self._changed:
            self._open.pop(future, None)

    # On the thread of the crew.

    def run(self, look: Callable[[], None] = lambda: None) -> None:
        """Carry out requests until ``close``; ``look`` is called between two turns. If the ranks
        fail, their error is raised, and all requests have failed."""
        try:
            while self._ended is None:
                look()
                self._turn_or_wait()
        except BaseException as error:
            self._has_failed = True
            self.close(one_line(error))
            raise
        finally:
            self._fail_all()

    def finish(self, future: Future[Any]) -> Any:
        """Carry out requests until one is done; return its result, or raise its error."""
        try:
            while not future.done():
                self._turn_or_wait()
        except BaseException as error:
            self._has_failed = True
            self.close(one_line(error))
            self._fail_all()
            raise
        return future.result()

    def end(self) -> None:
        """Let the ranks go, and others have the directory of the saved states. Requests that are
        not done fail with ``LoopEnded``."""
        self.close("the service has ended")
        self._fail_all()
        self._models.close()
        if self.sampler is not None and not self._has_failed:
            self.sampler.pause()

    def _turn_or_wait(self) -> None:
        """Carry out what stands first in all queues, and some steps of the samples; or wait a
        little for the next request."""
        self._take_in()
        started = time.monotonic()
        if self._queues:
            self._pause()
            self._train()
            self._seconds_of_training = time.monotonic() - started
        elif self.sampler is None or self.sampler.is_idle:
            self._wait()
        self._sample()

    def _wait(self) -> None:
        with self._changed:
            if not self._incoming and self._ended is None:
                self._changed.wait(SECONDS_BETWEEN_LOOKS)
        if time.monotonic() - self._last_command > SECONDS_OF_SILENCE:
            self._pause()
            self._crew.all(LoopWorker.keep_alive)

    def _take_in(self) -> None:
        """Put new requests into their queues, and begin new samples."""
        with self._changed:
            jobs = [*self._incoming]
            self._incoming.clear()
        for job in jobs:
            if isinstance(job.request, SamplePrompt):
                with job.answering():
                    self._begin_sample(job, job.request)
            else:
                self._queues.setdefault(job.queue, deque()).append(job)

    def _pause(self) -> None:
        """Let all ranks listen to the crew."""
        if self.sampler is not None:
            self.sampler.pause()
        self._last_command = time.monotonic()

    # Training.

    def _train(self) -> None:
        """Give the ranks the next commands, and take in their results."""
        self._order_steps()
        for name in [*self._queues]:
            queue = self._queues[name]
            while queue and not isinstance(queue[0], OpenLoss):
                job = queue.popleft()
                if not job.future.cancelled():
                    with job.answering():
                        self._carry_out(job)
            if not queue:
                del self._queues[name]
        self._settle()

    def _order_steps(self) -> None:
        """Begin the micro-batches that stand first in all queues, about equally many of each."""
        waiting = [queue for queue in self._queues.values() if isinstance(queue[0], OpenLoss)]
        mesh = self._plan.plan.mesh
        is_sampling = self.sampler is not None and not self.sampler.is_idle
        most = TOGETHER_WHILE_SAMPLING * mesh.pp if is_sampling else MOST_TOGETHER
        room = max(1, mesh.dp * most // max(1, len(waiting)))
        taken = [each for queue in waiting for each in self._take_from(queue, room)]
        if not taken:
            return
        args = [
            ([job.order(numbers, replica) for job, numbers in taken],) for replica in range(mesh.dp)
        ]
        of_ranks = [args[mesh.coordinates(rank)[0]] for rank in range(mesh.size)]
        pending = self._crew.begin_each(LoopWorker.step, of_ranks)
        self._ordered.append(_Ordered(pending, lambda values: self._take_results(taken, values)))

    def _take_from(self, queue: deque[OpenRequest], room: int) -> list[tuple[OpenLoss, range]]:
        """Take at most ``room`` micro-batches from the losses that stand first in a queue."""
        taken: list[tuple[OpenLoss, range]] = []
        while room > 0 and queue and isinstance(job := queue[0], OpenLoss):
            if not job.is_begun:
                with job.answering():
                    self._models.check(job.loss.model)
            if job.future.done() and not job.is_begun:  # it was cancelled, or has failed
                queue.popleft()
                continue
            if not job.loss.forward_only:
                self._models.has_gradients(job.loss.model)
            numbers = job.take(room)
            taken.append((job, numbers))
            room -= len(numbers)
            if job.is_ordered:
                queue.popleft()
        return taken

    def _take_results(
        self, taken: Sequence[tuple[OpenLoss, range]], values: Sequence[Sequence[Results]]
    ) -> None:
        """Take in what the ranks have computed of some micro-batches of each job."""
        for place, (job, numbers) in enumerate(taken):
            for rank, of_rank in enumerate(values):
                replica, _ = self._plan.plan.mesh.coordinates(rank)
                for j, logps in sorted(of_rank[place].items()):
                    job.add(numbers, replica, j, logps)
            if job.has_come:
                with job.answering():
                    job.succeed(job.result())

    def _carry_out(self, job: OpenRequest) -> None:
        """Carry out a request that is not a loss. Raises ``UserError``."""
        if isinstance(job.request, OptimStep):
            pending = self._models.begin_update(job.request.model, job.request)
            self._ordered.append(_Ordered(pending, lambda norms: _answer_update(job, norms)))
            return
        self._settle()
        job.succeed(self._answer(job.request))

    def _answer(self, request: Request) -> object:
        """Return the result of a request for which all ranks answer. Raises ``UserError``."""
        models = self._models
        result: object = None
        match request:
            case CreateModel():
                result = models.create(request)
            case UnloadModel():
                models.unload(request.model)
            case SaveState():
                result = models.save(request)
            case LoadState():
                models.load(request)
            case DeleteState():
                models.delete(request.state)
            case TakeSnapshot():
                models.take_snapshot(request)
            case DropSnapshot():
                models.drop_snapshot(request.snapshot)
            case _:
                raise TypeError(f"{type(request).__name__} is carried out otherwise")
        return result

    def _settle(self) -> None:
        """Take in the results of all commands that were begun."""
        while self._ordered:
            ordered = self._ordered.popleft()
            ordered.take(ordered.pending.values())

    # Samples.

    def _begin_sample(self, job: OpenRequest, request: SamplePrompt) -> None:
        if self.sampler is None:
            raise no_prompts_come_in(self._plan.plan.stage_map)
        number = self._models.begin_sample(request.snapshot)
        try:
            self.sampler.add(request, number, job.future)
        except UserError:
            self._models.end_sample(request.snapshot)
            raise
        job.future.add_done_callback(lambda _: self._done_samples.append(request.snapshot))

    def _sample(self) -> None:
        """Compute steps of samples: as long as training took, if a request for it waits."""
        sampler = self.sampler
        if sampler is None:
            return
        started = time.monotonic()
        while not sampler.is_idle and self._ended is None:
            # Before the step, in which it drops those that were cancelled.
            done = [self._done_samples.popleft() for _ in range(len(self._done_samples))]
            sampler.step()
            for snapshot in done:
                self._models.end_sample(snapshot)
            self._take_in()
            seconds = time.monotonic() - started
            has_had_its_turn = self._queues and seconds >= self._seconds_of_training
            if has_had_its_turn or (not self._queues and seconds > SECONDS_BETWEEN_LOOKS):
                break
        if sampler.is_idle:
            while self._done_samples:
                self._models.end_sample(self._done_samples.popleft())
        if leaving := self._models.leaving_snapshots():
            self._pause()
            for number in leaving:
                sampler.forget(number)
            self._models.forget_snapshots()

    def _fail_all(self) -> None:
        """Fail all requests that are not done: the service has ended."""
        with self._changed:
            self._ended = self._ended or LoopEnded("the service has ended")
            still_open = [*self._open.values()]
            self._incoming.clear()
        for job in still_open:
            job.fail(self._ended)
        self._queues.clear()
        self._ordered.clear()


def _answer_update(job: OpenRequest, norms: Sequence[float]) -> None:
    norm = norms[0]
    with job.answering():
        if not math.isfinite(norm):
            raise UserError(
                f"the norm of the gradients is {norm}: nothing was updated, and they are forgotten",
                "lower the learning rate, or go back to a saved state",
            )
        job.succeed({"grad_norm:mean": norm})
