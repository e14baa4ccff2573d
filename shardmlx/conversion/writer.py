"""Compute lazy tensors one by one; write each where its file has room for it, while the next is
computed."""

from __future__ import annotations

import hashlib
import signal
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain

import mlx.core as mx

from shardmlx.checkpoint.export import TensorSpec
from shardmlx.common.digests import Digest
from shardmlx.common.formatting import plural
from shardmlx.common.reporter import Reporter
from shardmlx.conversion.lazy_model import LazyModel
from shardmlx.distributed.messages import buffer_of
from shardmlx.distributed.signals import Signals
from shardmlx.errors import Stopped
from shardmlx.loading.page_cache import PageCache
from shardmlx.loading.partial_copy import PartialCopy

_PIECE = 4 << 20
_MEGABYTE = 10**6


def new_digest() -> Digest:
    """Return an empty digest for the record: SHA-256, for which processors have instructions."""
    return hashlib.sha256()


def write_tensors(
    model: LazyModel,
    files: Mapping[str, Sequence[TensorSpec]],
    done: Collection[str],
    copy: PartialCopy,
    reporter: Reporter,
    bring: Callable[[str], None],
    drop_source: Callable[[], None],
    *,
    may_stop: bool,
) -> None:
    """Write the tensors of ``files`` that are not ``done``; ``model`` is used up.

    ``bring`` is called before a tensor is computed, ``drop_source`` to drop what the page cache has
    of the source. Raises ``Stopped`` after Ctrl-C, if it ``may_stop``; `OSError` where the disk
    does not take a tensor.
    """
    specs = list(chain.from_iterable(files.values()))
    total = max(1, sum(spec.nbytes for spec in specs) // _MEGABYTE)
    written = sum(spec.nbytes for spec in specs if spec.name in done)

    def drop() -> None:
        drop_source()
        copy.drop_page_cache()

    page_cache = PageCache(drop)
    for name in model.weights.keys() - {spec.name for spec in specs}:
        del model.weights[name]  # of other ranks
    with (
        _stops(may_stop) as stop,
        _behind(copy, max((spec.nbytes for spec in specs), default=0)) as behind,
        reporter.bar("export, MB", total, written // _MEGABYTE) as bar,
    ):
        for number, spec in enumerate(specs):
            array = model.weights.pop(spec.name)
            if spec.name in done:
                continue
            if signals := stop():
                behind.finish()
                copy.flush()
                raise Stopped(
                    signals[0],
                    f"stopped after {number} of {plural(len(specs), 'tensor')}: the same command "
                    "goes on",
                )
            bring(spec.name)
            behind.make_room(spec.nbytes)
            array = mx.contiguous(array)
            mx.eval(array)
            behind.put(spec.name, array)
            del array
            mx.clear_cache()
            written += spec.nbytes
            page_cache.count(2 * spec.nbytes)
            bar.show(written // _MEGABYTE, total)
        behind.finish()
    copy.flush()
    page_cache.clear()


class _Behind:
    """A thread that writes tensors, and one that computes their digests, while the next ones are
    computed. All that wait to be written have ``most`` bytes, or are one tensor."""

    def __init__(self, copy: PartialCopy, most: int) -> None:
        self._copy, self._most = copy, most
        self._waiting: deque[tuple[int, Future[None]]] = deque()
        self._nbytes = 0
        self.writer, self.hasher = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def make_room(self, nbytes: int) -> None:
        """Return once a tensor of so many bytes may be computed. Raises what a write raised."""
        while self._waiting and self._nbytes + nbytes > self._most:
            self._wait()

    def put(self, name: str, array: mx.array) -> None:
        """Write an evaluated tensor soon, and record it then."""
        data = buffer_of(array)
        digest = self.hasher.submit(_digest, data)
        self._waiting.append((len(data), self.writer.submit(self._write, name, data, digest)))
        self._nbytes += len(data)

    def finish(self) -> None:
        """Return once all is written. Raises what a write raised."""
        while self._waiting:
            self._wait()

    def _wait(self) -> None:
        nbytes, written = self._waiting.popleft()
        written.result()
        self._nbytes -= nbytes

    def _write(self, name: str, data: memoryview, digest: Future[bytes]) -> None:
        place = self._copy.place(name)
        for start, piece in _pieces(data):
            self._copy.write(place.file, place.start + start, piece)
        self._copy.add(name, digest.result())


@contextmanager
def _behind(copy: PartialCopy, most: int) -> Iterator[_Behind]:
    behind = _Behind(copy, most)
    with behind.hasher, behind.writer:
        try:
            yield behind
        except BaseException:
            behind.writer.shutdown(cancel_futures=True)
            raise


def _digest(data: memoryview) -> bytes:
    digest = new_digest()
    for _, piece in _pieces(data):
        digest.update(piece)
    return digest.digest()


def _pieces(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield offset and bytes, piece by piece."""
    for start in range(0, len(data), _PIECE):
        yield start, data[start : start + _PIECE]


@contextmanager
def _stops(may_stop: bool) -> Iterator[Callable[[], list[int]]]:
    """Give out a function that returns the signals which asked this process to stop."""
    if not may_stop:
        yield list
        return
    signals = Signals()
    try:
        yield lambda: [each for each in signals.wait(0.0) if each != signal.SIGCONT]
    finally:
        signals.close()
