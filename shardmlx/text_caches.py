"""Keys and values of the texts that are under way, on one stage.

A text has caches of its own while its prompt is computed; those of a group are merged, with
mlx-lm's means, and texts join and leave them. A text that is alone keeps its plain caches, which
need no masks. One that has ended may be kept, for texts that begin like it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from shardmlx.prefix_cache import Beginning
from shardmlx.token_schedule import Item, Kind

Caches = list[Any]
"""mlx-lm's cache of each layer."""


@dataclass(slots=True)
class _Group:
    texts: tuple[int, ...]
    caches: Caches
    ended: set[int] = field(default_factory=set)


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
            vars(cache).update(state)


def _state(cache: Any) -> dict[str, Any]:
    # Assigning to a part of an array changes what its name means, not what a copy of it means;
    # MLX copies the numbers themselves only where both are still used.
    return {k: copy.copy(v) if isinstance(v, mx.array) else v for k, v in vars(cache).items()}


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
        for text in item.kept:
            self._keep(text)
        if item.begins is not None:
            self._begin(item.texts[0], item.begins)
        self._end([*item.kept, *item.dropped])
        for text in item.dropped:
            self._alone.pop(text, None)

    def _keep(self, text: int) -> None:
        """Take a text out of its group, if it has come to one."""
        for group in self._groups.values():
            if text in group.texts:
                caches = list(group.caches)
                if len(group.texts) > 1:
                    row = group.texts.index(text)
                    for layer, cache in enumerate(group.caches):
                        caches[layer] = one = cache.extract(row)
                        mx.eval(one.keys, one.values)
                self._alone[text] = caches

    def _begin(self, text: int, beginning: Beginning) -> None:
        caches = []
        for kept in self._alone[beginning.text]:
            cache = copy.copy(kept)
            vars(cache).update(_state(kept))
            _cut(cache, beginning.length)
            caches.append(cache)
        self._alone[text] = caches

    def _end(self, texts: Sequence[int]) -> None:
        """A group forgets texts at its next item, or at once if none of it goes on."""
        for group in self._groups.values():
            group.ended.update(text for text in texts if text in group.texts)
        self._groups = {i: g for i, g in self._groups.items() if g.ended != {*g.texts}}

    def _regroup(self, group: _Group, texts: tuple[int, ...]) -> _Group:
        kept = [row for row, text in enumerate(group.texts) if text in texts]
        joining = [text for text in texts if text not in group.texts]
        if texts != (*(group.texts[row] for row in kept), *joining):
            raise ValueError(f"texts {texts} of a group of {group.texts}: kept ones come first")
        parts = [self._alone.pop(text) for text in joining]
        if kept:
            parts.insert(0, group.caches)
        keeps_batch = len(group.texts) > 1
        caches = []
        for layer in range(len(parts[0])):
            cache = _joined([part[layer] for part in parts], kept if keeps_batch else None)
            # Each layer before the next, and what it was made of forgotten: a copy of all keys and
            # values at once might not fit.
            mx.eval(cache.keys, cache.values)
            for part in parts:
                part[layer] = None
            caches.append(cache)
        return _Group(texts, caches)


def _joined(parts: list[Any], kept: Sequence[int] | None) -> Any:
    """One layer's cache of several texts. The first of ``parts`` is a batch of which rows stay, if
    they are ``kept``; the others are of one text each."""
    batch = None
    if kept:
        batch, *parts = parts
        if len(kept) == 1:
            parts.insert(0, batch.extract(kept[0]))
            batch = None
        elif len(kept) < len(batch.left_padding):
            batch.filter(list(kept))
    if batch is None:
        return parts[0] if len(parts) == 1 else parts[0].merge(parts)
    if parts:
        batch.extend(parts[0].merge(parts))
    return batch
