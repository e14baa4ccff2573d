"""Tell whether what a run has trained is worth keeping: it replaces what may be better."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import mlx.core as mx

from shardmlx.distributed.transport import Transport
from shardmlx.engine.stage import Stage

WINDOW = 10
"""Updates among which skipped ones are counted: few overflows in half precision are normal, a run
that skips more than half of these learns nothing."""


class Soundness:
    """The updates of a run, made or skipped on all ranks alike, and the weights that it trains.

    A rank looks at the weights that it ``holds``. A run that ``resumed`` has trained before.
    """

    def __init__(
        self,
        transport: Transport,
        stages: Sequence[Stage],
        holds: Callable[[str], bool],
        *,
        resumed: bool,
    ) -> None:
        self._transport = transport
        self._stages = stages
        self._holds = holds
        self._made: deque[bool] = deque(maxlen=WINDOW)
        self.has_trained = resumed
        """True once there is anything to keep."""

    def count(self, *, made: bool) -> None:
        """Note that an update was made, or skipped."""
        self._made.append(made)
        self.has_trained |= made

    @property
    def is_lost(self) -> bool:
        """True if more than half of the last ``WINDOW`` updates were skipped, whatever follows."""
        return self._made.count(False) > WINDOW // 2

    def fault(self) -> str | None:
        """Return why the weights should replace nothing; None if they may. All ranks must call it.

        Of the last updates more than half were skipped, or a weight is not finite.
        """
        skipped, total = self._made.count(False), len(self._made)
        if 2 * skipped > total:
            return f"{skipped} of the last {total} updates were skipped"
        found = self._transport.all_gather(self._nonfinite_weight(), "looking at the weights")
        return next(filter(None, found), None)

    def _nonfinite_weight(self) -> str | None:
        for stage in self._stages:
            for name in filter(self._holds, stage.names):
                if not mx.isfinite(stage.part[name]).all().item():
                    where = self._transport.name(self._transport.rank)
                    return f"the weight {name} is not finite on {where}, stage {stage.index}"
        return None
