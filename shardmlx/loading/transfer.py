"""Give every rank the tensors of its own stages, wherever the model lies.

A rank without the model builds it from a copy that has only the heads of its files, and receives
the tensors of its stages: from rank 0, from another rank with the model, or from a replica that
relays them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from shardmlx.common.formatting import gibibytes
from shardmlx.common.reporter import Reporter
from shardmlx.common.units import MEGABYTE
from shardmlx.distributed.agreement import on_all_ranks
from shardmlx.distributed.byte_stream import Incoming, Outgoing
from shardmlx.distributed.messages import OBJECT_TAG
from shardmlx.distributed.transport import Transport
from shardmlx.loading.hub_download import download
from shardmlx.loading.manifest import (
    ModelManifest,
    Transfer,
    is_needed,
    parts_of_shares,
    plan_transfers,
)
from shardmlx.loading.partial_copy import PartialCopy
from shardmlx.modelfiles.hub import Repository
from shardmlx.modelfiles.safetensors_header import PlacedTensor, ReadBytes, read_bytes
from shardmlx.models.shape import ModelShape
from shardmlx.models.shares import WHOLE, TensorShares
from shardmlx.models.slice import Slice

Advance = Callable[[int], None]
"""Function that is told how many more bytes have come."""


class Holding(Enum):
    """State of the model on a rank before anything is sent."""

    WHOLE = "has it"
    HUB = "asks the hub for its part"
    LACKS = "is sent its part"


@dataclass(slots=True)
class LocalFiles:
    """The files of a model, with its ``additions``, or of adapters, as this rank sees them. Must be
    closed, even after loading failed.

    ``path``, a directory or a file in it, is built from. ``manifest`` is None if every rank has the
    files. ``holdings`` are the states of all ranks, and ``keepers`` of tensors each one's: itself,
    or one at its disk. ``copy`` and ``repository`` are the keeper's. ``temporary`` files need no
    names once they are open.
    """

    transport: Transport
    path: Path
    manifest: ModelManifest | None = None
    holdings: tuple[Holding, ...] = ()
    keepers: tuple[int, ...] = ()
    copy: PartialCopy | None = None
    repository: Repository | None = None
    temporary: bool = False
    additions: LocalFiles | None = None

    @property
    def read(self) -> ReadBytes | None:
        """Function that reads a partly present file; None if all are whole."""
        return None if self.repository is None else self.repository.part

    @property
    def adapters(self) -> str | None:
        """Path of the adapters on this rank."""
        return None if self.additions is None else str(self.additions.path)

    def load(
        self,
        parts: Sequence[Slice],
        shape: ModelShape,
        reporter: Reporter,
        further: Sequence[tuple[int, int]] = (),
        shares: TensorShares = WHOLE,
    ) -> None:
        """Bring the tensors of this rank's slices, of whose layers ranks may have ``shares``, and
        read them; bring ``further`` layers, which others read then. All ranks must call it.

        All ranks have built the model, lazily, from ``path`` and ``adapters``, which may be gone
        afterwards.
        """
        stages = [*((part.start, part.stop) for part in parts), *further]
        self._fill(stages, shape, reporter, "weights", shares)
        if self.additions is not None:
            self.additions._fill(stages, shape, reporter, "adapters", WHOLE)
        for part in parts:
            part.load()
        self.close()

    def _fill(
        self,
        stages: Sequence[tuple[int, int]],
        shape: ModelShape,
        reporter: Reporter,
        what: str,
        shares: TensorShares,
    ) -> None:
        """Bring the tensors of this rank's ``stages``, or its ``shares`` of them. Collective, once
        all models are built."""
        if self.manifest is None:
            return
        started = time.monotonic()
        tensors = self.manifest.tensors()
        mine: set[str] = set()
        if self.holdings[self.transport.rank] is not Holding.WHOLE:
            mine = {
                name
                for name in tensors
                if any(is_needed(name, shape, start, stop) for start, stop in stages)
            }
        # The hub sends what lies together.
        scattered = Holding.HUB not in self.holdings
        of_ranks = parts_of_shares(tensors, shape, shares, scattered=scattered)
        own = of_ranks[self.transport.rank % shares.size]
        mine = {own[name][0] if name in own else name for name in mine}
        tensors |= dict(each for of_rank in of_ranks for each in of_rank.values())
        if self.copy is not None:
            self.copy.tensors = tensors
        moved = self._bring(tensors, mine, reporter, what)
        everyone = self.transport.gather(moved, what=f"loading {what}")
        if everyone is None or not any(map(sum, everyone)):
            return
        sums = map(sum, zip(*everyone, strict=True))
        ways = zip(("over MPI", "from the hub", "from caches"), sums, strict=True)
        parts = [f"{gibibytes(nbytes)} {way}" for way, nbytes in ways if nbytes]
        ranks = [
            f"{self.transport.name(rank)} {gibibytes(sum(each))}"
            for rank, each in enumerate(everyone)
            if any(each)
        ]
        seconds = time.monotonic() - started
        reporter.say(f"{what}: {', '.join(parts)} in {seconds:.1f} s ({', '.join(ranks)})")

    def close(self) -> None:
        """Remove temporary files, even after loading failed. May be called again."""
        self._unlink()
        if self.copy is not None:
            self.copy.close()
        if self.additions is not None:
            self.additions.close()

    def _unlink(self) -> None:
        """Unlink temporary files, so that they vanish with this process; open ones stay."""
        if self.temporary and self.copy is not None:
            shutil.rmtree(self.copy.directory, ignore_errors=True)

    def _wanted(self, needed: Sequence[set[str]]) -> set[str]:
        """Return the tensors that this rank brings as a keeper, if rank r needs ``needed[r]``."""
        me, wanted = self.transport.rank, set[str]()
        # Without a whole model, rank 0 must have the tensors that others are sent.
        relays = me == 0 and Holding.WHOLE not in self.holdings
        for keeper, names in zip(self.keepers, needed, strict=True):
            if keeper == me or (relays and self.holdings[keeper] is Holding.LACKS):
                wanted |= names
        return wanted

    def _bring(
        self, tensors: Mapping[str, PlacedTensor], mine: set[str], reporter: Reporter, what: str
    ) -> tuple[int, int, int]:
        """Get the tensors ``mine``; return bytes that came by MPI, from the hub, from caches."""
        transport, me, loading = self.transport, self.transport.rank, f"loading {what}"
        wanted = self._wanted(transport.all_gather(mine, loading))
        self._unlink()  # all ranks have built their models

        def compare() -> tuple[set[str], set[str]]:
            """Return (present, missing) of this keeper; ``UserError`` without room for it."""
            if self.copy is None:
                return set(), set()
            sound = self.copy.sound(wanted)
            self.copy.check_room(wanted - sound)
            return sound, wanted - sound

        def download_missing() -> int:
            if self.repository is None or self.copy is None or not missing:
                return 0
            with _progress(reporter, what, nbytes_of(missing)) as advance:
                download(self.repository, self.copy, missing, tensors, advance)
            return nbytes_of(missing)

        def nbytes_of(names: Iterable[str]) -> int:
            return sum(tensors[name].nbytes for name in names)

        present, missing = on_all_ranks(transport, loading, compare)
        kept = nbytes_of(present)
        downloaded = on_all_ranks(transport, loading, download_missing)
        if self.repository is not None:
            present, missing = present | missing, set()
        everyone = transport.all_gather((present, missing), loading)
        transfers = plan_transfers(
            tensors,
            [rank for rank, held in enumerate(self.holdings) if held is Holding.WHOLE],
            {rank: has for rank, (has, _) in enumerate(everyone) if has},
            {rank: lacks for rank, (_, lacks) in enumerate(everyone) if lacks},
        )
        through_me = [transfer for transfer in transfers if me in transfer.chain]
        nbytes = nbytes_of(transfer.name for transfer in through_me)
        received = 0
        directory = self.path.parent if self.path.is_file() else self.path
        read = partial(read_bytes, directory) if self.copy is None else self.copy.read
        with _progress(reporter, what, nbytes) as advance:
            for transfer in through_me:
                received += _pass_on(
                    transport, transfer, tensors[transfer.name], read, self.copy, advance
                )
        if self.copy is not None:
            self.copy.flush()
        # A rank that reads another rank's copy waits for it.
        transport.barrier(loading)
        return received, downloaded, kept


@contextmanager
def _progress(reporter: Reporter, what: str, nbytes: int) -> Iterator[Advance]:
    """Show a progress bar in megabytes, unless this rank has nothing to do."""
    if not nbytes:
        yield lambda count: None
        return
    with reporter.bar(f"{what}, MB", max(1, nbytes // MEGABYTE)) as bar:
        yield lambda count: bar.advance(count / MEGABYTE)


def _pass_on(
    transport: Transport,
    transfer: Transfer,
    place: PlacedTensor,
    read: ReadBytes,
    copy: PartialCopy | None,
    advance: Advance,
) -> int:
    """Play this rank's part in a transfer; return bytes received. ``RuntimeError`` on damage."""
    what = f"{transport.name(transport.rank)}, loading {transfer.name}"
    position = transfer.chain.index(transport.rank)
    incoming, following = None, None
    if position:
        peer = transfer.chain[position - 1]
        incoming = Incoming(transport, place.nbytes, peer, OBJECT_TAG, what)
    if position + 1 < len(transfer.chain):
        peer = transfer.chain[position + 1]
        following = Outgoing(transport, place.nbytes, peer, OBJECT_TAG, what, incoming)
    done = 0
    for piece in incoming or place.pieces(read):
        if following is not None:
            following.write(piece)
        if incoming is not None and copy is not None:
            rest = memoryview(piece)
            for offset, count in place.places(done, len(piece)):
                copy.write(place.file, offset, rest[:count])
                rest = rest[count:]
        done += len(piece)
        advance(len(piece))
    if following is not None:
        following.close()
    if incoming is not None and copy is not None:
        copy.add(transfer.name, incoming.digest)
    return 0 if incoming is None else place.nbytes
