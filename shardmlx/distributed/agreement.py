"""Steps that all ranks take together, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError

T = TypeVar("T")


class AgreedError(UserError):
    """A ``UserError`` that all ranks raise at the same place, so that all can leave in order."""


def together(transport: Transport, what: str, work: Callable[[], T]) -> T:
    """``work()`` on every rank; a ``UserError`` on one becomes an ``AgreedError`` on all.

    So that all ranks leave in order, and rank 0 has the message, which names the rank that found
    the fault unless all did.
    """
    problem: str | None = None
    result: T | None = None
    try:
        result = work()
    except UserError as error:
        problem = str(error)
    problems = transport.all_gather(problem, what)
    found = [(rank, text) for rank, text in enumerate(problems) if text is not None]
    if not found:
        return result  # type: ignore[return-value]  # work() returned it
    rank, text = found[0]
    raise AgreedError(text if rank == 0 else f"{transport.name(rank)}: {text}")


def by_rank_0(transport: Transport, what: str, work: Callable[[], T]) -> T | None:
    """``work()`` on rank 0 alone, which returns its result; None elsewhere. Errors reach all."""
    return together(transport, what, lambda: work() if transport.rank == 0 else None)
