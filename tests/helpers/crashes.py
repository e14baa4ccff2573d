"""Deaths of a process between two calls that change the disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class Crash(BaseException):
    """The process is no more."""


_CALLS = ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir")


@contextmanager
def calls(at: int | None = None) -> Iterator[list[str]]:
    """The calls that change the disk, in order; with ``at``, the process dies before that one.

    What is not on the disk then is lost: a file that would have been flushed is empty.
    """
    made: list[str] = []

    def spy(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            target = args[0]
            if name == "fsync":
                target = os.readlink(f"/proc/self/fd/{target}")
            if len(made) == at:
                if name == "fsync" and os.path.isfile(target):
                    os.truncate(target, 0)
                raise Crash
            made.append(f"{name} {os.path.basename(target)}")
            return real(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in _CALLS:
            patch.setattr(os, name, spy(name, getattr(os, name)))
        yield made
