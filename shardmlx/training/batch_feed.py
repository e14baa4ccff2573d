"""Send batches from rank 0 to all ranks, one step ahead.

Each rank gets the tokens of its replica's rows. Before each step, as late as possible, rank 0 also
says whether a signal asks the run to stop. Each rank gets, with one tag::

    outline tokens [known] ... stop | outline tokens [known] ... stop | ...

Batches sent ahead are received before the word to stop: a run that stops leaves no message under
way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType

import numpy as np

from shardmlx.distributed.agreement import AgreedError
from shardmlx.distributed.messages import BATCH_TAG, Array, Handle, tag_of_run
from shardmlx.distributed.transport import Transport
from shardmlx.engine.batches import KNOWN, Batch, MicroBatch, pack, split
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


class BatchFeed:
    """The next ``count`` of rank 0's ``batches``, for all ranks; the feeds of ``run``s may take
    turns. If it ``shares_prompts``, batches are packed with the prompt of a pair once, in half as
    many micro-batches. Methods are collective. With an error that all ranks raise together, the
    context receives all messages under way."""

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        batches: Iterator[Batch] | None,
        count: int,
        run: int = 0,
        *,
        shares_prompts: bool = False,
    ) -> None:
        self._plan = plan
        self._transport = transport
        self._batches = batches
        self._left = count
        self._shares_prompts = shares_prompts
        self._tag = tag_of_run(BATCH_TAG, run)
        self._ahead = 0
        self._replica, _ = plan.mesh.coordinates(transport.rank)
        self._own: list[Share] = []
        self._sent: list[tuple[Handle, int]] = []

    def send_ahead(self, count: int = 1) -> None:
        """Send so many batches from rank 0, as long as there are any; returns at once."""
        count = min(count, self._left)
        self._left -= count
        self._ahead += count
        if self._batches is not None:
            for _ in range(count):
                self._send(next(self._batches))

    def take(self, count: int = 1) -> list[Share]:
        """Return the shares sent ahead, else the next ``count``, or fewer; or ``StopRequested``."""
        if not self._ahead:
            self.send_ahead(count)
        if not self._ahead:
            return []
        if self._batches is not None:
            number = np.array([self._transport.stop_requested() or 0], np.int32)
            for peer in range(1, self._transport.size):
                self._post(number, peer)
            shares = self._receive()
        else:
            shares = self._receive()
            number = self._come(np.empty(1, np.int32))
        if number[0]:
            raise StopRequested(int(number[0]))
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
        for replica, (start, stop) in enumerate(pairwise(self._plan.starts)):
            wholes = [batch] if batch.swapped is None else [batch, batch.swapped]
            parts = [each.rows(start, stop) for each in wholes]
            if replica == self._replica:
                self._own.append(self._share(parts, batch.valid_tokens))
            messages = []
            for left, part in zip(reversed(range(len(parts))), parts, strict=True):
                known = [] if part.known is None else [part.known]
                head = (batch.valid_tokens, left, part.tokens.shape[1], len(known))
                messages += [np.array([*head, *part.spans.flat], np.int64), part.tokens, *known]
            for peer in self._plan.mesh.pipeline_of(replica):
                if peer != self._transport.rank:
                    for message in messages:
                        self._post(np.ascontiguousarray(message), peer)

    def _receive(self) -> list[Share]:
        """Receive all messages under way, and return their shares."""
        count, self._ahead = self._ahead, 0
        if self._batches is None:
            return [self._receive_share() for _ in range(count)]
        sent, self._sent = self._sent, []
        for handle, peer in sent:
            self._transport.wait(handle, self._doing("sending to", peer))
        own, self._own = self._own, []
        return own

    def _receive_share(self) -> Share:
        rows, parts, left = self._plan.shares[self._replica], [], 1
        while left:
            outline = self._come(np.empty(4 + 2 * rows, np.int64))
            valid_tokens, left, width, is_known = outline[:4].tolist()
            spans = outline[4:].reshape(rows, 2).astype(np.int32)
            tokens = self._come(np.empty((rows, width), np.int32))
            known = self._come(np.empty((rows, KNOWN))) if is_known else None
            first_row = self._plan.starts[self._replica]
            widths = self._plan.widths
            parts.append(MicroBatch(tokens, spans, first_row, widths=widths, known=known))
        return self._share(parts, valid_tokens)

    def _share(self, parts: Sequence[MicroBatch], valid_tokens: int) -> Share:
        plan, first = self._plan, parts[0]
        microbatches, *swapped = map(self._divide, parts)
        count = valid_tokens if first.known is None else sum(plan.shares) // plan.together
        return Share(microbatches, valid_tokens, count, *swapped)

    def _divide(self, part: MicroBatch) -> list[MicroBatch]:
        plan = self._plan
        if plan.pack or self._shares_prompts:
            count, shares = plan.microbatches_of(self._replica), self._shares_prompts
            count = -(-count // 2) if shares else count
            return pack(part, count, plan.together, shares_prompts=shares)
        return split(part, 1, 0, plan.micro_batch_size)

    def _post(self, array: Array, peer: int) -> None:
        self._sent.append((self._transport.send(array, peer, self._tag), peer))

    def _come(self, array: np.ndarray) -> np.ndarray:
        handle = self._transport.receive(array, 0, self._tag)
        self._transport.wait(handle, self._doing("waiting for", 0))
        return array

    def _doing(self, how: str, peer: int) -> Callable[[], str]:
        me, other = (self._transport.name(rank) for rank in (self._transport.rank, peer))
        return lambda: f"{me}, next batch, {how} {other}"
