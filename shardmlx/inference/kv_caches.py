"""KV caches of the sequences under way, on one stage.

A sequence has caches of its own during prefill. For decode the caches of a group are merged, a row
for each sequence, by mlx-lm's own functions; sequences join and leave them. A sequence that is
alone in its group keeps its plain caches, which need no masks. Caches of an ended sequence may be
kept, for prompts that begin like it, with copies at borders of what cannot be cut.

A token that entered before it was known to be wanted can be taken back out of all of them: a ring
of a window still has all that the token in its place sees, and states remember those before.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from shardmlx.errors import UserError, one_line
from shardmlx.inference.commands import Begin, Border, Item, Keep, Prefill
from shardmlx.inference.prefix_cache import CachedPrefix
from shardmlx.models.runtime.slice import Slice
from shardmlx.models.sizes.kv_cache import CacheQuantisation, parts_of

Caches = list[Any]
"""mlx-lm's cache of each layer. A deep copy of one shares the numbers of its arrays: MLX copies
them only where they are written to while both are still used."""

BEFORE = "before_last"
"""The attribute in which a recurrent layer's cache has the states before its last token."""


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
            rows = [_row(layer, row, count) for row in moving]
            for sequence, taken in zip(moving.values(), rows, strict=True):
                moved[sequence].append(taken)
            if len(staying) > 1:
                layer.filter(staying)
                caches.append(layer)
            elif staying:
                caches.append(_row(layer, staying[0], count))
            if count > 1:
                # One layer at a time: a copy of all at once might not fit into memory.
                mx.eval([each.state for each in (*rows, *caches[-1:])])
        self.sequences = tuple(self.sequences[row] for row in staying)
        self.caches = caches
        return moved


@dataclass
class KVCaches:
    """The caches of all sequences on this stage; ``new`` makes those of one new sequence. With a
    ``quantisation`` no group has more than one sequence. If they are to ``remember``, states can
    give back a token."""

    new: Callable[[], Caches]
    quantisation: CacheQuantisation | None = None
    remember: bool = False
    _alone: dict[int, Caches] = field(default_factory=dict)
    _groups: dict[int, _BatchedCaches] = field(default_factory=dict)
    _borders: dict[int, dict[int, list[Caches]]] = field(default_factory=dict)

    def of(self, item: Item) -> Caches:
        """Return the caches that an item's tokens enter, a row a sequence."""
        if isinstance(item, Prefill):
            return self._quantised(self._alone.setdefault(item.sequence, self.new()))
        group = self._groups.get(item.group)
        if group is None:
            group = self._groups[item.group] = _BatchedCaches()
        if joining := item.sequences[len(group.sequences) :]:
            group.join(joining, [self._alone.pop(sequence) for sequence in joining])
        if group.sequences != item.sequences:
            raise ValueError(f"a group of {group.sequences} is to be one of {item.sequences}")
        if self.remember:
            _note_states(group.caches)
        return self._quantised(group.caches)

    def cut(self, sequence: int, count: int) -> None:
        """Forget the last ``count`` tokens of a sequence, which shares its caches with none."""
        groups = (each for each in self._groups.values() if each.sequences == (sequence,))
        group = next(groups, None)
        caches = self._alone[sequence] if group is None else group.caches
        given = {_given_back(part, count) for cache in caches for part in parts_of(cache)}
        if given - {count}:
            raise ValueError(f"caches of sequence {sequence} cannot give back {count} tokens")

    def keep(self, told: Keep) -> None:
        """Take the caches of sequences that have ended out of their groups."""
        self._leave(told.sequences, told.sequences)
        for sequence, count in zip(told.sequences, told.cuts, strict=True):
            if count:
                self.cut(sequence, count)
            caches = self._alone[sequence]
            for part in (part for cache in caches for part in parts_of(cache)):
                vars(part).pop(BEFORE, None)
            self._quantised(caches)

    def drop(self, sequences: Collection[int]) -> None:
        """Drop the caches of sequences."""
        self._leave(sequences, ())
        for sequence in sequences:
            self._alone.pop(sequence, None)
            self._borders.pop(sequence, None)

    def begin(self, told: Begin) -> None:
        """Begin a sequence, with the caches of a kept one if there is a prefix."""
        if told.prefix is not None:
            self._copy_prefix(told.sequence, told.prefix)

    def keep_border(self, told: Border) -> None:
        """Copy what cannot be cut of the caches of a sequence."""
        uncut = [
            [None if can_be_cut(part) else copy.deepcopy(part) for part in parts_of(cache)]
            for cache in self._alone[told.sequence]
        ]
        self._borders.setdefault(told.sequence, {})[told.tokens] = uncut

    def kept(self, sequence: int) -> KeptCaches:
        """Return what there is of a kept sequence."""
        return KeptCaches(self._alone[sequence], self._borders.get(sequence, {}))

    def restore(self, sequence: int, kept: KeptCaches) -> None:
        """Keep caches that were read for a sequence of this number."""
        self._alone[sequence] = [*map(_evaluated, kept.caches)]
        self._borders[sequence] = kept.borders
        parts = [part for copies in kept.borders.values() for layer in copies for part in layer]
        mx.eval([part.state for part in parts if part is not None])

    def _leave(self, ended: Collection[int], kept: Collection[int]) -> None:
        """Take ``ended`` sequences out of their groups, with their caches if they are ``kept``."""
        for number, group in list(self._groups.items()):
            self._alone |= group.remove(ended, kept)
            if not group.sequences:
                del self._groups[number]

    def _quantised(self, caches: Caches) -> Caches:
        """Quantise those of ``caches`` that have come to the length for it, and return all."""
        if (how := self.quantisation) is not None:
            for i, cache in enumerate(caches):
                if _may_be_quantised(cache) and cache.offset >= how.start:
                    caches[i] = _evaluated(_packed(cache, how))
        return caches

    def _copy_prefix(self, sequence: int, prefix: CachedPrefix) -> None:
        borders = self._borders.get(prefix.sequence, {})
        self._borders[sequence] = {each: borders[each] for each in prefix.borders}
        if prefix.is_whole:  # which is kept no longer
            self._alone[sequence] = self._alone.pop(prefix.sequence)
            self._borders.pop(prefix.sequence, None)
            return
        self._alone[sequence] = caches = copy.deepcopy(self._alone[prefix.sequence])
        uncut = copy.deepcopy(borders.get(prefix.length))
        for i, cache in enumerate(caches):
            kept = uncut[i] if uncut else [None] * len(parts_of(cache))
            parts = [
                cut(part, prefix.length) if copied is None else copied
                for part, copied in zip(parts_of(cache), kept, strict=True)
            ]
            caches[i] = CacheList(*parts) if isinstance(cache, CacheList) else parts[0]


class Backup:
    """The state of ``caches`` at this moment, into which they can be put back while what has
    entered them since is not evaluated."""

    def __init__(self, caches: Caches) -> None:
        # MLX writes in place into an array that is assigned to by parts: copies share its numbers.
        self._states = [
            (part, {name: _copied(value) for name, value in vars(part).items()})
            for cache in caches
            for part in parts_of(cache)
        ]

    def put_back(self) -> None:
        """Have the caches forget what has entered them."""
        for part, state in self._states:
            vars(part).update(state)


def _copied(value: Any) -> Any:
    if isinstance(value, mx.array):
        return value.__copy__()
    return tree_map(_copied, value) if isinstance(value, (list, tuple)) else value


def _note_states(caches: Caches) -> None:
    """Have states of recurrent layers remember the ones before the next token."""
    for cache in caches:
        for part in parts_of(cache):
            if isinstance(part, ArraysCache):
                setattr(part, BEFORE, [*part.cache])


def _given_back(part: Any, count: int) -> int:
    """Have one cache forget its last ``count`` tokens; return how many it has forgotten."""
    if isinstance(part, ArraysCache):
        before = vars(part).pop(BEFORE, None)
        if before is None or count != 1:
            return 0
        part.cache = before
        return 1
    # mlx-lm says that nothing of a full ring can be trimmed. The last token took the place of one
    # that no token after it sees; its place is the next that is written to, or left out.
    if part.is_trimmable() or (count == 1 and isinstance(part, RotatingKVCache)):
        given: int = part.trim(count)
        return given
    return 0


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
    """Return one layer's cache of the sequence in ``row`` of ``count``, which may be lazy."""
    if count == 1:
        return cache
    taken = cache.extract(row)
    for part, whole in zip(parts_of(taken), parts_of(cache), strict=True):
        if isinstance(part, ArraysCache):
            # A view of a row holds the states of all rows.
            part.cache = [None if each is None else mx.contiguous(each) for each in part.cache]
            if (before := vars(whole).get(BEFORE)) is not None:
                rows = [
                    each if each is None else mx.contiguous(each[row : row + 1]) for each in before
                ]
                mx.eval(rows)
                setattr(part, BEFORE, rows)
    return taken


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
