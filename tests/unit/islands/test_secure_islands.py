"""Islands of a hub that makes secure sums, over HTTP: their weights are those of plain sums, also
where one of them drops out."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="needs cryptography: pip install '.[privacy]'")

from shardmlx.errors import UserError
from shardmlx.islands import hub_link
from shardmlx.islands.client import Hub
from shardmlx.islands.hub_options import HubOptions
from shardmlx.islands.protocol import Refusal, report_path
from shardmlx.islands.secure_sums import Member, write_masked
from testbed.jobs import patience
from tests.helpers.island_hub import RunningHub, running_hub
from tests.helpers.islands import (
    islands_of,
    saved,
    simulated,
    train_islands,
    use_tokens,
    weights_of,
)
from tests.helpers.ports import free_port

pytestmark = pytest.mark.usefixtures("limited_to_a_test")

H = 2
LORA: dict[str, Any] = {"num_layers": -1, "learning_rate": 0.1, "optimizer": "sgd"}
"""Adam would make more of the last digit of a round before."""

SECURE: dict[str, Any] = {"mode": "fedavg", "secure_sums": True, "inner_steps": H}
CONSTANT, ROWS = 0.25, 6
"""The difference of an island that drops out: each number, and the rows."""


@contextmanager
def secure_hub(
    path: Path, names: str, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Iterator[RunningHub]:
    with running_hub(path, names, **{**SECURE, **options}) as hub:
        use_tokens(monkeypatch, hub)
        yield hub


def average(name: str, weights: np.ndarray, mix: np.ndarray) -> np.ndarray:
    return np.asarray(weights - mix)


def check_close(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=2e-7, err_msg=name)


def test_islands_of_one_and_of_two_ranks_have_the_weights_of_plain_sums(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = islands_of(small, tmp_path, 3, iters=2 * H, **LORA)
    made["bob"]["batch_size"] = 4
    rows = {"ann": H * 2, "bob": H * 4, "cem": H * 2}
    with secure_hub(tmp_path / "hub", "ann,bob,cem", monkeypatch) as hub:
        train_islands(hub, made, {"bob": 2})
        assert hub.rounds.version == 2
        expected = simulated(made, tmp_path, average, every=H, weights=rows)
        check_close(weights_of(hub), expected)
        for name in made:
            check_close(saved(made, name), weights_of(hub))
        left = [path.name for path in (tmp_path / "hub" / "fragment-000").iterdir()]
        assert all(name.startswith("v") for name in left), "no numbers of an island are left"


class Vanishing:
    """An island that takes part by hand, in a thread, and is gone after a message."""

    def __init__(self, hub: RunningHub, last: str) -> None:
        self._hub = hub
        self._client = Hub(hub.url, hub.tokens["dia"], lambda text: None)
        self._last = last
        self._path = report_path(0, life=1, base=0, rows=ROWS, tokens=1)
        self._member = Member()

    def post(self, **message: Any) -> dict[str, Any]:
        return self._client.post(self._path, message)

    def until(self, phase: str, attempt: str) -> dict[str, Any]:
        while (answer := self.post(attempt=attempt))["phase"] != phase:
            assert answer["phase"] != "over", answer
            time.sleep(0.05)
        return answer

    def join(self) -> None:
        """Be present, as soon as there are weights, so that the others wait for it."""
        rounds = self._hub.rounds
        while rounds.run.first is None or rounds.fragment(0).version is None:
            time.sleep(0.02)
        self._client.join(replace(rounds.run.first, name="dia"))

    def run(self) -> None:
        answer = self.post(keys=self._member.public_keys)
        attempt = answer["attempt"]
        if self._last == "keys":
            return
        keys = self.until("shares", attempt)["keys"]
        self.post(attempt=attempt, shares=self._member.seal("dia", attempt, keys))
        if self._last == "shares":
            return
        masks = self._member.masks(self.until("numbers", attempt)["sealed"])
        size = self._hub.rounds.fragment(0).seed_bytes
        with NamedTemporaryFile() as plain, NamedTemporaryFile() as masked:
            plain.write(np.full(size // 4, CONSTANT, np.float32).tobytes())
            write_masked(plain, masked, ROWS, masks)
            self._client.put(f"{self._path}&attempt={attempt}", masked)


def until_all_speak(hub: RunningHub, islands: Collection[str]) -> None:
    """Wait until all these islands have told their first message of a sum."""
    secure = hub.rounds.secure
    assert secure is not None
    while secure._sum is None or not secure._sum.reports.keys() >= {*islands}:
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("last", "counts"), [("keys", False), ("shares", False), ("numbers", True)]
)
def test_an_island_that_drops_out_counts_once_its_numbers_have_come(
    last: str, counts: bool, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub then has the others' shares of its own seed, or of its key."""
    made = islands_of(small, tmp_path, 3, iters=H, **LORA)
    rows = dict.fromkeys(made, H * 2)
    others = sum(rows.values())
    monkeypatch.setattr(hub_link, "PATIENCE", 600.0)  # for a deadline of a busy machine
    with secure_hub(
        tmp_path / "hub", "ann,bob,cem,dia", monkeypatch, deadline=patience(6.0)
    ) as hub:
        dia = Vanishing(hub, last)

        def vanish() -> None:
            dia.join()
            until_all_speak(hub, made)
            dia.run()

        with ThreadPoolExecutor(1) as pool:
            gone = pool.submit(vanish)
            train_islands(hub, made, {})
            gone.result()
        assert hub.rounds.version == 1
        assert {*hub.rounds.fragment(0).facts.counted} == {*made, *(["dia"] if counts else [])}

        def outer(name: str, weights: np.ndarray, mix: np.ndarray) -> np.ndarray:
            if counts:
                mix = (mix * others + np.float32(CONSTANT * ROWS)) / (others + ROWS)
            return np.asarray(weights - mix)

        check_close(weights_of(hub), simulated(made, tmp_path, outer, every=H, weights=rows))


def test_a_hub_that_starts_anew_in_the_middle_of_a_sum_loses_none(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The islands begin another sum with the same differences."""
    made = islands_of(small, tmp_path, 2, iters=H, **LORA)
    rows = dict.fromkeys(made, H * 2)
    port = free_port()  # which nobody else gets meanwhile
    monkeypatch.setattr(hub_link, "PATIENCE", 600.0)  # for a deadline of a busy machine
    with ThreadPoolExecutor(1) as pool:
        with secure_hub(tmp_path / "hub", "ann,bob,dia", monkeypatch, port=port) as hub:
            dia = Vanishing(hub, "keys")
            training = pool.submit(train_islands, hub, made, {})
            dia.join()  # which never speaks, and so keeps the sum from going on
            until_all_speak(hub, made)
        with running_hub(
            tmp_path / "hub", "ann,bob,dia", port=port, deadline=patience(3.0), **SECURE
        ) as again:
            training.result()
            assert again.rounds.version == 1
            check_close(
                weights_of(again), simulated(made, tmp_path, average, every=H, weights=rows)
            )


def test_a_difference_that_the_grid_lacks_is_not_reported_and_keeps_nobody_waiting(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = islands_of(small, tmp_path, 3, iters=H, **LORA)
    made["cem"]["learning_rate"] = 1e7
    with secure_hub(tmp_path / "hub", "ann,bob,cem", monkeypatch) as hub:
        train_islands(hub, made, {})
        assert {*hub.rounds.fragment(0).facts.counted} == {"ann", "bob"}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"encoding": "int8"}, "encoding is int8 with secure_sums"),
        ({"encoding": "top-k:0.1"}, "encoding is top-k:0.1"),
        ({"mode": "diloco"}, "mode is diloco"),
        ({"mode": "async"}, "mode is async"),
        ({"fragments": 2}, "fragments is 2"),
        ({"aggregate": "median"}, "aggregate is median"),
        ({"aggregate": "trimmed-mean"}, "aggregate is trimmed-mean"),
        ({"max_norm_ratio": 5}, "max_norm_ratio is 5"),
        ({"clip": 1.0}, "clip is 1"),
    ],
    ids=str,
)
def test_what_needs_single_differences_is_refused(
    options: dict[str, Any], name: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        HubOptions.from_flat(path=str(tmp_path), **{**SECURE, **options})
    assert name in refused.value.problem


def test_a_plain_report_is_none_of_a_secure_hub(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = islands_of(small, tmp_path, 2, iters=H, **LORA)
    path = report_path(0, life=2, base=1, rows=1, tokens=1)
    with secure_hub(tmp_path / "hub", "ann,bob", monkeypatch) as hub:
        train_islands(hub, made, {})
        client = Hub(hub.url, hub.tokens["ann"], lambda text: None)
        with NamedTemporaryFile() as body:
            # No socket holds so many: the answer waits for all of them, or it is lost.
            body.truncate(16 << 20)
            with pytest.raises(Refusal, match="the body should have"):
                client.put(path, body)


def test_a_share_of_a_key_is_none_of_a_plain_hub(tmp_path: Path) -> None:
    with running_hub(tmp_path / "hub", "ann,bob", mode="fedavg") as hub:
        client = Hub(hub.url, hub.tokens["ann"], lambda text: None)
        path = report_path(0, life=2, base=1, rows=1, tokens=1)
        with pytest.raises(Refusal, match="makes no secure sums"):
            client.post(path, {"keys": Member().public_keys})
