"""Outer optimizers: what the hub makes of the mean difference of islands from its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardmlx.errors import UserError

NESTEROV, SGD, AVERAGE, ELASTIC = "nesterov", "sgd", "average", "elastic"

RATES: Mapping[str, float] = {NESTEROV: 0.7, SGD: 1.0, AVERAGE: 1.0, ELASTIC: 0.1}
"""The learning rate of each optimizer, if none is given: DiLoCo's (arXiv:2311.08105) first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterOptimizer:
    """An outer step on one tensor, in float32. ``rate`` is None for the usual one.

    ``average`` takes the mean of the islands' weights, as FedAvg does (arXiv:1602.05629).
    ``elastic`` is pulled to each of them by ``rate`` (EASGD, arXiv:1412.6651). Raises
    ``UserError``.
    """

    name: str = NESTEROV
    rate: float | None = None
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if self.rate is None:
            object.__setattr__(self, "rate", RATES[self.name])
        if self.name == AVERAGE and self.rate != 1:
            raise UserError(f"the outer learning rate is {self.rate} with {AVERAGE}", "use sgd")

    @property
    def has_momentum(self) -> bool:
        """True if a step needs the momentum of the one before."""
        return self.name == NESTEROV

    @property
    def elastic(self) -> float | None:
        """Share of the way to the outer weights that islands go, None for all."""
        return self.rate if self.name == ELASTIC else None

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
        scale = (self.rate or 0.0) / (1 + staleness)
        if self.name == ELASTIC:
            scale *= reports
        rate = np.float32(scale)
        if not self.has_momentum:
            return weights - rate * mean, None
        share = np.float32(self.momentum)
        momentum = mean if momentum is None else share * momentum + mean
        return weights - rate * (mean + share * momentum), momentum
