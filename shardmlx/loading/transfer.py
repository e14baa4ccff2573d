"""Gives every rank the tensors of its own stages, wherever the model lies.

A rank that lacks the model builds it from a copy of which it has only the head, and is sent the
tensors of its stages: by rank 0, by a rank that has the model too, or by a replica that passes on
what it receives. All methods that say so are collective.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np

from shardmlx.common.digests import DIGEST_BYTES, new_digest
from shardmlx.common.formatting import gibibytes
from shardmlx.common.reporter import Bar, Reporter
from shardmlx.distributed import byte_stream
from shardmlx.distributed.agreement import on_all_ranks
from shardmlx.distributed.byte_stream import incoming
from shardmlx.distributed.messages import OBJECT_TAG, Handle
from shardmlx.distributed.transport import Transport
from shardmlx.loading.hub_download import download
from shardmlx.loading.manifest import ModelManifest, Transfer, is_needed, plan_transfers
from shardmlx.loading.partial_copy import PartialCopy, check_present, read_exactly
from shardmlx.modelfiles.hub import Repository
from shardmlx.modelfiles.model_files import PlacedTensor
from shardmlx.models.shape import ModelShape
from shardmlx.models.slice import Slice

_MEGABYTE = 10**6


class State(Enum):
    """What a rank has of the model before anything is sent."""

    WHOLE = "has it"
    HUB = "asks the hub for its part"
    LACKS = "is sent its part"


@dataclass(frozen=True, slots=True)
class Layout:
    """What all ranks know of each: its state, and who brings and writes what it needs, the
    ``keeper``: itself, or another rank that sees the same disk."""

    states: tuple[State, ...]
    keepers: tuple[int, ...]
    blueprint: ModelManifest


@dataclass(slots=True)
class Moved:
    """Bytes that a rank has got."""

    received: int = 0
    downloaded: int = 0
    kept: int = 0


class Bundle:
    """The files of a model, or of adapters, as this rank sees them.

    ``path`` is what to build from: the ``directory``, or a file in it. ``layout`` is None where
    every rank has them. ``copy`` and ``repository`` are the keeper's;
    ``temporary``: nobody needs the names of the files once they are open.
    """

    def __init__(
        self,
        transport: Transport,
        directory: Path,
        layout: Layout | None = None,
        *,
        copy: PartialCopy | None = None,
        repository: Repository | None = None,
        temporary: bool = False,
    ) -> None:
        self.path = directory
        self._directory = directory
        self._transport = transport
        self._layout = layout
        self._copy = copy
        self._repository = repository
        self._temporary = temporary
        self._present: set[str] = set()

    @property
    def read(self) -> Callable[[str, int, int], bytes] | None:
        """So many bytes of a file from an offset on, where it is only partly here."""
        return None if self._repository is None else self._repository.part

    def check(self, start: int, stop: int, shape: ModelShape) -> None:
        """Raise ``RuntimeError`` unless all that a stage reads is here."""
        if self._layout is None or self._state is State.WHOLE:
            return
        tensors = self._layout.blueprint.tensors()
        needed = [name for name in tensors if is_needed(name, shape, start, stop)]
        check_present(needed, self._present, tensors, self._directory)

    def fill(
        self, stages: Sequence[tuple[int, int]], shape: ModelShape, reporter: Reporter, what: str
    ) -> None:
        """Bring what the stages of this rank read, each a range of layers. Collective.

        Every rank has built its model before, so that its files are open.
        """
        if self._layout is None:
            return
        tensors = self._layout.blueprint.tensors()
        mine: set[str] = set()
        if self._state is not State.WHOLE:
            mine = {
                name
                for name in tensors
                if any(is_needed(name, shape, start, stop) for start, stop in stages)
            }
        started = time.monotonic()
        moved = _Filling(
            self._transport, self._layout, tensors, self._copy, self._directory, what
        ).run(mine, self._repository, reporter, self._unname)
        self._present = mine
        self._say(moved, time.monotonic() - started, reporter, what)

    def close(self) -> None:
        """What is temporary is gone, also where loading failed. May be called again."""
        self._unname()
        if self._copy is not None:
            self._copy.close()

    @property
    def _state(self) -> State:
        return State.WHOLE if self._layout is None else self._layout.states[self._transport.rank]

    def _unname(self) -> None:
        """Take the names of temporary files away: so they go with this process, however it ends.

        What is open stays: MLX reads it, and the copy is written.
        """
        if self._temporary and self._copy is not None:
            shutil.rmtree(self._copy.directory, ignore_errors=True)

    def _say(self, moved: Moved, seconds: float, reporter: Reporter, what: str) -> None:
        everyone = self._transport.gather(moved, what=f"loading {what}")
        if everyone is None:
            return
        ways = {
            "over MPI": sum(each.received for each in everyone),
            "from the hub": sum(each.downloaded for each in everyone),
            "from caches": sum(each.kept for each in everyone),
        }
        parts = [f"{gibibytes(nbytes)} {way}" for way, nbytes in ways.items() if nbytes]
        who = [
            f"{self._transport.name(rank)} {gibibytes(m.received + m.downloaded + m.kept)}"
            for rank, m in enumerate(everyone)
            if m != Moved()
        ]
        if parts:
            reporter.say(f"{what}: {', '.join(parts)} in {seconds:.1f} s ({', '.join(who)})")


@dataclass
class _Filling:
    """One ``Bundle.fill``."""

    transport: Transport
    layout: Layout
    tensors: Mapping[str, PlacedTensor]
    copy: PartialCopy | None
    directory: Path
    what: str
    moved: Moved = field(default_factory=Moved)

    def run(
        self,
        mine: Collection[str],
        repository: Repository | None,
        reporter: Reporter,
        all_have_built: Callable[[], None],
    ) -> Moved:
        transport, copy, me = self.transport, self.copy, self.transport.rank
        loading = f"loading {self.what}"
        wanted = self._wanted(transport.all_gather(set(mine), loading))
        all_have_built()
        sound, missing = on_all_ranks(
            transport, loading, lambda: self._compare(wanted.get(me, set()))
        )
        if copy is not None and repository is not None:
            self.moved.downloaded = copy.nbytes(missing)
        on_all_ranks(transport, loading, lambda: self._download(repository, missing, reporter))
        if repository is not None:
            sound, missing = sound | missing, set()
        everyone = transport.all_gather((sound, missing), loading)
        whole = [rank for rank, s in enumerate(self.layout.states) if s is State.WHOLE]
        transfers = plan_transfers(
            self.tensors,
            whole,
            {rank: there for rank, (there, _) in enumerate(everyone) if there},
            {rank: lacks for rank, (_, lacks) in enumerate(everyone) if lacks},
        )
        with self._bar(reporter, self._nbytes(t.name for t in transfers if me in t.chain)) as bar:
            self._transfer(transfers, _Progress(bar))
        if copy is not None:
            copy.flush()
        # Who reads what another has written waits for it.
        transport.barrier(loading)
        return self.moved

    def _wanted(self, needed: Sequence[set[str]]) -> dict[int, set[str]]:
        """By keeper, the tensors that it brings: for itself, and for who sees the same disk."""
        layout = self.layout
        wanted: dict[int, set[str]] = {}
        for rank, names in enumerate(needed):
            if names:
                wanted.setdefault(layout.keepers[rank], set()).update(names)
        if State.WHOLE not in layout.states:
            # Rank 0 is then the one that must have what others are sent.
            for rank, names in list(wanted.items()):
                if layout.states[rank] is State.LACKS:
                    wanted.setdefault(0, set()).update(names)
        return wanted

    def _compare(self, wanted: set[str]) -> tuple[set[str], set[str]]:
        """(there, missing) of this keeper; ``UserError`` if there is no room for it."""
        if self.copy is None:
            return set(), set()
        sound = self.copy.sound(wanted)
        self.moved.kept = self.copy.nbytes(sound)
        self.copy.check_room(wanted - sound)
        return sound, wanted - sound

    def _download(
        self, repository: Repository | None, missing: set[str], reporter: Reporter
    ) -> None:
        if repository is None or self.copy is None or not missing:
            return
        with self._bar(reporter, self._nbytes(missing)) as bar:
            download(repository, self.copy, missing, self.tensors, _Progress(bar))

    def _transfer(self, transfers: Sequence[Transfer], advance: Callable[[int], None]) -> None:
        me = self.transport.rank
        with ExitStack() as stack:
            read = self._reader(stack)
            for transfer in transfers:
                if me == transfer.chain[0]:
                    self._send(transfer, read, advance)
                elif me in transfer.chain:
                    self._relay(transfer, advance)

    def _reader(self, stack: ExitStack) -> Callable[[str, int, int], bytes]:
        """Reads this rank's own files, of which each is opened once."""
        if self.copy is not None:
            return self.copy.read
        opened: dict[str, int] = {}

        def read(file: str, offset: int, count: int) -> bytes:
            if file not in opened:
                opened[file] = os.open(self.directory / file, os.O_RDONLY)
                stack.callback(os.close, opened[file])
            return read_exactly(opened[file], offset, count, str(self.directory / file))

        return read

    def _send(
        self,
        transfer: Transfer,
        read: Callable[[str, int, int], bytes],
        advance: Callable[[int], None],
    ) -> None:
        place = self.tensors[transfer.name]
        outgoing = _Outgoing(self.transport, transfer, self._doing(transfer))
        digest = new_digest()
        step = byte_stream.PIECE_BYTES
        for start in range(place.start, place.end, step):
            piece = read(place.file, start, min(step, place.end - start))
            outgoing.send(piece)
            digest.update(piece)
            advance(len(piece))
        outgoing.send(digest.digest())
        outgoing.close()

    def _relay(self, transfer: Transfer, advance: Callable[[int], None]) -> None:
        """Write a tensor as it comes, and pass it on."""
        copy, place = self.copy, self.tensors[transfer.name]
        if copy is None:
            raise ValueError(f"{transfer.name} is sent to a rank that keeps no copy")
        transport, what = self.transport, self._doing(transfer)
        peer = transfer.chain[transfer.chain.index(transport.rank) - 1]
        outgoing = _Outgoing(transport, transfer, what)
        digest, offset = new_digest(), place.start
        for piece in incoming(transport, place.nbytes, peer, OBJECT_TAG, what):
            outgoing.send(piece)
            digest.update(piece)
            copy.write(place.file, offset, piece)
            offset += len(piece)
            advance(len(piece))
        (expected,) = incoming(transport, DIGEST_BYTES, peer, OBJECT_TAG, what)
        outgoing.send(expected)
        if expected != digest.digest():
            raise RuntimeError(f"{what}: it came damaged from {transport.name(peer)}")
        outgoing.close()
        copy.add(transfer.name, digest.digest())
        self.moved.received += place.nbytes

    def _doing(self, transfer: Transfer) -> str:
        return f"{self.transport.name(self.transport.rank)}, loading {transfer.name}"

    def _nbytes(self, names: Iterable[str]) -> int:
        return sum(self.tensors[name].nbytes for name in names)

    def _bar(self, reporter: Reporter, nbytes: int) -> AbstractContextManager[Bar | None]:
        """In megabytes; none where this rank has nothing to do."""
        if not nbytes:
            return nullcontext()
        return reporter.bar(f"{self.what}, MB", max(1, nbytes // _MEGABYTE))


class _Progress:
    """Tells a bar in megabytes what comes in bytes."""

    def __init__(self, bar: Bar | None) -> None:
        self._bar = bar
        self._nbytes = 0

    def __call__(self, nbytes: int) -> None:
        before = self._nbytes // _MEGABYTE
        self._nbytes += nbytes
        if self._bar is not None and self._nbytes // _MEGABYTE > before:
            self._bar.advance(self._nbytes // _MEGABYTE - before)


class _Outgoing:
    """Pieces to the next rank of a chain, as they are, two on their way at most; to nobody from
    the last."""

    def __init__(self, transport: Transport, transfer: Transfer, what: str) -> None:
        chain = transfer.chain
        after = chain.index(transport.rank) + 1
        self._peer = chain[after] if after < len(chain) else None
        self._transport = transport
        self._what = what
        self._sent: deque[Handle] = deque()

    def send(self, piece: bytes | memoryview) -> None:
        if self._peer is None:
            return
        array = np.frombuffer(piece, np.uint8)
        self._sent.append(self._transport.send(array, self._peer, OBJECT_TAG))
        self._wait(most=2)

    def close(self) -> None:
        """Return once the peer has everything."""
        self._wait(most=0)

    def _wait(self, most: int) -> None:
        while len(self._sent) > most:
            self._transport.wait(
                self._sent.popleft(),
                lambda: f"{self._what}, sending to {self._transport.name(self._peer or 0)}",
            )


class Weights:
    """A model and what is added to it, on every rank. To be closed, also where loading failed."""

    def __init__(self, model: Bundle, adapters: Bundle | None) -> None:
        self._bundles = {"weights": model} | ({"adapters": adapters} if adapters else {})
        self.path = model.path
        self.read = model.read
        self.adapters = None if adapters is None else str(adapters.path)

    def load(self, parts: Sequence[Slice], shape: ModelShape, reporter: Reporter) -> None:
        """Read this rank's slices, once what they read is here. Collective.

        All ranks have built the model, lazily, from ``path`` and ``adapters``, which may be gone
        afterwards.
        """
        stages = [(part.start, part.stop) for part in parts]
        for what, bundle in self._bundles.items():
            bundle.fill(stages, shape, reporter, what)
        for part in parts:
            for bundle in self._bundles.values():
                bundle.check(part.start, part.stop, shape)
            part.load()
        self.close()

    def close(self) -> None:
        for bundle in self._bundles.values():
            bundle.close()

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
