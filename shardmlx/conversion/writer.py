"""Compute lazy tensors one by one; write each into its file while the next is computed."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import mlx.core as mx

from shardmlx.common.digests import Crc32
from shardmlx.common.formatting import plural
from shardmlx.common.reporter import Reporter
from shardmlx.common.units import MEGABYTE
from shardmlx.conversion.experts import part_name
from shardmlx.conversion.lazy_model import LazyModel
from shardmlx.conversion.output import OutputDirectory
from shardmlx.distributed.messages import buffer_of
from shardmlx.distributed.signals import Signals
from shardmlx.errors import Stopped
from shardmlx.loading.manifest import ModelManifest
from shardmlx.loading.partial_copy import PartialCopy

_PIECE = 4 << 20
_AHEAD = 8 * _PIECE
"""Bytes of an unchanged tensor that may wait to be written."""


def write_files(
    output: OutputDirectory,
    model: LazyModel,
    shards: ModelManifest,
    reporter: Reporter,
    bring: Callable[[str], None],
    *,
    goes_on: bool,
) -> None:
    """Write the files, using up ``model``; ``bring`` is called before a tensor, or an expert, is
    computed. Raises ``UserError``, or ``Stopped`` after Ctrl-C."""
    copy = PartialCopy(output.weights, shards, kept=True, option="-o", new_digest=Crc32)
    with closing(copy):
        done = copy.sound(copy.tensors) if goes_on else set()
        if done:
            count = plural(len(copy.tensors), "tensor")
            reporter.say(f"going on: {len(done)} of {count} are written")
        for name in done:
            del model.weights[name]
        written = copy.nbytes(done)
        total = max(1, shards.nbytes // MEGABYTE)
        most = max((_step_bytes(model, name) for name in model.weights), default=0)

        def begin(nbytes: int, room: int = most) -> None:
            """Wait until so many bytes may be computed, and fit beside those that wait."""
            if stops := [each for each in signals.wait(0.0) if each != signal.SIGCONT]:
                background.finish()
                copy.flush()
                raise Stopped(
                    stops[0],
                    f"stopped after {written // MEGABYTE} of {total} MB: the same command goes on",
                )
            background.make_room(nbytes, room)

        try:
            with (
                closing(Signals()) as signals,
                _BackgroundWriter(copy) as background,
                reporter.bar("export, MB", total, written // MEGABYTE) as bar,
            ):
                for tensor in copy.tensors:
                    for name, data in _computed(model, tensor, bring, begin):
                        background.put(name, data)
                        written += len(data)
                        del data  # no two steps in memory here
                        bar.show(written // MEGABYTE, total)
                background.finish()
            copy.flush()
        except OSError as error:
            raise output.not_written(error, shards.nbytes) from None


def _computed(
    model: LazyModel, tensor: str, bring: Callable[[str], None], begin: Callable[..., None]
) -> Iterator[tuple[str, memoryview]]:
    """Yield the bytes of a tensor in parts, in order; those of experts come with the tensors that
    are computed with them. ``begin`` is called before each step, with its bytes, and with an
    unusual limit of bytes that may wait to be written."""
    if tensor not in model.weights:
        return
    step = _step_bytes(model, tensor)
    array = model.weights.pop(tensor)
    if (stored := model.stored.get(tensor)) is not None:
        del array
        bring(tensor)
        for start in range(0, stored.nbytes, step):
            count = min(step, stored.nbytes - start)
            begin(count, _AHEAD)
            yield tensor, memoryview(stored.read(start, count))
    elif (experts := model.experts.get(tensor)) is not None:
        names = {tensor, *(n for n in model.weights if model.experts.get(n) is experts)}
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
        bring(tensor)
        array = mx.contiguous(array)
        mx.eval(array)
        yield tensor, buffer_of(array)
        del array
        mx.clear_cache()


def _step_bytes(model: LazyModel, tensor: str) -> int:
    """Return the bytes of a tensor that are computed, or read, in one step."""
    if tensor in model.stored:
        return min(model.weights[tensor].nbytes, _PIECE) or 1
    if (experts := model.experts.get(tensor)) is not None:
        return sum(array.nbytes for array in experts.like().values())
    return model.weights[tensor].nbytes


class _BackgroundWriter:
    """Threads beside the computation: one digests tensors, one writes, one records and syncs."""

    def __init__(self, copy: PartialCopy) -> None:
        self._copy = copy
        self._waiting: deque[tuple[int, Future[None]]] = deque()
        self._nbytes = 0
        self._begun: dict[str, tuple[Crc32, int]] = {}
        """The digest and the size of what was put of a tensor."""
        self._recorded: deque[Future[None]] = deque()
        self._writer, self._hasher, self._recorder = (ThreadPoolExecutor(1) for _ in range(3))

    def __enter__(self) -> _BackgroundWriter:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        for thread in self._writer, self._hasher, self._recorder:
            thread.shutdown(cancel_futures=kind is not None)

    def make_room(self, nbytes: int, room: int) -> None:
        """Wait until so many bytes fit into ``room``, or none wait. Raises a write's error."""
        while self._waiting and self._nbytes + nbytes > room:
            self._wait()

    def put(self, name: str, data: memoryview) -> None:
        """Write the next bytes of a tensor soon; record it once all are written."""
        digest, start = self._begun.get(name) or (Crc32(), 0)
        self._begun[name] = digest, start + len(data)
        hashed = self._hasher.submit(digest.update, data)
        written = self._writer.submit(self._write, name, start, data, digest, hashed)
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
        self, name: str, start: int, data: memoryview, digest: Crc32, hashed: Future[None]
    ) -> None:
        place = self._copy.tensors[name]
        for offset in range(0, len(data), _PIECE):
            piece = data[offset : offset + _PIECE]
            self._copy.write(place.file, place.start + start + offset, piece)
        hashed.result()
        if start + len(data) >= place.nbytes:
            self._recorded.append(self._recorder.submit(self._copy.add, name, digest.digest()))
