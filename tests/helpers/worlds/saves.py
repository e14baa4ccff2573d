"""A run that saves checkpoints, resumes and dies, on disks that fail at any call.

The real writer, store, search and reader work in real directories. Each life of a run draws where
its disk fails; a second run tries to write to the same directory now and then.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest

from shardmlx.checkpoint.export import SaveError
from shardmlx.checkpoint.resume import Resumption, RunStart
from shardmlx.checkpoint.storage import Storage
from shardmlx.checkpoint.store import Manifest, Store, name_of
from shardmlx.checkpoint.writer import CheckpointWriter, Snapshot
from shardmlx.config.train import CheckpointOptions
from shardmlx.distributed.crew import Crew, lead, together
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError
from tests.helpers.checkpoints import OwnDisk, begun, content, load
from tests.helpers.local_transport import LocalNetwork, LocalTransport
from tests.helpers.worlds.disk import Crash, FailingDisk, Faults
from tests.helpers.worlds.rooms import Room
from tests.helpers.worlds.simulation import Simulation

MOST_CALLS = 50
"""Calls of a life that change the disk, at most, of which one may fail."""

STORAGES = (*[("shared", "a")] * 6, ("rank0", "ab"), ("neighbour", "ab"))
"""A kind of storage, and the disk that each rank sees."""


@cache
def part(rank: int, course: int) -> tuple[Snapshot, ...]:
    """Return what a rank saves, which tells the ``course`` of the weights."""
    weights = mx.array([course, rank], mx.int32)
    step = mx.array([course], mx.int32)
    return (
        Snapshot.of(f"weights-{rank:02d}.safetensors", {f"layers.{rank}": weights}),
        Snapshot.of(f"optimizer-{rank:02d}.safetensors", {f"layers.{rank}.m": step}),
    )


@cache
def written(ranks: int, course: int) -> dict[str, bytes]:
    """Return the files of a whole checkpoint of all ranks."""
    return {
        each.name: b"".join(each.pieces()) for rank in range(ranks) for each in part(rank, course)
    }


class Saver(OwnDisk):
    """The part of a rank in a run that does nothing but save."""

    def __init__(self, transport: Transport, paths: dict[Path, Path], disk: FailingDisk) -> None:
        super().__init__(transport, paths)
        self._own = transport
        self._disk = disk

    @together
    def prepare(self, directory: Path, storage: Storage, keep: int) -> None:
        """Make the writer."""
        self._writer = CheckpointWriter(self._own, self.store(directory), storage, keep)

    @together
    def save(self, step: int, course: int) -> bool:
        """Save a checkpoint; return whether it is complete, which rank 0 knows."""
        manifest = None
        if self._own.rank == 0:
            manifest = Manifest(step, (), identity={}, state={}, plan={}, versions={})
        self._writer.start(manifest, step, part(self._own.rank, course))
        self._writer.wait()
        if self._disk.has_crashed:
            raise Crash  # the thread that writes is gone, and so is the process
        return self._writer.take_saved() is not None


@dataclass
class Run:
    """A run, life after life, and what a user knows of its checkpoints."""

    simulation: Simulation
    base: Path
    kind: str
    seen: str
    keep: int
    courses: int = 0
    """Checkpoints that were begun: each of another state of the weights."""
    newest: tuple[int, int] | None = None
    """Step and course of the newest checkpoint that was acknowledged, and is not set aside."""
    begun: tuple[int, int] | None = None
    """Those of the one that was begun after it."""
    set_aside: dict[int, int] = field(default_factory=dict)
    """Course by step of checkpoints from before which the user went on."""

    @property
    def directories(self) -> list[Path]:
        """The directory that each rank sees."""
        return [self.base / each / "checkpoints" for each in self.seen]

    @property
    def disk(self) -> Path:
        """The disk that fails: all of them, or that of the last rank alone."""
        return self.base if len({*self.seen}) == 1 else self.base / self.seen[-1]

    def live(self, faults: Faults) -> None:
        """Go on from the newest checkpoint, or an older one, and save some; die as planned."""
        self.disk.mkdir(exist_ok=True)
        disk = FailingDisk(self.disk, self.simulation.random)
        resume = self._named()
        end: BaseException | None = None
        with disk.life(faults) as calls:
            try:
                self._on_ranks(disk, resume)
            except (Exception, Crash) as error:
                end = error
        self.simulation.note("ends:", repr(end))
        is_full = faults.full is not None and len(calls) > faults.full
        if end is not None and not disk.has_crashed and not (is_full and _names_cause(end)):
            raise end
        self.simulation.note("calls:", *calls)

    def _named(self) -> str:
        """Return the checkpoint that the user names, of an earlier step, or auto."""
        store = Store(self.directories[0])
        steps = store.steps()
        if len(steps) < 2 or self.simulation.random.random() < 0.8:
            return "auto"
        return str(store.path(steps[0]))

    def _on_ranks(self, disk: FailingDisk, resume: str) -> None:
        network = LocalNetwork(len(self.seen), timeout=20)
        directories = self.directories

        def rank(transport: LocalTransport) -> None:
            paths = {directories[0]: directories[transport.rank]}
            saver = Saver(transport, paths, disk)
            try:
                lead(transport, saver, lambda crew: self._lead(crew, resume))
            finally:
                saver.release()

        network.run(rank)

    def _lead(self, crew: Crew[Saver], resume: str) -> None:
        options = CheckpointOptions(
            checkpoint_dir=str(self.directories[0]),
            checkpoint_storage=self.kind,
            keep_checkpoints=self.keep,
            resume=resume,
        )
        began = begun(crew, RunStart(options=options, iters=10**6), len(self.seen))
        step = self._check_start(began, resume)
        assert began.place is not None
        self._try_another_run()
        crew.all(Saver.prepare, self.directories[0], began.place.storage, self.keep)
        for _ in range(self.simulation.random.choice([1, 1, 2, 3])):
            step += self.simulation.random.randint(1, 2)
            self.courses += 1
            self.begun = (step, self.courses)
            self.simulation.note("saves", *self.begun)
            if crew.all(Saver.save, step, self.courses)[0]:
                self.newest = self.begun
                self.begun = None

    def _check_start(self, began: Resumption, resume: str) -> int:
        """Return the step from which the run goes on."""
        if began.found is None:
            assert self.newest is None, "begins anew, and a checkpoint was there"
            return 0
        step = began.found.manifest.step
        self.simulation.note("goes on from", step)
        course = self.course_of(self._store_with(step), step)
        if resume == "auto":
            assert (step, course) in (self.newest, self.begun)
        elif self.newest is not None and self.newest[0] > step:
            self.set_aside[self.newest[0]] = self.newest[1]
        self.newest = (step, course)
        self.begun = None
        return step

    def _store_with(self, step: int) -> Store:
        """Return a store that has a checkpoint."""
        stores = [Store(each) for each in self.directories]
        return next(store for store in stores if step in store.steps())

    def _try_another_run(self) -> None:
        """Let another run try to write to the same directory."""
        with pytest.raises(UserError, match="another run"):
            Store(self.directories[0]).lock()

    def course_of(self, store: Store, step: int) -> int:
        """Return the course of a checkpoint, which must be whole."""
        files = content(store, step)
        courses = [course for course in range(1, self.courses + 1) if files == self.whole(course)]
        assert len(courses) == 1, f"the checkpoint of step {step} is not whole"
        return courses[0]

    def check(self) -> None:
        """Check what is on the disks while no run is there."""
        for directory in {*self.directories}:
            store = Store(directory)
            if self.seen == "a":
                for step in store.steps():
                    self.course_of(store, step)
            for step, course in self.set_aside.items():
                assert self.seen != "a" or course in self._courses_aside(store, step)

    def _courses_aside(self, store: Store, step: int) -> list[int]:
        """Return the courses of the checkpoints of a step that are there, or were set aside."""
        found = [self.course_of(store, step)] if step in store.steps() else []
        for path in store.directory.glob(f"superseded-*{name_of(step)}"):
            files = {each.name: each.read_bytes() for each in path.glob("*.safetensors")}
            found += [
                course for course in range(1, self.courses + 1) if files == self.whole(course)
            ]
        return found

    def whole(self, course: int) -> dict[str, bytes]:
        """Return the files of a whole checkpoint."""
        return written(len(self.seen), course)


def _names_cause(error: BaseException) -> bool:
    """Return whether an error of a full disk is one that users understand."""
    is_told = isinstance(error, (SaveError, UserError, OSError)) or "another rank" in str(error)
    return is_told and (not isinstance(error, SaveError) or "disk is full" in str(error))


def faults_of(simulation: Simulation) -> Faults:
    """Draw what fails in a life."""
    draw = simulation.random
    kind = draw.choice(["nothing", "death", "death", "power", "power", "full"])
    at = int(MOST_CALLS * draw.random() ** 1.5)
    simulation.note("fails:", kind, at)
    if kind == "full":
        return Faults(full=at, emptied=draw.choice([None, at + 3]))
    if kind == "nothing":
        return Faults()
    return Faults(death=at, cuts_power=kind == "power")


def play(simulation: Simulation) -> None:
    """A checkpoint is whole or not there, whatever call the run dies at, also if the power fails or
    the disk is full. The next life goes on from the newest that was acknowledged, or from the one
    that was begun after it. Nothing trained is written over: later checkpoints are set aside. Two
    runs never write to one directory. What is left half done is gone after the next save."""
    kind, seen = simulation.random.choice(STORAGES)
    simulation.note(kind, seen)
    with tempfile.TemporaryDirectory(dir=memory()) as name:
        run = Run(simulation, Path(name).resolve(), kind, seen, simulation.random.choice([1, 2]))
        for _ in range(simulation.random.randint(1, 2)):
            run.live(faults_of(simulation))
            run.check()
        run.live(Faults())
        run.check()
        assert run.newest is not None
        _check_last(run)


def _check_last(run: Run) -> None:
    """Check that a reader finds the last checkpoint, and that nothing else is left."""
    assert run.newest is not None
    step, course = run.newest
    assert run.course_of(Store(run.directories[0]), step) == course
    names: Sequence[str] = [
        path.name for each in {*run.directories} for path in each.glob("partial-*")
    ]
    assert not names
    if run.simulation.random.random() < 0.9:
        return
    tensors = load([run.directories[0]], step)
    (first, second) = tensors["layers.0"][2][:4], tensors["layers.0.m"][2]
    assert int.from_bytes(first, "little") == int.from_bytes(second, "little") == course


def memory() -> str | None:
    """Return a directory in memory, where there is one: no flush of it takes time."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


SAVES = Room("saves", play)
