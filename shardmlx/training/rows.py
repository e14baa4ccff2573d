"""The rows of a batch: whole on rank 0, of a replica on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from shardmlx.engine.batches import Batch, MicroBatch, pack, split
from shardmlx.pipeline.plan import Plan


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A replica's rows of a global batch, as they are sent: ``parts`` are the rows, and KTO's
    prompts with others' answers if there are some. ``valid_tokens`` count in the loss of the whole
    batch."""

    parts: Sequence[MicroBatch]
    valid_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """A replica's part of a global batch; ``valid_tokens`` count in the loss of the whole, which is
    a mean of ``count`` tokens, or pairs. ``swapped`` are KTO's prompts with others' answers."""

    microbatches: list[MicroBatch]
    valid_tokens: int
    count: int
    swapped: list[MicroBatch] = field(default_factory=list)


def rows_of_ranks(plan: Plan, batch: Batch) -> list[Rows]:
    """Return the rows of each rank's replica; those of ranks of one replica are one object."""
    wholes = [batch] if batch.swapped is None else [batch, batch.swapped]
    of_replicas = [
        Rows([each.rows(*bounds) for each in wholes], batch.valid_tokens)
        for bounds in pairwise(plan.starts)
    ]
    return [of_replicas[plan.mesh.coordinates(rank)[0]] for rank in range(plan.mesh.size)]


def share_of(plan: Plan, rank: int, rows: Rows, *, shares_prompts: bool = False) -> Share:
    """Return the micro-batches of a rank's rows. If it ``shares_prompts``, they are packed with the
    prompt of a pair once, in half as many micro-batches."""
    microbatches, *swapped = (_divided(plan, rank, part, shares_prompts) for part in rows.parts)
    count = rows.valid_tokens
    if rows.parts[0].known is not None:
        count = sum(plan.shares) // plan.together
    return Share(microbatches, rows.valid_tokens, count, *swapped)


def _divided(plan: Plan, rank: int, part: MicroBatch, shares_prompts: bool) -> list[MicroBatch]:
    if not (plan.pack or shares_prompts):
        return split(part, 1, 0, plan.micro_batch_rows)
    count = plan.microbatches_of(plan.mesh.coordinates(rank)[0])
    count = -(-count // 2) if shares_prompts else count
    return pack(part, count, plan.together, shares_prompts=shares_prompts)
