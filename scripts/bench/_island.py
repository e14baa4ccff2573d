"""``_island.py ARGUMENTS``: ``shardmlx train`` as an island, with a clock.

In the end clock.json in --adapter-path has the seconds of all steps but the first, which compiles,
and the last, which waits for all that is under way; of these the seconds in which it waited for the
hub, and those in which it encoded and merged.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from shardmlx.main import main
from shardmlx.training import trainer
from shardmlx.training.island import IslandRank


class Clocked(IslandRank):
    waited = worked = began = 0.0

    def after(self, step: int, tokens: int, *, is_last: bool) -> str | None:
        start = time.perf_counter()
        if is_last:
            clock = {"seconds": start - self.began, "waited": self.waited, "worked": self.worked}
            output = Path(sys.argv[sys.argv.index("--adapter-path") + 1])
            (output / "clock.json").write_text(json.dumps({**clock, "steps": step - 2}))
        before = self.waited
        problem = super().after(step, tokens, is_last=is_last)
        now = time.perf_counter()
        if step == 1:  # which compiles
            self.began, self.waited = now, 0.0
        else:
            self.worked += now - start - (self.waited - before)
        return problem

    def _wait(self, *given: Any) -> None:
        start = time.perf_counter()
        super()._wait(*given)
        self.waited += time.perf_counter() - start


if __name__ == "__main__":
    patch.object(trainer, "IslandRank", Clocked).start()
    sys.exit(main(["train", *sys.argv[1:]]))
