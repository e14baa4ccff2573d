"""The page of a hub in a real browser: islands that come, go, are late, and are missing."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from shardmlx.islands.protocol import Join, Progress, SharedTensor
from shardmlx.islands.rounds import SECONDS_MISSING, Rounds
from shardmlx.islands.store import Report
from tests.helpers.island_hub import running_hub

TENSOR = SharedTensor("model.layers.0.lora_a", (4,))
JOIN = Join(name="", model={"type": "llama"}, tensors=(TENSOR,), adapter_config={})

ROWS = (
    "return Object.fromEntries([...document.querySelectorAll('#islands tbody tr')]"
    ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    ".map(([name, ...cells]) => [name.slice(2), cells]))"
)


def test_the_page_shows_which_islands_train_are_late_missing_or_gone(
    chrome: webdriver.Chrome, tmp_path: Path
) -> None:
    waiting = WebDriverWait(chrome, 20, poll_frequency=0.05)

    def shown(*states: str) -> dict[str, list[str]]:
        """Wait until the islands are so, in their order; return their other cells."""

        def found(_: webdriver.Chrome) -> dict[str, list[str]] | None:
            rows: dict[str, list[str]] = chrome.execute_script(ROWS)
            return rows if [cells[0] for cells in rows.values()] == [*states] else None

        rows = waiting.until(found, " ".join(states))
        assert rows is not None
        return {name: cells[2:] for name, cells in rows.items()}

    def come(name: str) -> None:
        rounds.hear(name)
        rounds.join(name, replace(JOIN, name=name))

    def report(name: str, base: int) -> None:
        body = tmp_path / "body"
        np.ones(TENSOR.shape, np.float32).tofile(body)
        rounds.hear(name)
        rounds.take(Report(island=name, life=1, base=base, rows=1, tokens=1200), 0, body)

    def text(selector: str) -> str:
        script = "return document.querySelector(arguments[0]).textContent"
        return str(chrome.execute_script(script, selector))

    with running_hub(tmp_path / "hub", "ann,ben,cid", outer_optimizer="sgd", rounds=2) as hub:
        rounds: Rounds = hub.rounds
        chrome.get_log("browser")
        chrome.get(hub.url)
        waiting.until(lambda _: "Nobody has joined yet" in text("#state"))
        lines = "return [...document.querySelectorAll('#join-lines pre')].map((e) => e.textContent)"
        assert chrome.execute_script(lines) == [
            f"SHARDMLX_ISLAND_TOKEN=TOKEN_OF_{name} shardmlx train --config lora.yaml "
            f"--island {hub.url} --name {name}"
            for name in ("ann", "ben", "cid")
        ]
        assert str(tmp_path / "hub" / "tokens") in text("#tokens")
        assert not any(token in chrome.page_source for token in hub.tokens.values())

        come("ann")
        seed = tmp_path / "seed"
        np.zeros(TENSOR.shape, np.float32).tofile(seed)
        rounds.seed("ann", 0, seed)
        for step, loss in ((2, 2.5), (4, 2.25)):
            rounds.progress("ann", Progress(step=step, tokens=600 * step, loss=loss))
        come("ben")  # last, so that the page shows all the rest once it shows this
        # The page asks by itself, every three seconds.
        found = shown("trains", "trains", "not joined")
        assert found["ann"] == ["4", "2,400", "2.2500", "–", "0", "0"]
        assert chrome.execute_script(lines)[0].endswith("--name cid")
        assert text("#losses p") == "from 2.2500 to 2.5000, up to step 4"

        rounds.islands["ben"].heard = time.monotonic() - SECONDS_MISSING
        report("ann", base=0)
        waiting.until(lambda _: rounds.version == 1)
        chrome.refresh()
        shown("trains", "missing", "not joined")

        come("cid")
        report("ben", base=0)
        rounds.progress("ann", Progress(step=6, tokens=3600, leaving=True))
        chrome.refresh()
        found = shown("left", "trains", "trains")
        assert [cells[-2] for cells in found.values()] == ["0", "1", "0"]
        assert "ben" in text("#fragments")
        assert "round 1, 1,200 tokens" in text("#summary")

        for width in (400, 1400):
            chrome.set_window_size(width, 800)
            wide = "return document.documentElement.scrollWidth - window.innerWidth"
            assert chrome.execute_script(wide) <= 0
        report("cid", base=1)
        waiting.until(lambda _: rounds.ended)
        chrome.refresh()
        waiting.until(lambda _: "ended" in text("#state"))
        is_hidden = "return document.querySelector('#join').hidden"
        assert chrome.execute_script(is_hidden)
        assert "round 2, 3,600 tokens" in text("#summary")
        log: Any = chrome.get_log("browser")
        assert log == []
