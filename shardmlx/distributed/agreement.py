"""Steps that all ranks take together, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError

T = TypeVar("T")


class AgreedError(UserError):
    """A ``UserError`` that all ranks raise at the same place, so that all can leave in order."""


def on_all_ranks(transport: Transport, what: str, work: Callable[[], T]) -> T:
    """Do ``work()`` on every rank; raise ``AgreedError`` on all if one raises ``UserError``.

    All ranks must call it, and then leave in order. Rank 0 has the message, which names the first
    rank that found the fault, unless that is rank 0.
    """
    fault: tuple[str, str] | None = None
    result: T | None = None
    try:
        result = work()
    except UserError as error:
        fault = (error.problem, error.remedy)
    faults = transport.all_gather(fault, what)
    found = [(rank, *fault) for rank, fault in enumerate(faults) if fault is not None]
    if not found:
        return result  # type: ignore[return-value]  # work() returned it
    rank, problem, remedy = found[0]
    raise AgreedError(problem if rank == 0 else f"{transport.name(rank)}: {problem}", remedy)
