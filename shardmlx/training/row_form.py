"""The methods that every form of rows has. No MLX, no MPI."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from shardmlx.engine.batches import Sample

Row = Mapping[str, Any]


class RowForm(ABC):
    """The form of the rows of a set. It ``has_cut`` a text if not all of its tokens were made."""

    has_cut: bool = False

    @abstractmethod
    def check(self, row: Row, where: str) -> Sequence[bool]:
        """Return whether each answer of a row is wanted; take down what is to be said of the row.
        Raises ``UserError``, which calls it ``where``, as far as it can be told without tokens."""

    @abstractmethod
    def samples(self, row: Row, where: str, most: int | None = None) -> list[Sample]:
        """Return a row's tokens, once for each answer. Of a text that has more than ``most`` tokens
        there may be some more than these alone. Raises ``UserError``."""

    def head(self, row: Row, where: str) -> int:
        """Return how many tokens at the begin of a row a cut from the left leaves."""
        return 0
