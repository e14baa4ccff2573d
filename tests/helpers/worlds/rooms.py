"""The rooms whose worlds are played: each is a function of a simulation, which draws everything."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.worlds.simulation import MOST_SHOWN, Simulation

Play = Callable[[Simulation], object]
"""Builds a world, lets it run, and raises ``AssertionError`` if an invariant does not hold."""


@dataclass(frozen=True)
class Room:
    """A part of the product that is played in worlds; ``play`` says what must hold."""

    name: str
    play: Play

    @property
    def invariants(self) -> str:
        """Return in words what holds in each world: the docstring of ``play``."""
        return self.play.__doc__ or ""

    def world(self, seed: int, shown: int | None = MOST_SHOWN) -> Simulation:
        """Play the world of a seed. An error has the last things that happened as a note, and the
        command that plays it again."""
        simulation = Simulation(f"{self.name} {seed}")
        try:
            self.play(simulation)
        except BaseException as error:
            command = f"python -m tests.helpers.worlds --room {self.name} --first {seed} --count 1"
            error.add_note(f"{simulation.shown(shown)}\n{command}")
            raise
        return simulation

    def worlds(self, count: int, first: int = 0) -> None:
        """Play so many worlds, and stop at the first in which an invariant does not hold."""
        with on_one_core():
            for seed in range(first, first + count):
                self.world(seed)


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """Keep all threads of this process on one core, where the operating system lets them.

    Of the threads of a world one goes on at a time. A turn that moves to another core costs as much
    as what is done in it.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    _move_threads({cores[os.getpid() % len(cores)]})  # other workers of the tests have other cores
    try:
        yield
    finally:
        _move_threads({*cores})


def _move_threads(cores: set[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)


@dataclass
class Tally:
    """What came of many worlds of a room."""

    worlds: int = 0
    things: int = 0
    seconds: float = 0.0
    failures: int = 0


def tally(room: Room, first: int, count: int, report: Callable[[int, Exception], None]) -> Tally:
    """Play worlds, go on after each that fails, and ``report`` it with its seed."""
    found = Tally()
    start = time.process_time()
    with on_one_core():
        for seed in range(first, first + count):
            found.worlds += 1
            try:
                found.things += len(room.world(seed).trace)
            except Exception as error:
                found.failures += 1
                report(seed, error)
    found.seconds = time.process_time() - start
    return found
