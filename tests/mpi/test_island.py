"""An island of two processes is killed, and goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shardmlx.islands.client import TOKEN
from testbed.jobs import Running
from testbed.runs import in_file
from tests.helpers.island_hub import running_hub
from tests.helpers.islands import (
    Nesterov,
    check_equal,
    islands_of,
    saved,
    simulated,
    train_island,
    use_tokens,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("limited_to_a_test")

H = 2


def test_an_island_that_was_killed_goes_on_to_the_bit_and_nothing_counts_twice(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed when its second report is acknowledged, and the other island's is still to come:
    it makes the same steps again, and the same report."""
    made = islands_of(small, tmp_path, 2, num_layers=-1, learning_rate=1e-2, iters=2 * H)
    kept, went_on = tmp_path / "kept", threading.Event()
    with (
        running_hub(tmp_path / "hub", "ann,bob", inner_steps=H) as hub,
        ThreadPoolExecutor(1) as on,
    ):
        use_tokens(monkeypatch, hub)

        def wait(event: str, values: Mapping[str, Any]) -> None:
            if event == "val" and values["step"] == 1:
                until = threading.Event()
                while len(hub.rounds.run.lives) < 2:
                    until.wait(0.05)
            if event == "train" and values["step"] == H + 1:
                went_on.wait(60)

        ann = on.submit(train_island, hub, "ann", made["ann"], 1, wait)
        kept_in = {"checkpoint_dir": str(kept), "checkpoint_every": H}
        place = {"island": hub.url, "name": "bob"}
        config = in_file(tmp_path / "bob.yaml", **made["bob"], **kept_in, **place)
        env = {TOKEN: hub.tokens["bob"]}

        def has_reported() -> bool:
            (fragment,) = hub.rounds.status()["fragments"] or [None]
            is_kept = (kept / f"step-{H:07d}" / "COMMITTED").exists()
            return is_kept and fragment == {"version": 1, "reports": ["bob"]}

        with Running.ranks(2, "-m", "shardmlx.train", *config, env=env) as bob:
            bob.until(has_reported)
            bob.kill(signal.SIGKILL)
        steps: list[int] = []

        def go_on(event: str, values: Mapping[str, Any]) -> None:
            if event == "train":
                steps.append(values["step"])
                went_on.set()

        train_island(hub, "bob", {**made["bob"], **kept_in, "resume": "auto"}, 2, go_on)
        assert steps == [3, 4]
        ann.result()
        assert hub.rounds.version == 2
        check_equal(weights_of(hub), simulated(made, tmp_path, Nesterov(), every=H))
        check_equal(saved(made, "bob"), weights_of(hub))
