"""Compute lazy tensors one by one, and write each where its file has room for it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import mlx.core as mx

from shardmlx.checkpoint.export import TensorSpec
from shardmlx.common.digests import new_digest
from shardmlx.common.formatting import plural
from shardmlx.common.reporter import Reporter
from shardmlx.conversion.lazy_model import LazyModel
from shardmlx.distributed.messages import buffer_of
from shardmlx.distributed.signals import Signals
from shardmlx.errors import Stopped
from shardmlx.loading.page_cache import PageCache
from shardmlx.loading.partial_copy import PartialCopy
from shardmlx.modelfiles.model_files import PlacedTensor

_PIECE = 4 << 20
_MEGABYTE = 10**6


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
    with _stops(may_stop) as stop, reporter.bar("export, MB", total, written // _MEGABYTE) as bar:
        for number, spec in enumerate(specs):
            array = model.weights.pop(spec.name)
            if spec.name in done:
                continue
            if signals := stop():
                copy.flush()
                raise Stopped(
                    signals[0],
                    f"stopped after {number} of {plural(len(specs), 'tensor')}: the same command "
                    "goes on",
                )
            bring(spec.name)
            array = mx.contiguous(array)
            mx.eval(array)
            copy.add(spec.name, _write(copy, copy.place(spec.name), buffer_of(array)))
            del array
            mx.clear_cache()
            written += spec.nbytes
            page_cache.count(2 * spec.nbytes)
            bar.show(written // _MEGABYTE, total)
    copy.flush()
    page_cache.clear()


def _write(copy: PartialCopy, place: PlacedTensor, data: memoryview) -> bytes:
    """Write a tensor's bytes; return their digest."""
    digest = new_digest()
    for start in range(0, len(data), _PIECE):
        piece = data[start : start + _PIECE]
        copy.write(place.file, place.start + start, piece)
        digest.update(piece)
    return digest.digest()


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
