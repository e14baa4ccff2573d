"""Counts of the calls that a function makes: how its cost grows, on any machine under any load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def calls_in(work: Callable[[], Any]) -> int:
    """Return how many functions are called in ``work``, those of C among them."""
    count = 0

    def observe(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(observe)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
