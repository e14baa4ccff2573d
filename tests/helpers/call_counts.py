"""Counts of the calls that a function makes: how its cost grows, on any machine under any load."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls_by_name(work: Callable[[], Any]) -> Counter[str]:
    """Return how often functions of each name are called in ``work``, those of C among them."""
    counts: Counter[str] = Counter()

    def observe(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            counts[frame.f_code.co_name] += 1
        elif event == "c_call":
            counts[argument.__name__] += 1

    before = sys.getprofile()
    sys.setprofile(observe)
    try:
        work()
    finally:
        sys.setprofile(before)
    return counts


def calls_in(work: Callable[[], Any]) -> int:
    """Return how many functions are called in ``work``, those of C among them."""
    return calls_by_name(work).total()
