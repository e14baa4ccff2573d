"""KV caches of the sequences under way, on one stage.

A sequence has caches of its own during prefill. For decode the caches of a group are merged, a row
for each sequence, by mlx-lm's own functions; sequences join and leave them. A sequence that is
alone in its group keeps its plain caches, which need no masks. Caches of an ended sequence may be
kept, for prompts that begin like it, with copies at borders of what cannot be cut.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, trim_prompt_cache

from shardmlx.errors import UserError, one_line
from shardmlx.inference.prefix_cache import CachedPrefix
from shardmlx.inference.scheduler import Item, ItemKind
from shardmlx.models.runtime.slice import Slice
from shardmlx.models.sizes.kv_cache import CacheQuantisation, parts_of

Caches = list[Any]
"""mlx-lm's cache of each layer. A deep copy of one shares the numbers of its arrays: MLX copies
them only where they are written to while both are still used."""


@dataclass(frozen=True, slots=True)
class KeptCaches:
    """The caches of a kept sequence, and at each border copies of what cannot be cut of them."""

    caches: Caches
    borders: dict[int, list[Caches]]


@dataclass(slots=True)
class _BatchedCaches:
    """The merged caches of a group, one row for each of its ``sequences``."""

    sequences: tuple[int, ...] = ()
    caches: Caches = field(default_factory=list)

    def join(self, sequences: tuple[int, ...], caches: Sequence[Caches]) -> None:
        """Add a row for each of ``sequences``, which had ``caches`` of their own."""
        parts = [self.caches, *caches] if self.sequences else caches
        first_is_batch = len(self.sequences) > 1
        joined = []
        for first, *others in zip(*map(_taken, parts), strict=True):
            if others and first_is_batch:
                first.extend(others[0].merge(others))
            elif others:
                first = first.merge([first, *others])
            joined.append(_evaluated(first) if others else first)
        self.caches = joined
        self.sequences += sequences

    def remove(self, ended: Collection[int], kept: Collection[int]) -> dict[int, Caches]:
        """Take out the rows of ``ended`` sequences, and return the caches of those ``kept``."""
        count = len(self.sequences)
        staying = [row for row, sequence in enumerate(self.sequences) if sequence not in ended]
        if len(staying) == count:
            return {}
        moving = {row: sequence for row, sequence in enumerate(self.sequences) if sequence in kept}
        moved: dict[int, Caches] = {sequence: [] for sequence in moving.values()}
        caches = []
        for layer in _taken(self.caches):
            for row, sequence in moving.items():
                moved[sequence].append(_row(layer, row, count))
            if len(staying) > 1:
                layer.filter(staying)
                caches.append(_evaluated(layer))
            elif staying:
                caches.append(_row(layer, staying[0], count))
        self.sequences = tuple(self.sequences[row] for row in staying)
        self.caches = caches
        return moved


@dataclass
class KVCaches:
    """The caches of all sequences on this stage; ``new`` makes those of one new sequence. With a
    ``quantisation`` no group has more than one sequence."""

    new: Callable[[], Caches]
    quantisation: CacheQuantisation | None = None
    _alone: dict[int, Caches] = field(default_factory=dict)
    _groups: dict[int, _BatchedCaches] = field(default_factory=dict)
    _borders: dict[int, dict[int, list[Caches]]] = field(default_factory=dict)

    def of(self, item: Item) -> Caches:
        """Return the caches that an item's tokens enter, a row a sequence. First ``update``."""
        if item.kind is ItemKind.PREFILL or item.group is None:
            (sequence,) = item.sequences
            return self._quantised(self._alone.setdefault(sequence, self.new()))
        group = self._groups.setdefault(item.group, _BatchedCaches())
        if joining := item.sequences[len(group.sequences) :]:
            group.join(joining, [self._alone.pop(sequence) for sequence in joining])
        if group.sequences != item.sequences:
            raise ValueError(f"a group of {group.sequences} is to be one of {item.sequences}")
        return self._quantised(group.caches)

    def update(self, item: Item) -> None:
        """Cut caches as an item says of what was rejected; keep, copy and drop them as it says of
        the sequences that have left."""
        for sequence, count in item.rejected:
            caches = self._caches_of(sequence)
            if trim_prompt_cache(caches, count) != count:
                raise ValueError(f"caches of sequence {sequence} cannot give back {count} tokens")
        ended = {*item.kept, *item.dropped, *item.put_back}
        for number, group in list(self._groups.items()):
            self._alone |= group.remove(ended, item.kept)
            if not group.sequences:
                del self._groups[number]
        for sequence in item.kept:
            self._quantised(self._alone[sequence])
        for sequence in item.put_back:
            self._drop(sequence)
        if item.prefix is not None:
            self._copy_prefix(item.sequences[0], item.prefix)
        for sequence in item.dropped:
            self._drop(sequence)

    def keep_border(self, item: Item) -> None:
        """Copy what cannot be cut of the caches that an item's tokens have entered, if it ends at a
        border."""
        if item.border:
            (sequence,) = item.sequences
            uncut = [
                [None if can_be_cut(part) else copy.deepcopy(part) for part in parts_of(cache)]
                for cache in self._alone[sequence]
            ]
            self._borders.setdefault(sequence, {})[item.border] = uncut

    def kept(self, sequence: int) -> KeptCaches:
        return KeptCaches(self._alone[sequence], self._borders.get(sequence, {}))

    def restore(self, sequence: int, kept: KeptCaches) -> None:
        """Keep caches that were read for a sequence of this number."""
        self._alone[sequence] = [*map(_evaluated, kept.caches)]
        self._borders[sequence] = kept.borders
        parts = [part for copies in kept.borders.values() for layer in copies for part in layer]
        mx.eval([part.state for part in parts if part is not None])

    def _caches_of(self, sequence: int) -> Caches:
        """Return the caches of a sequence, which shares them with none."""
        groups = (each for each in self._groups.values() if each.sequences == (sequence,))
        group = next(groups, None)
        return self._alone[sequence] if group is None else group.caches

    def _drop(self, sequence: int) -> None:
        self._alone.pop(sequence, None)
        self._borders.pop(sequence, None)

    def _quantised(self, caches: Caches) -> Caches:
        """Quantise those of ``caches`` that have come to the length for it, and return all."""
        if (how := self.quantisation) is not None:
            for i, cache in enumerate(caches):
                if _may_be_quantised(cache) and cache.offset >= how.start:
                    caches[i] = _evaluated(_packed(cache, how))
        return caches

    def _copy_prefix(self, sequence: int, prefix: CachedPrefix) -> None:
        self._alone[sequence] = caches = copy.deepcopy(self._alone[prefix.sequence])
        borders = self._borders.get(prefix.sequence, {})
        self._borders[sequence] = {each: borders[each] for each in prefix.borders}
        if prefix.is_whole:
            return
        uncut = copy.deepcopy(borders.get(prefix.length))
        for i, cache in enumerate(caches):
            kept = uncut[i] if uncut else [None] * len(parts_of(cache))
            parts = [
                cut(part, prefix.length) if copied is None else copied
                for part, copied in zip(parts_of(cache), kept, strict=True)
            ]
            caches[i] = CacheList(*parts) if isinstance(cache, CacheList) else parts[0]


def can_be_cut(cache: Any) -> bool:
    """Tell whether a cache of more tokens can serve for its first ones."""
    return isinstance(cache, (KVCache, QuantizedKVCache))


def cut(cache: Any, length: int) -> Any:
    """Return a cache of one kind, cut to its first tokens if it has more than ``length``."""
    if cache.offset > length and cache.trim(cache.offset - length):
        # Without room for more: a shared array is copied at the next write, room and all.
        cache.keys, cache.values = tree_map(
            lambda array: array[..., :length, :], (cache.keys, cache.values)
        )
    return cache


def _taken(caches: Caches) -> Iterator[Any]:
    """Yield each layer's cache and drop it from ``caches``: a copy of all keys and values at once
    might not fit into memory."""
    caches.reverse()
    while caches:
        yield caches.pop()


def _row(cache: Any, row: int, count: int) -> Any:
    """Return one layer's cache of the sequence in ``row`` of ``count``."""
    if count == 1:
        return cache
    taken = cache.extract(row)
    for part in parts_of(taken):
        if isinstance(part, ArraysCache):
            # A view of a row holds the states of all rows.
            part.cache = [None if each is None else mx.contiguous(each) for each in part.cache]
    return _evaluated(taken)


def _evaluated(cache: Any) -> Any:
    mx.eval(cache.state)
    return cache


def _may_be_quantised(cache: Any) -> bool:
    return isinstance(cache, KVCache) and not cache.empty()


def _packed(cache: Any, how: CacheQuantisation) -> Any:
    return cache.to_quantized(group_size=how.group_size, bits=how.bits)


def check_limited(part: Slice, most: int, model_type: str) -> None:
    """Raise ``UserError`` if ``part`` takes no caches of at most so many tokens. Nothing is
    computed, no weight read."""
    with _refused(f"--max-kv-size {most}", model_type, "a limited", "leave it out"):
        part.try_step(part.new_caches(most))


def check_quantised(part: Slice, how: CacheQuantisation, model_type: str) -> None:
    """Raise ``UserError`` if ``part`` takes no such caches. Nothing is computed, no weight read."""
    caches = part.new_caches()
    remedy = "leave it out, or give another --kv-group-size"
    with _refused(f"--kv-bits {how.bits}", model_type, "a quantised", remedy):
        part.try_step(caches)
        part.try_step(
            [_packed(cache, how) if _may_be_quantised(cache) else cache for cache in caches]
        )


@contextlib.contextmanager
def _refused(option: str, model_type: str, kind: str, remedy: str) -> Iterator[None]:
    """Raise ``UserError`` if layers do not take the caches that they are tried with."""
    try:
        yield
    except Exception as error:  # a model's code may raise whatever it likes
        raise UserError(
            f"{option}: layers of {model_type} do not take {kind} KV cache ({one_line(error)})",
            remedy,
        ) from None
