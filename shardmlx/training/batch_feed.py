"""Send batches from rank 0 to all ranks, one step ahead.

Each rank gets its replica's rows. Before each step, as late as possible, rank 0 also says whether a
signal asks the run to stop. Batches sent ahead are received before this word: a run that stops
leaves no message under way.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any

from shardmlx.distributed.agreement import AgreedError
from shardmlx.distributed.messages import BATCH_TAG, tag_of_run
from shardmlx.distributed.transport import Outbox, Transport
from shardmlx.engine.batches import Batch, MicroBatch, pack, split
from shardmlx.errors import AgreedFailure
from shardmlx.pipeline.plan import Plan


class StopRequested(Exception):
    """A signal asks the run to stop; raised on all ranks at the same place."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """A replica's part of a global batch; ``valid_tokens`` count in the loss of the whole, which is
    a mean of ``count`` tokens, or pairs. ``swapped`` are KTO's prompts with others' answers."""

    microbatches: list[MicroBatch]
    valid_tokens: int
    count: int
    swapped: list[MicroBatch] = field(default_factory=list)


@dataclass(slots=True)
class BatchFeed:
    """The next ``left`` of rank 0's ``batches``, for all ranks; the feeds of ``run``s may take
    turns. If it ``shares_prompts``, batches are packed with the prompt of a pair once, in half as
    many micro-batches. Methods are collective. With an error that all ranks raise together, the
    context receives all messages under way."""

    plan: Plan
    transport: Transport
    batches: Iterator[Batch] | None
    left: int
    run: int = 0
    shares_prompts: bool = False
    _ahead: int = 0
    _own: list[Share] = field(default_factory=list)
    _outbox: Outbox = field(init=False)

    def __post_init__(self) -> None:
        self._outbox = Outbox(self.transport)

    def send_ahead(self, count: int = 1) -> None:
        """Send so many batches from rank 0, as long as there are any; returns at once."""
        count = min(count, self.left)
        self.left -= count
        self._ahead += count
        if self.batches is not None:
            for _ in range(count):
                self._send(next(self.batches))

    def take(self, count: int = 1) -> list[Share]:
        """Return the shares sent ahead, else the next ``count``, or fewer; or ``StopRequested``."""
        if not self._ahead:
            self.send_ahead(count)
        if not self._ahead:
            return []
        if self.batches is not None:
            number = self.transport.stop_requested()
            self._post(number, range(1, self.transport.size))
            shares = self._receive()
        else:
            shares = self._receive()
            number = self._come()
        if number is not None:
            raise StopRequested(number)
        return shares

    def __enter__(self) -> BatchFeed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After any other error the ranks do not meet again, and the job ends at once.
        if isinstance(error, (AgreedError, AgreedFailure, StopRequested)):
            self._receive()

    def _send(self, batch: Batch) -> None:
        wholes = [batch] if batch.swapped is None else [batch, batch.swapped]
        for replica, bounds in enumerate(pairwise(self.plan.starts)):
            parts = [each.rows(*bounds) for each in wholes]
            peers = self.plan.mesh.pipeline_of(replica)
            if self.transport.rank in peers:
                self._own.append(self._share(parts, batch.valid_tokens))
            others = [peer for peer in peers if peer != self.transport.rank]
            self._post((parts, batch.valid_tokens), others)

    def _receive(self) -> list[Share]:
        """Receive all messages under way, and return their shares."""
        count, self._ahead = self._ahead, 0
        if self.batches is None:
            return [self._share(*self._come()) for _ in range(count)]
        self._outbox.drain(0)
        own, self._own = self._own, []
        return own

    def _share(self, parts: Sequence[MicroBatch], valid_tokens: int) -> Share:
        plan, first = self.plan, parts[0]
        microbatches, *swapped = map(self._divide, parts)
        count = valid_tokens if first.known is None else sum(plan.shares) // plan.together
        return Share(microbatches, valid_tokens, count, *swapped)

    def _divide(self, part: MicroBatch) -> list[MicroBatch]:
        plan = self.plan
        if plan.pack or self.shares_prompts:
            replica, _ = plan.mesh.coordinates(self.transport.rank)
            count, shares = plan.microbatches_of(replica), self.shares_prompts
            count = -(-count // 2) if shares else count
            return pack(part, count, plan.together, shares_prompts=shares)
        return split(part, 1, 0, plan.micro_batch_size)

    def _post(self, value: Any, peers: Iterable[int]) -> None:
        payload = pickle.dumps(value)
        for peer in peers:
            self._outbox.send_object(payload, peer, tag_of_run(BATCH_TAG, self.run), "next batch")

    def _come(self) -> Any:
        return self.transport.receive_object(0, "next batch", tag_of_run(BATCH_TAG, self.run))
