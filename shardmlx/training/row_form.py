"""The methods that every form of rows has. No MLX, no MPI."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

RowTokens = tuple[list[int], int]
"""The tokens of an answer with its prompt, as a ``Sample`` has them, and where its loss starts."""


class RowForm(ABC):
    """The form of the rows of a set. It ``has_cut`` a text if not all of its tokens were made."""

    has_cut: bool = False

    @abstractmethod
    def check(self, row: Row, where: str) -> Sequence[bool]:
        """Return whether each answer of a row is wanted; take down what is to be said of the row.
        Raises ``UserError``, which calls it ``where``, as far as it can be told without tokens."""

    @abstractmethod
    def samples(self, row: Row, where: str, most: int | None = None) -> list[RowTokens]:
        """Return a row's tokens, once for each answer; of a text with more than ``most`` at least
        these. Raises ``UserError``."""

    def head(self, row: Row, where: str) -> int:
        """Return how many tokens at the begin of a row a cut from the left leaves."""
        return 0
