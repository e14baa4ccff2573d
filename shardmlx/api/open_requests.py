"""Requests under way, on rank 0: what has been ordered of each, and what has come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from shardmlx.api.cuts import CutRows, cut, of_replicas
from shardmlx.api.plan import LoopPlan
from shardmlx.api.requests import CreateModel, ForwardBackward, LossResult, Request
from shardmlx.api.worker import LossOrder
from shardmlx.engine.token_losses import LOSSES
from shardmlx.errors import UserError

NO_MODEL = ""
"""Name of the queue of requests that are of no model."""


class OpenRequest:
    """A request and its future, which a client may have cancelled."""

    def __init__(self, request: Request, future: Future[Any]) -> None:
        self.request = request
        self.future = future

    @property
    def queue(self) -> str:
        """The name of the queue that it waits in, which is its model's."""
        if isinstance(self.request, CreateModel):
            return self.request.name
        return getattr(self.request, "model", None) or NO_MODEL

    @property
    def is_begun(self) -> bool:
        """True if ranks compute a part of it already."""
        return False

    def succeed(self, result: object) -> None:
        """Answer it, unless it was cancelled."""
        with suppress(InvalidStateError):
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        """Let it fail, unless it was cancelled."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Make a ``UserError`` of the block the answer."""
        try:
            yield
        except UserError as error:
            self.fail(error)


class OpenLoss(OpenRequest):
    """A loss under way, cut into micro-batches, each on one of the replicas. Where a micro-batch is
    computed depends on the request's rows alone, and so do the bits of the gradients."""

    def __init__(self, request: ForwardBackward, future: Future[Any], plan: LoopPlan) -> None:
        super().__init__(request, future)
        self.loss = request
        self._pieces = cut(request, plan)
        self._replicas = _replica_of_each(self._pieces, plan.plan.mesh.dp)
        self._next = 0
        self._came = 0
        self._sum = 0.0
        self._logps: dict[int, np.ndarray] = {}

    @property
    def is_begun(self) -> bool:
        """True if a micro-batch was ordered."""
        return self._next > 0

    @property
    def is_ordered(self) -> bool:
        """True if all micro-batches were ordered."""
        return self._next == len(self._pieces)

    @property
    def has_come(self) -> bool:
        """True if the results of all micro-batches have come."""
        return self._came == len(self._pieces)

    def take(self, room: int) -> range:
        """Take the next micro-batches to order, at most ``room``; return their numbers."""
        numbers = range(self._next, min(self._next + room, len(self._pieces)))
        self._next = numbers.stop
        return numbers

    def order(self, numbers: Sequence[int], replica: int) -> LossOrder:
        """Return the part of a replica in some micro-batches."""
        mine = [self._pieces[i].microbatch for i in self._of_replica(numbers, replica)]
        return LossOrder(self.loss.model, mine, self.loss.forward_only)

    def add(self, numbers: Sequence[int], replica: int, place: int, logps: np.ndarray) -> None:
        """Take in the log-probabilities that a replica has found for the micro-batch at a place
        among its own of some."""
        piece = self._pieces[self._of_replica(numbers, replica)[place]]
        terms = piece.microbatch.terms
        assert terms is not None, "its loss is one of tokens"
        self._sum += terms.loss.value(logps, terms)
        self._logps.update(zip(piece.rows, piece.divided(logps), strict=True))
        self._came += 1

    def result(self) -> LossResult:
        """Return the result of all rows. Raises ``UserError`` if a number is not finite."""
        rows = [self._logps[i] for i in range(len(self.loss.rows))]
        for number, row in enumerate(rows):
            if not np.isfinite(row).all():
                raise UserError(
                    f"row {number}: its log-probabilities are not finite numbers",
                    "lower the learning rate, or go back to a saved state",
                )
        return LossResult(rows, {"loss:sum": self._sum, **self._differences(rows)})

    def _of_replica(self, numbers: Sequence[int], replica: int) -> list[int]:
        return [i for i in numbers if self._replicas[i] == replica]

    def _differences(self, rows: Sequence[np.ndarray]) -> dict[str, float]:
        """Return how far the log-probabilities of sampled tokens are from those that the client
        gave, where its loss takes some."""
        if "logprobs" not in LOSSES[self.loss.loss].inputs:
            return {}
        differences = [
            np.abs(logps - row.inputs["logprobs"])[row.inputs["advantages"] != 0]
            for logps, row in zip(rows, self.loss.rows, strict=True)
        ]
        counted = np.concatenate(differences)
        return {"logprob_difference:mean": float(counted.mean())} if counted.size else {}


def _replica_of_each(pieces: Sequence[CutRows], replicas: int) -> list[int]:
    """Return the replica of each micro-batch."""
    of_pieces = {
        number: replica
        for replica, numbers in enumerate(of_replicas(pieces, replicas))
        for number in numbers
    }
    return [of_pieces[number] for number in range(len(pieces))]
