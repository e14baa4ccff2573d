"""Give every rank the tensors of its own stages, wherever the model lies.

A rank without the model builds it from a copy that has only the heads of its files, and receives
the tensors of its stages: from rank 0, from another rank with the model, or from a replica that
relays them.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from shardmlx.common.formatting import gibibytes
from shardmlx.common.reporter import Bar, Reporter
from shardmlx.common.units import MEGABYTE
from shardmlx.distributed.agreement import on_all_ranks
from shardmlx.distributed.transport import Transport
from shardmlx.loading.chains import Read, send_tensors
from shardmlx.loading.hub_download import download
from shardmlx.loading.manifest import ModelManifest, is_needed, plan_transfers
from shardmlx.loading.page_cache import PageCache, drop_files
from shardmlx.loading.partial_copy import PartialCopy, check_present, read_exactly
from shardmlx.modelfiles.hub import Repository
from shardmlx.modelfiles.model_files import PlacedTensor
from shardmlx.models.shape import ModelShape
from shardmlx.models.slice import Slice


class Holding(Enum):
    """State of the model on a rank before anything is sent."""

    WHOLE = "has it"
    HUB = "asks the hub for its part"
    LACKS = "is sent its part"


@dataclass(frozen=True, slots=True)
class WeightMap:
    """The state of all ranks, and the rank that brings and writes the tensors of each.

    That rank is its ``keeper``: itself, or another rank that sees the same disk.
    """

    holdings: tuple[Holding, ...]
    keepers: tuple[int, ...]
    manifest: ModelManifest

    def to_bring(self, needed: Sequence[set[str]]) -> dict[int, set[str]]:
        """Return the tensors that each keeper brings, if rank r needs ``needed[r]``."""
        wanted: dict[int, set[str]] = {}
        for rank, names in enumerate(needed):
            if names:
                wanted.setdefault(self.keepers[rank], set()).update(names)
        if Holding.WHOLE not in self.holdings:
            # Rank 0 must then have the tensors that others are sent.
            for rank, names in list(wanted.items()):
                if self.holdings[rank] is Holding.LACKS:
                    wanted.setdefault(0, set()).update(names)
        return wanted


@dataclass(slots=True)
class Moved:
    """Bytes that a rank has got, by source."""

    received: int = 0
    downloaded: int = 0
    kept: int = 0

    @property
    def total(self) -> int:
        """Sum of all bytes that the rank has got."""
        return self.received + self.downloaded + self.kept


class Bundle:
    """The files of a model, or of adapters, as this rank sees them.

    ``path``, the ``directory`` or a file in it, is built from. ``weight_map`` is None if every rank
    has the files. ``copy`` and ``repository`` are the keeper's. ``temporary`` files need no names
    once they are open.
    """

    def __init__(
        self,
        transport: Transport,
        directory: Path,
        weight_map: WeightMap | None = None,
        *,
        copy: PartialCopy | None = None,
        repository: Repository | None = None,
        temporary: bool = False,
    ) -> None:
        self.path = directory
        self._directory = directory
        self._transport = transport
        self._map = weight_map
        self._copy = copy
        self._repository = repository
        self._temporary = temporary
        self._present: set[str] = set()

    @property
    def read(self) -> Read | None:
        """Function that reads a partly present file; None if all are whole."""
        return None if self._repository is None else self._repository.part

    def check(self, start: int, stop: int, shape: ModelShape) -> None:
        """Raise ``RuntimeError`` unless all tensors that a stage reads are here."""
        if self._map is None or self._holding is Holding.WHOLE:
            return
        tensors = self._map.manifest.tensors()
        needed = [name for name in tensors if is_needed(name, shape, start, stop)]
        check_present(needed, self._present, tensors, self._directory)

    def fill(
        self, stages: Sequence[tuple[int, int]], shape: ModelShape, reporter: Reporter, what: str
    ) -> None:
        """Bring the tensors of this rank's stages, each a range of layers. All ranks must call it.

        Every rank has built its model before, so that its files are open.
        """
        if self._map is None:
            return
        started = time.monotonic()
        tensors = self._map.manifest.tensors()
        mine: set[str] = set()
        if self._holding is not Holding.WHOLE:
            mine = {
                name
                for name in tensors
                if any(is_needed(name, shape, start, stop) for start, stop in stages)
            }
        moved = self._bring(self._map, tensors, mine, reporter, what)
        self._present = mine
        self._say(moved, time.monotonic() - started, reporter, what)

    def drop_page_cache(self) -> None:
        """Drop the files from the page cache."""
        if self._copy is not None:
            self._copy.drop_page_cache()
        elif self._directory.is_dir():
            drop_files(self._directory.glob("*.safetensors"))

    def close(self) -> None:
        """Remove temporary files, even after loading failed. May be called again."""
        self._unname()
        if self._copy is not None:
            self._copy.close()

    @property
    def _holding(self) -> Holding:
        return Holding.WHOLE if self._map is None else self._map.holdings[self._transport.rank]

    def _unname(self) -> None:
        """Unlink temporary files, so that they vanish with this process, however it ends.

        Open files stay: MLX reads them, and the copy is written.
        """
        if self._temporary and self._copy is not None:
            shutil.rmtree(self._copy.directory, ignore_errors=True)

    def _bring(
        self,
        weight_map: WeightMap,
        tensors: Mapping[str, PlacedTensor],
        mine: set[str],
        reporter: Reporter,
        what: str,
    ) -> Moved:
        """Get the tensors ``mine`` from caches, from the hub and over MPI, in this order."""
        transport, me, loading = self._transport, self._transport.rank, f"loading {what}"
        wanted = weight_map.to_bring(transport.all_gather(mine, loading)).get(me, set())
        self._unname()  # all ranks have built their models

        there, missing = on_all_ranks(transport, loading, lambda: self._compare(wanted))
        moved = Moved(kept=_nbytes(there, tensors))

        on_all_ranks(transport, loading, lambda: self._download(missing, tensors, reporter, what))
        if self._repository is not None:
            moved.downloaded = _nbytes(missing, tensors)
            there, missing = there | missing, set()

        everyone = transport.all_gather((there, missing), loading)
        transfers = plan_transfers(
            tensors,
            [rank for rank, held in enumerate(weight_map.holdings) if held is Holding.WHOLE],
            {rank: has for rank, (has, _) in enumerate(everyone) if has},
            {rank: lacks for rank, (_, lacks) in enumerate(everyone) if lacks},
        )
        through_me = [transfer.name for transfer in transfers if me in transfer.chain]
        with ExitStack() as stack:
            bar = stack.enter_context(_bar(reporter, what, _nbytes(through_me, tensors)))
            advance = _Progress(bar, PageCache(self.drop_page_cache))
            moved.received = send_tensors(
                transport, transfers, tensors, self._reader(stack), self._copy, advance
            )
        if self._copy is not None:
            self._copy.flush()
        # A rank that reads another rank's copy waits for it.
        transport.barrier(loading)
        return moved

    def _compare(self, wanted: set[str]) -> tuple[set[str], set[str]]:
        """Return (there, missing) of this keeper; ``UserError`` if there is no room for it."""
        if self._copy is None:
            return set(), set()
        sound = self._copy.sound(wanted)
        self._copy.check_room(wanted - sound)
        return sound, wanted - sound

    def _download(
        self,
        missing: set[str],
        tensors: Mapping[str, PlacedTensor],
        reporter: Reporter,
        what: str,
    ) -> None:
        if self._repository is None or self._copy is None or not missing:
            return
        with _bar(reporter, what, _nbytes(missing, tensors)) as bar:
            advance = _Progress(bar, PageCache(self.drop_page_cache))
            download(self._repository, self._copy, missing, tensors, advance)

    def _reader(self, stack: ExitStack) -> Read:
        """Return the reader of this rank's own files, which opens each once."""
        if self._copy is not None:
            return self._copy.read
        opened: dict[str, int] = {}

        def read(file: str, offset: int, count: int) -> bytes:
            if file not in opened:
                opened[file] = os.open(self._directory / file, os.O_RDONLY)
                stack.callback(os.close, opened[file])
            return read_exactly(opened[file], offset, count, str(self._directory / file))

        return read

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
            f"{self._transport.name(rank)} {gibibytes(m.total)}"
            for rank, m in enumerate(everyone)
            if m != Moved()
        ]
        if parts:
            reporter.say(f"{what}: {', '.join(parts)} in {seconds:.1f} s ({', '.join(who)})")


def _nbytes(names: Collection[str], tensors: Mapping[str, PlacedTensor]) -> int:
    return sum(tensors[name].nbytes for name in names)


def _bar(reporter: Reporter, what: str, nbytes: int) -> AbstractContextManager[Bar | None]:
    """Return a progress bar in megabytes; none if this rank has nothing to do."""
    if not nbytes:
        return nullcontext()
    return reporter.bar(f"{what}, MB", max(1, nbytes // MEGABYTE))


class _Progress:
    """A function of received bytes that advances a bar in megabytes, and the page cache."""

    def __init__(self, bar: Bar | None, page_cache: PageCache) -> None:
        self._bar = bar
        self._page_cache = page_cache
        self._nbytes = 0

    def __call__(self, nbytes: int) -> None:
        before = self._nbytes // MEGABYTE
        self._nbytes += nbytes
        self._page_cache.count(nbytes)
        if self._bar is not None and self._nbytes // MEGABYTE > before:
            self._bar.advance(self._nbytes // MEGABYTE - before)


class Weights:
    """A model and its additions, on every rank. Must be closed, even after loading failed."""

    def __init__(self, model: Bundle, adapters: Bundle | None) -> None:
        self._bundles = {"weights": model} | ({"adapters": adapters} if adapters else {})
        self.path = model.path
        self.read = model.read
        self.adapters = None if adapters is None else str(adapters.path)

    def bring(
        self, stages: Sequence[tuple[int, int]], shape: ModelShape, reporter: Reporter
    ) -> None:
        """Bring the tensors of this rank's stages, each a range of layers. All ranks must call it.

        All ranks have built the model, lazily, from ``path`` and ``adapters``, which may be gone
        afterwards.
        """
        for what, bundle in self._bundles.items():
            bundle.fill(stages, shape, reporter, what)
        for start, stop in stages:
            for bundle in self._bundles.values():
                bundle.check(start, stop, shape)

    def load(self, parts: Sequence[Slice], shape: ModelShape, reporter: Reporter) -> None:
        """Read this rank's slices, once their tensors are here. All ranks must call it.

        All ranks have built the model, lazily, from ``path`` and ``adapters``, which may be gone
        afterwards.
        """
        self.bring([(part.start, part.stop) for part in parts], shape, reporter)
        page_cache = PageCache(self.drop_page_cache)
        for part in parts:
            part.load(page_cache.count)
        page_cache.clear()
        self.close()

    def drop_page_cache(self) -> None:
        """Drop the files from the page cache."""
        for bundle in self._bundles.values():
            bundle.drop_page_cache()

    def close(self) -> None:
        """Close model and adapters. May be called again."""
        for bundle in self._bundles.values():
            bundle.close()

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
