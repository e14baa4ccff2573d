"""The hub as islands and strangers meet it, over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from shardmlx.islands.protocol import Join, Tensor
from tests.helpers.island_hub import RunningHub, running_hub

TENSORS = (Tensor("model.layers.0.lora_a", (2, 3)), Tensor("model.layers.1.lora_a", (4,)))
JOIN = Join(
    name="ann",
    model={"type": "llama"},
    tensors=TENSORS,
    rows=5,
    adapter_config={"fine_tune_type": "lora"},
)
START = np.arange(10, dtype=np.float32)


class Client:
    """An island that speaks HTTP by itself."""

    def __init__(self, hub: RunningHub, name: str, http: httpx.Client) -> None:
        http.headers["authorization"] = f"Bearer {hub.tokens[name]}"
        self.http = http
        self.name = name

    def join(self, message: Join = JOIN) -> httpx.Response:
        return self.http.post("/join", json=replace(message, name=self.name).to_json())

    def seed(self) -> None:
        assert self.join().json()["seed"] is True
        assert self.http.put("/fragments/0/seed", content=START.tobytes()).status_code == 200

    def report(
        self, difference: Any, seq: int = 1, base: int = 0, rows: int = 1, **more: Any
    ) -> httpx.Response:
        query = f"base={base}&rows={rows}&steps=3&tokens=7"
        body = np.asarray(difference, np.float32).tobytes()
        return self.http.put(f"/fragments/0/reports/{seq}?{query}", content=body, **more)

    def version(self, after: int) -> int:
        return int(self.http.get(f"/fragments/0?after={after}&wait=10").json()["version"])

    def weights(self) -> list[float]:
        content = self.http.get("/fragments/0/weights").content
        return [float(each) for each in np.frombuffer(content, np.float32)]


@contextmanager
def clients(path: Path, **options: Any) -> Iterator[tuple[RunningHub, Client, Client]]:
    """A hub whose islands ann and ben have joined, and the two."""
    options = {"outer_optimizer": "average", "inner_steps": 3, **options}
    with running_hub(path, "ann,ben", **options) as hub, ExitStack() as stack:
        ann, ben = (
            Client(hub, name, stack.enter_context(httpx.Client(base_url=hub.url, timeout=20)))
            for name in ("ann", "ben")
        )
        if hub.rounds.run.first is None:
            ann.seed()
        ben.join()
        yield hub, ann, ben


def test_two_islands_join_report_and_get_the_mean_of_their_weights(tmp_path: Path) -> None:
    with clients(tmp_path) as (_, ann, ben):
        joined = ben.join().json()
        assert (joined["seed"], joined["versions"], joined["seqs"]) == (False, [0], [0])
        assert joined["terms"]["inner_steps"] == 3
        assert ben.weights() == START.tolist()
        acknowledged = {"version": 0, "repeated": False, "ended": False}
        assert ann.report(np.full(10, 1)).json() == acknowledged
        assert ben.report(np.full(10, 3)).status_code == 200
        assert ann.version(after=0) == 1
        assert ann.weights() == (START - 2).tolist()
