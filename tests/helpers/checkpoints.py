"""Stores with small checkpoints in them, and writers and readers on ranks that are threads."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from shardmlx.checkpoint.reader import CheckpointReader, Lacking, TensorRequest
from shardmlx.checkpoint.resume import Resumption, RunStart, SoundCheckpoint, resume_point
from shardmlx.checkpoint.search import see_checkpoints, take_place
from shardmlx.checkpoint.seen_checkpoints import SeenCheckpoints
from shardmlx.checkpoint.storage import Storage, choose_storage
from shardmlx.checkpoint.store import FileInfo, Manifest, Store, name_of
from shardmlx.checkpoint.writer import CheckpointWriter, Snapshot
from shardmlx.common.durable_files import write_durably
from shardmlx.config.train import CheckpointOptions
from shardmlx.distributed.crew import Crew, lead
from shardmlx.distributed.messages import buffer_of
from shardmlx.distributed.shared_disks import find_disks
from shardmlx.distributed.transport import Transport
from shardmlx.modelfiles.safetensors_header import Header
from tests.helpers.local_transport import LocalNetwork, LocalTransport

T = TypeVar("T")
Tensors = dict[str, mx.array]
Bytes = dict[str, tuple[tuple[int, ...], mx.Dtype, bytes]]


OLD = {"weights-00.safetensors": b"old weights", "optimizer-00.safetensors": b"old state"}
NEW = {
    "weights-00.safetensors": b"the new weights",
    "optimizer-00.safetensors": b"",
    "a.safetensors": b"1",
}
"""Files of two checkpoints."""


def file_info(name: str, content: bytes) -> FileInfo:
    return FileInfo(name, len(content), hashlib.sha256(content).hexdigest())


def manifest_of(step: int, files: Mapping[str, bytes] | None = None) -> Manifest:
    """Return the manifest of a checkpoint with files of these contents."""
    return Manifest(
        step=step,
        files=tuple(file_info(name, content) for name, content in (files or {}).items()),
        identity={"model": "a"},
        state={"report": {"tokens": [3, 4]}},
        plan={"pp": 2},
        versions={"mlx": "0.32.4"},
    )


def put(store: Store, step: int, files: Mapping[str, bytes]) -> Manifest:
    partial = store.begin(step)
    for name, content in files.items():
        write_durably(partial / name, content)
    manifest = manifest_of(step, files)
    store.commit(manifest)
    return manifest


def content(store: Store, step: int) -> dict[str, bytes]:
    return {f.name: (store.path(step) / f.name).read_bytes() for f in store.manifest(step).files}


def names(store: Store) -> set[str]:
    return {path.name for path in store.directory.iterdir()}


def is_sound(store: Store, step: int) -> bool:
    return not any(store.fault(step, file) for file in store.manifest(step).files)


def flip(path: Path, position: int = -1) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def tensors_of(owner: int, seed: int = 0) -> Tensors:
    """Return some tensors of a rank, of sizes and types that checkpoints hold."""
    random = np.random.RandomState(100 * seed + owner)
    matrix = mx.array(random.standard_normal((7, 5)).astype(np.float32))
    tensors = {
        f"layers.{owner}.matrix": matrix,
        f"layers.{owner}.turned": matrix.T,
        f"layers.{owner}.short": matrix.astype(mx.bfloat16),
        f"layers.{owner}.half": matrix[0].astype(mx.float16),
        f"layers.{owner}.step": mx.array(10 * seed + owner, mx.uint64),
        f"layers.{owner}.none": mx.zeros((0, 3)),
    }
    mx.eval(tensors)
    return tensors


def as_bytes(tensors: Mapping[str, mx.array]) -> Bytes:
    """Tensors as what can be compared to the bit."""
    arrays = {name: mx.contiguous(array) for name, array in tensors.items()}
    mx.eval(arrays)
    return {
        name: (tuple(array.shape), array.dtype, bytes(buffer_of(array)))
        for name, array in arrays.items()
    }


def whole(owners: int, seed: int = 0) -> Bytes:
    """Return all tensors of a checkpoint that ``owners`` ranks save."""
    return {k: v for owner in range(owners) for k, v in as_bytes(tensors_of(owner, seed)).items()}


def snapshots(owner: int, seed: int = 0) -> list[Snapshot]:
    """Return the part of a rank: two files."""
    tensors = tensors_of(owner, seed)
    first = {name: tensors.pop(name) for name in list(tensors)[:4]}
    return [
        Snapshot.of(f"weights-{owner:02d}.safetensors", first),
        Snapshot.of(f"optimizer-{owner:02d}.safetensors", tensors),
    ]


def hosts(base: Path, seen: str) -> list[Path]:
    """Return the checkpoint directory of each rank: those of the same letter see the same."""
    return [base / each / "checkpoints" for each in seen]


def complete(directories: Sequence[Path]) -> dict[str, list[int]]:
    """Return the steps of the complete checkpoints on each disk."""
    return {d.parent.name: Store(d).steps() for d in sorted(set(directories))}


def left_over(directories: Sequence[Path]) -> set[str]:
    return {path.name for each in set(directories) for path in each.glob("partial*")}


def on_ranks(directories: Sequence[Path], work: Callable[[LocalTransport, Store], Any]) -> Any:
    """Run ``work`` on a rank for each directory, with its store there; return results by rank."""
    network = LocalNetwork(len(directories), timeout=20)
    try:
        return network.run(lambda t: work(t, Store(directories[t.rank])))
    finally:
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join(20)
                assert not thread.is_alive()


def storage_on(transport: Transport, store: Store, kind: str, owners: int) -> Storage:
    names = [transport.name(rank) for rank in range(transport.size)]
    return choose_storage(kind, find_disks(transport, store.directory), owners, names)


def writer_on(
    transport: Transport, store: Store, kind: str, owners: int, keep: int = 3
) -> CheckpointWriter:
    return CheckpointWriter(transport, store, storage_on(transport, store, kind, owners), keep)


def begin(writer: CheckpointWriter, rank: int, owners: int, step: int, seed: int = 0) -> None:
    parts = snapshots(rank, seed) if rank < owners else []
    writer.start(manifest_of(step) if rank == 0 else None, step, parts)


def save(
    directories: Sequence[Path],
    kind: str,
    owners: int,
    steps: Mapping[int, int] | Sequence[int] = (1,),
    keep: int = 3,
) -> None:
    """Write the checkpoints of ``steps``, of tensors with the seed that is given with each."""
    seeds = steps if isinstance(steps, Mapping) else dict.fromkeys(steps, 0)

    def work(transport: LocalTransport, store: Store) -> None:
        writer = writer_on(transport, store, kind, owners, keep)
        for step, seed in seeds.items():
            begin(writer, transport.rank, owners, step, seed)
        writer.wait()

    on_ranks(directories, work)


class OwnDisk(SeenCheckpoints):
    """What a rank sees for which some of rank 0's paths lead to other directories, as on a disk of
    its own."""

    def __init__(self, transport: Transport, paths: Mapping[Path, Path]) -> None:
        super().__init__(transport)
        self._paths = paths

    def store(self, directory: Path) -> Store:
        return Store(self._paths.get(directory, directory))


def led(
    directories: Sequence[Path],
    work: Callable[[Crew[SeenCheckpoints]], T],
    others: Sequence[Path] = (),
) -> T:
    """Return what ``work`` returns on rank 0 of ranks that see these directories, and ``others``,
    under the paths of rank 0."""

    def rank(transport: LocalTransport, store: Store) -> T | None:
        paths = {each[0]: each[transport.rank] for each in (directories, others) if each}
        seen = OwnDisk(transport, paths)
        with contextlib.ExitStack() as stack:
            stack.callback(seen.release)
            return lead(transport, seen, work)

    found: list[T] = on_ranks(directories, rank)
    return found[0]


Search = tuple[SoundCheckpoint | None, dict[int, str]]


def found_by(crew: Crew[SeenCheckpoints], directory: Path, step: int | None = None) -> Search:
    """Return what rank 0 finds in its directory, or of a ``step`` there."""
    if step is None:
        options = CheckpointOptions(checkpoint_dir=str(directory))
    else:
        options = CheckpointOptions(resume=str(directory / name_of(step)))
    seen = see_checkpoints(crew, options).source
    assert seen is not None, "there is a directory to look at"
    return seen.choose(step)


def search(directories: Sequence[Path], step: int | None = None) -> Search:
    """Return what ranks find that see these directories."""
    return led(directories, lambda crew: found_by(crew, directories[0], step))


def begun(crew: Crew[SeenCheckpoints], start: RunStart, owners: int) -> Resumption:
    """Return where a run begins whose parts so many ranks have, as ``train`` does it. Raises
    ``UserError``."""
    resumption = resume_point(start, see_checkpoints(crew, start.options), owners)
    take_place(crew, resumption)
    return resumption


class Reader:
    """The part of a rank in reading all of a checkpoint that was found."""

    def __init__(self, transport: Transport, found: SoundCheckpoint, store: Store) -> None:
        self.rank = transport.rank
        self._reader = CheckpointReader(transport, replace(found, store=store))
        self._readings: list[TensorRequest] = []
        self.tensors: Tensors = {}
        """All that was read."""

    def headers(self) -> dict[str, Header]:
        return self._reader.headers()

    def open(self, headers: Sequence[Mapping[str, Header]]) -> list[str]:
        """Return the names of all tensors."""
        self._reader.open(headers)
        return sorted(self._reader.names("weights") + self._reader.names("optimizer"))

    def lacking(self, readings: Mapping[int, Sequence[TensorRequest]]) -> dict[str, set[str]]:
        self._readings = [*readings[self.rank]]
        lacking: dict[str, set[str]] = {}
        for reading in self._readings:
            lacking |= self._reader.lacking(reading)
        return lacking

    def read(self, lacking: Sequence[Lacking]) -> None:
        for reading in self._readings:
            self.tensors |= dict(self._reader.read(reading, lacking))


def read_all(
    transport: LocalTransport,
    store: Store,
    found: SoundCheckpoint,
    readings: Callable[[list[str]], Mapping[int, Sequence[TensorRequest]]],
) -> Bytes:
    """Return what this rank reads: ``readings`` are of all ranks, by the names of all tensors."""

    def work(crew: Crew[Reader]) -> None:
        names = crew.all(Reader.open, crew.all(Reader.headers))[0]
        crew.all(Reader.read, crew.all(Reader.lacking, readings(names)))

    reader = Reader(transport, found, store)
    lead(transport, reader, work)
    return as_bytes(reader.tensors)


def load(directories: Sequence[Path], step: int | None = None) -> Bytes:
    """Return what ranks that see these directories read, every one another share, and some all."""
    found, _ = search(directories, step)
    assert found is not None
    last = len(directories) - 1

    def readings(names: list[str]) -> dict[int, list[TensorRequest]]:
        wanted = {rank: frozenset(names[rank :: last + 1]) for rank in range(last)}
        wanted[last] = frozenset(names)
        return {
            rank: [TensorRequest(kind, mine.__contains__) for kind in ("weights", "optimizer")]
            for rank, mine in wanted.items()
        }

    everyone: list[Bytes] = on_ranks(
        directories, lambda transport, store: read_all(transport, store, found, readings)
    )
    for rank, each in enumerate(everyone):
        assert each == {name: everyone[-1][name] for name in each}
        assert len(each) == len(sorted(everyone[-1])[rank :: last + 1]) or rank == last
    return everyone[-1]
