"""Keys and values of the texts that are under way, on one stage.

A text has caches of its own while its prompt is computed; those of a group are merged, with
mlx-lm's means, and texts join and leave them. A text that is alone keeps its plain caches, which
need no masks. One that has ended may be kept, for texts that begin like it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from shardmlx.compat import cache_state
from shardmlx.inference.prefix_cache import Beginning
from shardmlx.inference.scheduler import Item, Kind

Caches = list[Any]
"""mlx-lm's cache of each layer."""


@dataclass(slots=True)
class _Group:
    texts: tuple[int, ...]
    caches: Caches


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What caches were before a step that may not count."""

    caches: Sequence[Any]
    states: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, caches: Sequence[Any]) -> Snapshot:
        """To be forgotten before the step is evaluated: MLX writes only into an array that nobody
        else holds, and copies it otherwise."""
        return cls(caches, [_state(cache) for cache in caches])

    def restore(self) -> None:
        for cache, state in zip(self.caches, self.states, strict=True):
            cache_state(cache).update(state)


def _state(cache: Any) -> dict[str, Any]:
    # Assigning to a part of an array changes what its name means, not what a copy of it means;
    # MLX copies the numbers themselves only where both are still used.
    return {
        k: copy.copy(v) if isinstance(v, mx.array) else v for k, v in cache_state(cache).items()
    }


def _cut(cache: Any, length: int) -> None:
    """Leave the first so many tokens, and room for no more: what is shared is copied at the next
    write, with all the room it has."""
    if cache.trim(cache.offset - length):
        cache.keys, cache.values = cache.keys[..., :length, :], cache.values[..., :length, :]


class TextCaches:
    """Finds, for each item, the caches of its texts. ``new`` makes those of one new text."""

    def __init__(self, new: Callable[[], Caches]) -> None:
        self._new = new
        self._alone: dict[int, Caches] = {}
        self._groups: dict[int, _Group] = {}

    def of(self, item: Item) -> Caches:
        """The caches that the item's tokens enter, one row for each of its texts, in order."""
        self.hear(item)
        if item.kind is Kind.PROMPT or item.group is None:
            (text,) = item.texts
            return self._alone.setdefault(text, self._new())
        group = self._groups.get(item.group, _Group((), []))
        if group.texts != item.texts:
            group = self._regroup(group, item.texts)
            self._groups[item.group] = group
        return group.caches

    def hear(self, item: Item) -> None:
        """What an item says of texts that have ended, and of one that begins like one of them."""
        self._groups = {
            number: rest
            for number, group in self._groups.items()
            if (rest := self._without(group, {*item.kept, *item.dropped}, item.kept)) is not None
        }
        if item.begins is not None:
            self._begin(item.texts[0], item.begins)
        for text in item.dropped:
            self._alone.pop(text, None)

    def _begin(self, text: int, beginning: Beginning) -> None:
        caches = []
        for kept in self._alone[beginning.text]:
            cache = copy.copy(kept)
            cache_state(cache).update(_state(kept))
            _cut(cache, beginning.length)
            caches.append(cache)
        self._alone[text] = caches

    def _without(
        self, group: _Group, ended: Collection[int], keep: Collection[int]
    ) -> _Group | None:
        """A group without the texts that have ended, of which some get caches of their own."""
        rows = [row for row, text in enumerate(group.texts) if text not in ended]
        if len(rows) == len(group.texts):
            return group
        kept = [row for row, text in enumerate(group.texts) if text in keep]
        for row in kept:
            self._alone[group.texts[row]] = []
        caches = []
        for cache in _taken(group.caches):
            for row in kept:
                self._alone[group.texts[row]].append(_row(cache, row, len(group.texts)))
            if len(rows) > 1:
                cache.filter(rows)
                caches.append(_evaluated(cache))
            elif rows:
                caches.append(_row(cache, rows[0], len(group.texts)))
        return _Group(tuple(group.texts[row] for row in rows), caches) if rows else None

    def _regroup(self, group: _Group, texts: tuple[int, ...]) -> _Group:
        joining = texts[len(group.texts) :]
        if group.texts + joining != texts:
            raise ValueError(
                f"texts {texts} of a group of {group.texts}: those that join come last"
            )
        parts = [self._alone.pop(text) for text in joining]
        if group.texts:
            parts.insert(0, group.caches)
        layers = zip(*map(_taken, parts), strict=True)
        return _Group(texts, [_joined(layer, len(group.texts) > 1) for layer in layers])


# A copy of all keys and values at once might not fit. So what follows is evaluated for each layer
# before the next, and what a layer was made of is forgotten.


def _taken(caches: Caches) -> Iterator[Any]:
    """The layers; ``caches`` are of no use any more."""
    caches.reverse()
    while caches:
        yield caches.pop()


def _row(cache: Any, row: int, count: int) -> Any:
    """One layer's cache of one text of ``count``."""
    return _evaluated(cache.extract(row)) if count > 1 else cache


def _joined(parts: tuple[Any, ...], first_is_batch: bool) -> Any:
    """One layer's cache of several texts. All ``parts`` are of one text, but perhaps the first."""
    first, *others = parts
    if not others:
        return first
    if not first_is_batch:
        return _evaluated(first.merge(parts))
    first.extend(others[0].merge(others))
    return _evaluated(first)


def _evaluated(cache: Any) -> Any:
    mx.eval(cache.keys, cache.values)
    return cache
