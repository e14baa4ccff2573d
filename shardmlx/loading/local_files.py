"""The files of a model, or of adapters, as one rank has them: found, copied, or sent by others.

A rank without the model builds it from a copy that has only the heads of its files, and receives
the tensors of its stages: from rank 0, from another rank with the model, or from a replica that
relays them. Rank 0 decides which way, see ``discovery`` and ``transfer``.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from shardmlx.common.environment import cache_directory
from shardmlx.common.reporter import Reporter
from shardmlx.common.units import MEGABYTE
from shardmlx.distributed.byte_stream import Incoming, Outgoing
from shardmlx.distributed.crew import takes_long, together
from shardmlx.distributed.shared_disks import Disks, find_disks
from shardmlx.distributed.tags import OBJECT_TAG
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError, one_line
from shardmlx.loading.hub_download import (
    download,
    fetch_small_files,
    find_model,
    open_repository,
    whole_snapshot,
)
from shardmlx.loading.manifest import ModelManifest, Transfer, fingerprint, parts_of_shares
from shardmlx.loading.partial_copy import PartialCopy
from shardmlx.modelfiles.hub import Repository
from shardmlx.modelfiles.parts import read_shape
from shardmlx.modelfiles.published_packing import check_packing
from shardmlx.modelfiles.safetensors_header import (
    MODEL_FILES,
    PlacedTensor,
    ReadBytes,
    check_weights,
    read_bytes,
)
from shardmlx.modelfiles.sources import CONFIG_FILE
from shardmlx.models.sizes.config_reader import check_layout, read_config
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.models.sizes.shares import TensorShares

Advance = Callable[[int], None]
"""Function that is told how many more bytes have come."""


class Holding(Enum):
    """State of the model on a rank before anything is sent."""

    WHOLE = "has it"
    HUB = "asks the hub for its part"
    LACKS = "is sent its part"


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """The files that a rank has of a model or of adapters. ``identity`` names the content, ``why``
    says why it is missing."""

    holding: Holding
    identity: str = ""
    path: Path | None = None
    repository: Repository | None = None
    manifest: ModelManifest | None = None
    files: Sequence[str] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The files that rank 0 has found, for the others to look for.

    ``name`` is a directory, or else a repository of the hub at ``revision``, with the files of
    ``commit`` if rank 0 could ask the hub. ``file`` is the only one that counts, if it is given.
    """

    name: str
    identity: str
    is_directory: bool
    revision: str | None = None
    commit: str | None = None
    file: str | None = None


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The way in which ranks get what they lack: ``holdings`` are the states of all ranks, and
    ``keepers`` of tensors each one's: itself, or one at its disk. Copies are made in the directory
    ``cache``."""

    manifest: ModelManifest
    holdings: tuple[Holding, ...]
    keepers: tuple[int, ...]
    cache: str | None

    @property
    def is_scattered(self) -> bool:
        """True if tensors may be sent in pieces that lie apart, as the hub sends none."""
        return Holding.HUB not in self.holdings

    def keeps(self, rank: int) -> bool:
        """Return whether the copy of a rank stays for later runs: where that is asked for, or the
        copy was downloaded."""
        holding = self.holdings[rank]
        return holding is Holding.HUB or (self.cache is not None and holding is Holding.LACKS)


class LocalFiles:
    """The files of a model, or of adapters, on this rank. Must be closed, also after a failure.

    Methods that name other ranks are called on all of them at the same time.
    """

    def __init__(self, transport: Transport, reporter: Reporter) -> None:
        self._transport = transport
        self._reporter = reporter
        self.path = Path()
        """The directory, or the file in it, from which the model or the adapters are built."""
        self.plan: CopyPlan | None = None
        """The way in which ranks get what they lack; None if every rank has the files."""
        self.found: FoundFiles | None = None
        self._copy: PartialCopy | None = None
        self._repository: Repository | None = None
        self._tensors: Mapping[str, PlacedTensor] = {}
        self._missing: set[str] = set()

    def report_to(self, reporter: Reporter) -> None:
        """Show progress by this reporter from now on."""
        self._reporter = reporter

    @property
    def read(self) -> ReadBytes | None:
        """Function that reads a partly present file; None if all are whole."""
        return None if self._repository is None else self._repository.part

    # Finding them.

    def use(self, path: Path) -> None:
        """Take the files at a path that all ranks have."""
        self.path = path

    def use_found(self) -> None:
        """Take the files that this rank has found, as all others take theirs."""
        assert self.found is not None, "it was looked for"
        assert self.found.path is not None, "it has all files"
        self.path = self.found.path

    def enter(self, file: str) -> None:
        """Take one file of the directory."""
        self.path /= file

    @takes_long
    def take_whole(self, model: str, revision: str | None) -> None:
        """Find a whole model, and download missing files once its config.json says that it can
        run, as mlx-lm does. Raises ``UserError``."""
        if not Path(model).exists():
            open_checked(model, revision)
        self.path = find_model(model, revision)

    @takes_long
    def look(self, wanted: Wanted | None) -> FoundFiles:
        """Look for what rank 0 has found; return it without what other ranks do not need. Without
        ``wanted`` a rank is sent all that it lacks. Rank 0 has ``found`` it before."""
        if self.found is None:
            self.found = FoundFiles(Holding.LACKS)
            try:
                if wanted is not None:
                    self.found = _look(wanted)
            except (UserError, OSError) as error:
                self.found = FoundFiles(Holding.LACKS, why=one_line(error))
        return FoundFiles(self.found.holding, self.found.identity, why=self.found.why)

    @together
    def see_disks(self, cache: str | None) -> Disks:
        """Find out with the other ranks which of them share the disk on which copies are made."""
        base, is_kept = self._base(cache)
        return find_disks(self._transport, base, make=is_kept)

    @takes_long
    def make_copy(self, plan: CopyPlan) -> str | None:
        """Make this rank's copy, if it keeps one; return its directory. Raises ``UserError``."""
        assert self.found is not None, "it was looked for"
        me = self._transport.rank
        self.plan = plan
        if self.found.holding is Holding.WHOLE or plan.keepers[me] != me:
            return None
        base, is_kept = self._base(plan.cache)
        directory = base / plan.manifest.key
        if not is_kept:
            directory = Path(tempfile.mkdtemp(prefix="shardmlx-weights-", dir=base))
        try:
            self._copy = PartialCopy(directory, plan.manifest, kept=is_kept)
        except BaseException:
            if not is_kept:
                shutil.rmtree(directory, ignore_errors=True)
            raise
        if me == 0 and self.found.repository is not None:
            fetch_small_files(self.found.repository, directory)
        return str(directory)

    def use_copies(self, places: Sequence[str | None]) -> None:
        """Take the files of this rank, or of its keeper's copy, where ``places`` are all copies."""
        assert self.plan is not None, "a copy was made by it"
        assert self.found is not None, "it was looked for"
        place = places[self.plan.keepers[self._transport.rank]]
        self.path = self.found.path or Path(str(place))
        if self.found.holding is Holding.HUB:
            self._repository = self.found.repository

    def _base(self, cache: str | None) -> tuple[Path, bool]:
        """Return the directory in which this rank would make a copy, and whether it stays."""
        assert self.found is not None, "it was looked for"
        is_asked_for = cache is not None and self.found.holding is Holding.LACKS
        if not is_asked_for and self.found.holding is not Holding.HUB:
            return Path(tempfile.gettempdir()), False
        return cache_directory("weights") if cache is None else Path(cache).absolute(), True

    # Bringing tensors.

    @takes_long
    def compare(
        self, wanted: Sequence[set[str]], shape: ModelShape, shares: TensorShares
    ) -> tuple[set[str], set[str]]:
        """Return which of the tensors that this rank shall keep, ``wanted[rank]``, its copy has
        undamaged, and which it lacks. Raises ``UserError`` without room for them.

        All ranks have built their models, so temporary files are unlinked: they vanish with this
        process, and open ones stay.
        """
        self._unlink()
        assert self.plan is not None, "there is something to bring"
        self._tensors = placed_tensors(self.plan, shape, shares)
        if self._copy is None:
            return set(), set()
        self._copy.tensors = self._tensors
        mine = wanted[self._transport.rank]
        sound = self._copy.sound(mine)
        self._missing = mine - sound
        self._copy.check_room(self._missing)
        return sound, self._missing

    @takes_long
    def download_missing(self, what: str) -> int:
        """Bring from the hub what this rank's copy lacks; return the bytes. ``UserError`` if the
        hub, or the disk, refuses."""
        if self._repository is None or self._copy is None or not self._missing:
            return 0
        nbytes = sum(self._tensors[name].nbytes for name in self._missing)
        with _progress(self._reporter, what, nbytes) as advance:
            download(self._repository, self._copy, self._missing, self._tensors, advance)
        return nbytes

    @together
    @takes_long
    def exchange(self, transfers: Sequence[Transfer], what: str) -> int:
        """Play this rank's part in ``transfers`` with the other ranks; return the bytes received.
        Raises ``RuntimeError`` on damage."""
        mine = [each for each in transfers if self._transport.rank in each.chain]
        nbytes = sum(self._tensors[transfer.name].nbytes for transfer in mine)
        directory = self.path.parent if self.path.is_file() else self.path
        read = partial(read_bytes, directory) if self._copy is None else self._copy.read
        received = 0
        with _progress(self._reporter, what, nbytes) as advance:
            for transfer in mine:
                received += _pass_on(
                    self._transport,
                    transfer,
                    self._tensors[transfer.name],
                    read,
                    self._copy,
                    advance,
                )
        if self._copy is not None:
            self._copy.flush()
        return received

    def close(self) -> None:
        """Remove temporary files, even after loading failed. May be called again."""
        self._unlink()
        if self._copy is not None:
            self._copy.close()

    def _unlink(self) -> None:
        if self.plan is None or self._copy is None or self.plan.keeps(self._transport.rank):
            return
        shutil.rmtree(self._copy.directory, ignore_errors=True)


def placed_tensors(
    plan: CopyPlan, shape: ModelShape, shares: TensorShares
) -> dict[str, PlacedTensor]:
    """Return all tensors of a model, and the parts of them that ranks with ``shares`` read."""
    tensors = plan.manifest.tensors()
    for of_rank in parts_of_shares(tensors, shape, shares, scattered=plan.is_scattered):
        tensors |= dict(of_rank.values())
    return tensors


def open_checked(model: str, revision: str | None) -> Repository | None:
    """Open a repository that can run, or ``UserError``; None if ``find_model`` shall see to it."""
    try:
        repository = open_repository(model, revision)
    except UserError:
        return None
    if repository is None or repository.revision is None:
        return None
    check_layout(repository.name, repository.files)
    if CONFIG_FILE in repository.files:
        check_weights(repository.name, repository.files)
        config = read_config(repository.fetch(CONFIG_FILE).parent)
        check_packing(config, read_shape(config))
    return repository


def whole_files(path: Path, files: Sequence[str] | None = None) -> FoundFiles:
    """Return the files of a directory that has all of them; by default all of a model."""
    if files is None:
        files = sorted(file.name for file in path.glob(MODEL_FILES))
    return FoundFiles(Holding.WHOLE, fingerprint(path, files), path, files=files)


def _look(wanted: Wanted) -> FoundFiles:
    """Look here, or on the hub, for what rank 0 has found."""
    path = Path(wanted.name)
    if wanted.file is not None:
        there = [wanted.file] if (path / wanted.file).is_file() else []
        return _same(whole_files(path, there), wanted.identity)
    if wanted.is_directory:
        return _same(whole_files(path), wanted.identity)
    snapshot = whole_snapshot(wanted.name, wanted.commit or wanted.revision)
    if wanted.commit is None and snapshot is not None:
        return _same(whole_files(snapshot), wanted.identity)
    if snapshot is not None:
        return FoundFiles(Holding.WHOLE, wanted.identity, snapshot)
    if wanted.commit is None:
        return FoundFiles(Holding.LACKS)
    repository = open_repository(wanted.name, wanted.commit)
    if repository is None:
        return FoundFiles(Holding.LACKS)
    return FoundFiles(Holding.HUB, wanted.identity, None, repository)


def _same(own: FoundFiles, identity: str) -> FoundFiles:
    """Return a rank's ``own`` files if they are those of rank 0."""
    if not own.files:
        return FoundFiles(Holding.LACKS, why=f"{own.path} is not there, or has no weights")
    if own.identity != identity:
        why = f"what is in {own.path} differs from rank 0's"
        return FoundFiles(Holding.LACKS, own.identity, why=why)
    return own


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
    incoming = None
    following = None
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
