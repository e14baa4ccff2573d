"""Adapters by which a rank generates, beside the model itself: each with weights of its own in the
same layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import mlx.core as mx

from shardmlx.inference.commands import NO_ADAPTER, Begin
from shardmlx.models.runtime.slice import Slice


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter on this rank: its ``weights``, by name, are put into a ``part`` that has places
    for them. Several adapters may share a part."""

    part: Slice
    weights: Mapping[str, mx.array]


@dataclass
class Adapters:
    """The adapters of a rank by number, and which of them each sequence under way is computed by:
    by none, ``NO_ADAPTER``, unless it began with one."""

    part: Slice
    """The layers without an adapter."""
    by_number: dict[int, Adapter] = field(default_factory=dict)
    _of_sequences: dict[int, Adapter] = field(default_factory=dict)

    def begin(self, begin: Begin) -> None:
        """Note by which adapter a sequence is computed. It needs that until it is closed, even if
        the adapter is removed meanwhile."""
        if begin.adapter == NO_ADAPTER:
            return
        if begin.adapter not in self.by_number and begin.sequence in self._of_sequences:
            return  # it was put back
        self._of_sequences[begin.sequence] = self.by_number[begin.adapter]

    def close(self, sequences: Collection[int]) -> None:
        """Forget sequences, if they are known."""
        for sequence in sequences:
            self._of_sequences.pop(sequence, None)

    def of(self, sequences: Collection[int]) -> AbstractContextManager[Slice]:
        """Give the layers for sequences of one adapter, with its weights while a block builds
        their graph."""
        adapter = self._of_sequences.get(next(iter(sequences)))
        return nullcontext(self.part) if adapter is None else self._holding(adapter)

    @contextmanager
    def computing(self, number: int) -> Iterator[Slice]:
        """Give the layers of an adapter, or those without one, with its weights for a block."""
        with self._holding(self.by_number.get(number)) as part:
            yield part

    @contextmanager
    def _holding(self, adapter: Adapter | None) -> Iterator[Slice]:
        if adapter is None:
            yield self.part
            return
        with adapter.part.holding(adapter.weights):
            yield adapter.part
