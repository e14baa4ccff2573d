"""Outer optimizers: what the hub makes of the mean difference of islands from its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

ROUNDS = "outer steps"
"""Group of options."""

NESTEROV, SGD, AVERAGE, ELASTIC = "nesterov", "sgd", "average", "elastic"

_USUAL: Mapping[str, tuple[float, ...]] = {
    NESTEROV: (0.7, 0.9),  # DiLoCo's, arXiv:2311.08105
    SGD: (1.0,),
    AVERAGE: (),
    ELASTIC: (0.1,),
}


@dataclass(frozen=True, slots=True)
class OuterOptimizer:
    """An outer step on one tensor, in float32.

    ``average`` takes the mean of the islands' weights, as FedAvg does (arXiv:1602.05629).
    ``elastic`` is pulled to each of them by ``rate`` (EASGD, arXiv:1412.6651).
    """

    name: str
    rate: float = 1.0
    momentum: float = 0.0

    @classmethod
    def of(cls, text: str) -> Self:
        """Return the optimizer of a name, behind which may stand a colon, its learning rate, a
        comma and its momentum. Raises ``ValueError``, which says what to give."""
        name, _, numbers = text.partition(":")
        usual = _USUAL.get(name)
        if usual is None:
            raise ValueError(f"choose from {', '.join(_USUAL)}")
        try:
            given = tuple(map(float, numbers.split(","))) if numbers else ()
        except ValueError:
            raise ValueError(f"give numbers after {name}:") from None
        most = 1.0 if name == ELASTIC else float("inf")
        if len(given) > len(usual) or not all(0 < each <= most for each in given):
            shown = ",".join(f"{each:g}" for each in usual)
            raise ValueError(f"give {name}:{shown}" if usual else f"give {SGD}:RATE, or {name}")
        return cls(name, *given, *usual[len(given) :])

    @property
    def elastic(self) -> float:
        """Share of the way to the outer weights that islands go."""
        return self.rate if self.name == ELASTIC else 1.0

    def step(
        self,
        weights: np.ndarray,
        momentum: np.ndarray | None,
        mean: np.ndarray,
        *,
        reports: int = 1,
        staleness: int = 0,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return new weights and momentum from the ``mean`` difference of so many ``reports``.

        A report made from weights that are ``staleness`` versions old moves them the less.
        """
        scale = self.rate / (1 + staleness)
        if self.name == ELASTIC:
            scale *= reports
        rate = np.float32(scale)
        if self.name != NESTEROV:
            return weights - rate * mean, None
        share = np.float32(self.momentum)
        momentum = mean if momentum is None else share * momentum + mean
        return weights - rate * (mean + share * momentum), momentum
