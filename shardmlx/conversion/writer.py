"""Compute lazy tensors one by one; write each into its file while the next is computed."""

from __future__ import annotations

import signal
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import mlx.core as mx
import numpy as np

from shardmlx.checkpoint.export import TensorSpec
from shardmlx.common.digests import Digest
from shardmlx.common.reporter import Reporter
from shardmlx.common.units import MEGABYTE
from shardmlx.conversion.experts import part_name
from shardmlx.conversion.lazy_model import LazyModel
from shardmlx.distributed.messages import buffer_of
from shardmlx.distributed.signals import Signals
from shardmlx.errors import Stopped
from shardmlx.loading.page_cache import PageCache
from shardmlx.loading.partial_copy import PartialCopy

_PIECE = 4 << 20
_AHEAD = 8 * _PIECE
"""Bytes of a tensor that the system reads ahead, and that may wait to be written."""


class Crc32:
    """A CRC-32 as a digest for the record. It finds half written or damaged tensors in a quarter of
    SHA-256's time: copying a model takes little more than its digests."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4)


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

    ``bring`` is called before a tensor, or an expert of it, is computed; ``drop_source`` to clear
    the source from the page cache. Raises ``Stopped`` after Ctrl-C, if it ``may_stop``; `OSError`
    if the disk refuses a tensor.
    """
    specs = {spec.name: spec for spec in chain.from_iterable(files.values())}
    total = max(1, sum(spec.nbytes for spec in specs.values()) // MEGABYTE)
    written = sum(spec.nbytes for spec in specs.values() if spec.name in done)

    def drop() -> None:
        drop_source()
        copy.drop_page_cache()

    page_cache = PageCache(drop)
    for name in model.weights.keys() - (specs.keys() - set(done)):
        del model.weights[name]  # other ranks' tensors, or written ones
    most = max((_step_bytes(model, spec) for spec in specs.values()), default=0)
    with (
        _stops(may_stop) as stop,
        _behind(copy) as behind,
        reporter.bar("export, MB", total, written // MEGABYTE) as bar,
    ):

        def begin(nbytes: int, room: int = most) -> None:
            """Wait until so many bytes may be computed, and fit beside those that wait."""
            if signals := stop():
                behind.finish()
                copy.flush()
                raise Stopped(
                    signals[0],
                    f"stopped after {written // MEGABYTE} of {total} MB: the same command goes on",
                )
            behind.make_room(nbytes, room)

        for spec in specs.values():
            for name, data in _computed(model, spec, bring, begin):
                behind.put(name, data)
                written += len(data)
                page_cache.count(2 * len(data))
                del data  # no two steps in memory here
                bar.show(written // MEGABYTE, total)
        behind.finish()
    copy.flush()
    page_cache.clear()


def _computed(
    model: LazyModel, spec: TensorSpec, bring: Callable[[str], None], begin: Callable[..., None]
) -> Iterator[tuple[str, memoryview]]:
    """Yield the bytes of a tensor in parts, in order; those of experts come with the tensors that
    are computed with them. ``begin`` is called before each step, with its bytes, and with an
    unusual limit of bytes that may wait to be written."""
    array = model.weights.pop(spec.name, None)
    if array is None:
        return
    step = _step_bytes(model, spec)
    if (stored := model.stored.get(spec.name)) is not None:
        del array
        bring(spec.name)
        stored.expect(0, _AHEAD)
        for start in range(0, stored.nbytes, step):
            count = min(step, stored.nbytes - start)
            begin(count, _AHEAD)
            stored.expect(start + _AHEAD, step)
            data = np.empty(count, np.uint8).data
            stored.read(start, data)
            yield spec.name, data
    elif (experts := model.experts.get(spec.name)) is not None:
        names = {spec.name, *(n for n in model.weights if model.experts.get(n) is experts)}
        for name in names:
            model.weights.pop(name, None)
            del model.experts[name]
        del array
        for number in range(experts.count):
            begin(step)
            bring(part_name(experts.path, number))
            arrays = {n: mx.contiguous(a) for n, a in experts.arrays(number).items() if n in names}
            mx.eval(arrays)
            for name in list(arrays):
                yield name, buffer_of(arrays.pop(name))
            mx.clear_cache()
    else:
        begin(step)
        bring(spec.name)
        array = mx.contiguous(array)
        mx.eval(array)
        yield spec.name, buffer_of(array)
        del array
        mx.clear_cache()


def _step_bytes(model: LazyModel, spec: TensorSpec) -> int:
    """Return the bytes of a tensor that are computed, or read, in one step."""
    if spec.name in model.stored:
        return min(spec.nbytes, _PIECE) or 1
    if (experts := model.experts.get(spec.name)) is not None:
        return sum(array.nbytes for array in experts.like().values())
    return spec.nbytes


class _Behind:
    """Three threads beside the computation: one writes tensors, one computes their digests, and one
    records written tensors, and waits for the disk now and then."""

    def __init__(self, copy: PartialCopy) -> None:
        self._copy = copy
        self._waiting: deque[tuple[int, Future[None]]] = deque()
        self._nbytes = 0
        self._begun: dict[str, _Begun] = {}
        self._recorded: deque[Future[None]] = deque()
        self.writer, self.hasher = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.recorder = ThreadPoolExecutor(1)

    def make_room(self, nbytes: int, room: int) -> None:
        """Wait until so many bytes fit into ``room`` with those that wait to be written, or none
        wait. Raises a write's error."""
        while self._waiting and self._nbytes + nbytes > room:
            self._wait()

    def put(self, name: str, data: memoryview) -> None:
        """Write the next bytes of a tensor soon; record it once all are written."""
        begun = self._begun.setdefault(name, _Begun(Crc32()))
        hashed = self.hasher.submit(begun.digest.update, data)
        start, begun.size = begun.size, begun.size + len(data)
        is_last = begun.size >= self._copy.place(name).nbytes
        written = self.writer.submit(self._write, name, start, data, hashed, is_last)
        self._waiting.append((len(data), written))
        self._nbytes += len(data)

    def finish(self) -> None:
        """Wait until all is written and recorded. Raises a write's error."""
        while self._waiting:
            self._wait()
        while self._recorded:
            self._recorded.popleft().result()

    def _wait(self) -> None:
        while self._recorded and self._recorded[0].done():
            self._recorded.popleft().result()
        nbytes, written = self._waiting.popleft()
        written.result()
        self._nbytes -= nbytes

    def _write(
        self, name: str, start: int, data: memoryview, hashed: Future[None], is_last: bool
    ) -> None:
        place = self._copy.place(name)
        for offset in range(0, len(data), _PIECE):
            piece = data[offset : offset + _PIECE]
            self._copy.write(place.file, place.start + start + offset, piece)
        hashed.result()
        if is_last:
            digest = self._begun.pop(name).digest.digest()
            self._recorded.append(self.recorder.submit(self._copy.add, name, digest))


@dataclass(slots=True)
class _Begun:
    """A tensor with ``size`` bytes put so far."""

    digest: Digest
    size: int = 0


@contextmanager
def _behind(copy: PartialCopy) -> Iterator[_Behind]:
    behind = _Behind(copy)
    with behind.recorder, behind.hasher, behind.writer:
        try:
            yield behind
        except BaseException:
            behind.writer.shutdown(cancel_futures=True)
            behind.recorder.shutdown(cancel_futures=True)
            raise


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
