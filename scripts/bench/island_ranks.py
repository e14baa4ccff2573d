"""``python -m scripts.bench.island_ranks ARGUMENTS``: ``shardmlx train`` as a timed island.

In the end clock.json in --adapter-path has the seconds of all steps but the first, which compiles,
and the last, which waits for all that is under way; of these the seconds in which it waited for the
hub, and those in which it encoded and merged.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest.mock import patch

from shardmlx.islands.hub_link import HubLink
from shardmlx.islands.island import Island
from shardmlx.main import main
from shardmlx.training import trainer


class Clocked(Island):
    """An island that trains on one rank, with an update each step."""

    waited = worked = began = 0.0

    def after_update(self, step: int, tokens: int) -> str | None:
        start = time.perf_counter()
        if step == self._updates:
            clock = {"seconds": start - self.began, "waited": self.waited, "worked": self.worked}
            output = Path(sys.argv[sys.argv.index("--adapter-path") + 1])
            (output / "clock.json").write_text(json.dumps({**clock, "steps": step - 2}))
        before = Clocked.waited
        problem = super().after_update(step, tokens)
        now = time.perf_counter()
        if step == 1:  # which compiles
            self.began = now
            Clocked.waited = 0.0
        else:
            self.worked += now - start - (Clocked.waited - before)
        return problem


class ClockedLink(HubLink):
    """A link whose waits count."""

    def wait(self, fragments: Iterable[int], goes_on: Callable[[], bool]) -> bool:
        start = time.perf_counter()
        is_heard = super().wait(fragments, goes_on)
        Clocked.waited += time.perf_counter() - start
        return is_heard


if __name__ == "__main__":
    patch.object(trainer, "Island", Clocked).start()
    patch("shardmlx.islands.hub_link.HubLink", ClockedLink).start()
    sys.exit(main(["train", *sys.argv[1:]]))
