"""Sums over ranks of which each host has several: on the host first, then between the hosts.

A link between hosts carries each number once in each direction, and not once for each rank::

    host A, ranks 0 and 1        host B, ranks 2 and 3
    0: the first half of a0 + a1   2: the first half of a2 + a3    within a host
    0 and 2: the first half of the sum, 1 and 3: the second        between hosts
    0 and 1: both halves           2 and 3: both halves            within a host

The bits are equal on all ranks, but not those of a sum in one level: hosts are added up before.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx
import numpy as np

from shardmlx.distributed.exchanges import Exchange
from shardmlx.distributed.messages import buffer_of
from shardmlx.distributed.sums import FLOAT32, SLICE, Sums, equal_parts

Levels = tuple[tuple[int, ...], tuple[int, ...]]
"""The ranks of a rank's host, and those of its place on all hosts."""


def levels_of(rank: int, group: Sequence[int], hosts: Sequence[str]) -> Levels | None:
    """Return the levels of a sum over ``group`` on ``hosts[rank]``; None where one level is as
    good: on one host, on one rank a host, or if hosts have unequally many."""
    of_hosts: dict[str, list[int]] = {}
    for member in group:
        of_hosts.setdefault(hosts[member], []).append(member)
    sizes = {len(each) for each in of_hosts.values()}
    if len(of_hosts) < 2 or len(sizes) > 1 or sizes == {1}:
        return None
    own = of_hosts[hosts[rank]]
    return tuple(own), tuple(each[own.index(rank)] for each in of_hosts.values())


class HostSums:
    """The sums in two levels of one rank, in float32. All ranks start the same ones in the same
    order, and no other exchange until they have ended: each is ended before the next begins."""

    def __init__(self, sums: Sums, rank: int, levels: Levels) -> None:
        self._sums = sums
        self._within, self._across = levels
        self._place = self._within.index(rank)
        self._lock = threading.Lock()
        self._queue: deque[Sequence[Exchange]] = deque()
        self._runs = False

    def all_reduce(self, array: mx.array) -> Exchange:
        """Start summing an evaluated float32 ``array`` (N,) in place; return what ends last, for
        ``Sums.wait``."""
        whole = np.frombuffer(buffer_of(array), np.float32)
        parts = [whole[a:b] for a, b in pairwise(equal_parts(whole.size, len(self._within)))]
        own = parts[self._place]
        pieces = [own[a:b] for a, b in pairwise(equal_parts(own.size, len(self._across)))]
        data = [[part.view(np.uint8)] for part in parts]
        steps = (
            Exchange(self._within, [[part] for part in parts], (), True, False, FLOAT32),
            Exchange(self._across, [[piece] for piece in pieces], (), True, True, FLOAT32),
            Exchange(self._within, data, (), False, True, FLOAT32),
        )
        with self._lock:
            self._queue.append(steps)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="sums by host", daemon=True).start()
        return steps[-1]

    def _run(self) -> None:
        """Take the sums through their levels, one after the other, until none is left."""
        while True:
            with self._lock:
                if not self._queue:
                    self._runs = False
                    return
                steps = self._queue.popleft()
            for step in steps:
                self._sums.start(step)
                while not step.done.wait(SLICE):
                    if self._sums.has_failed:
                        return  # the main thread's wait says why
