"""Masked differences add up to what plain ones do, whoever drops out, and show nothing alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from io import BytesIO
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="needs cryptography: pip install '.[privacy]'")

from shardmlx.islands.protocol import Refusal
from shardmlx.islands.secure_hub import KEYS, NUMBERS, OVER, REVEAL, SHARES, SecureSum
from shardmlx.islands.secure_sums import (
    GRID,
    Member,
    joined,
    on_grid,
    read_sum,
    split,
    threshold,
    write_masked,
)
from shardmlx.islands.store import Report

NAMES = ("ann", "bob", "cem", "dia", "eve")
ROWS = dict(zip(NAMES, (4, 8, 1, 20, 7), strict=True))


def differences(count: int = 3000) -> dict[str, np.ndarray]:
    random = np.random.RandomState(0)
    sizes = (1e-6, 1e-2, 1.0, 30.0, 1e-3)
    return {
        name: (size * random.standard_normal(count)).astype(np.float32)
        for name, size in zip(NAMES, sizes, strict=True)
    }


def mean_of(names: Collection[str], values: Mapping[str, np.ndarray]) -> np.ndarray:
    total = sum(ROWS[name] * values[name].astype(np.float64) for name in names)
    return np.asarray(total / sum(ROWS[name] for name in names))


class Run:
    """A secure sum without HTTP: members speak in turn, but for those that are ``gone``."""

    def __init__(self, directory: Path, names: Sequence[str] = NAMES) -> None:
        self.directory = directory
        self.names = names
        self.values = differences()
        self.sum = SecureSum(since=0.0)
        self.members = {name: Member() for name in names}
        self.gone: set[str] = set()
        self.answers: dict[str, dict[str, Any]] = {}

    def say(self, name: str, **message: Any) -> dict[str, Any]:
        if "keys" not in message:
            message["attempt"] = self.sum.id
        report = Report(island=name, life=1, base=0, rows=ROWS[name], tokens=1)
        self.answers[name] = self.sum.tell(report, message)
        return self.answers[name]

    def there(self) -> list[str]:
        return [name for name in self.names if name not in self.gone]

    def close(self) -> str:
        """The hub looks: whoever is gone is not awaited."""
        self.sum.close_due(self.there(), 0.0, is_late=False)
        return self.sum.phase

    def keys(self) -> None:
        for name in self.there():
            self.say(name, keys=self.members[name].public_keys)

    def shares(self) -> None:
        for name in self.there():
            given = self.say(name)
            self.say(name, shares=self.members[name].seal(name, self.sum.id, given["keys"]))

    def numbers(self) -> None:
        for name in self.there():
            masks = self.members[name].masks(self.say(name)["sealed"])
            path = self.directory / name
            with path.open("wb") as file:
                write_masked(BytesIO(self.values[name].tobytes()), file, ROWS[name], masks)
            self.sum.put(name, path)

    def reveal(self) -> None:
        for name in self.there():
            given = self.say(name)
            self.say(name, reveal=self.members[name].reveal(given["survivors"]))

    def mean(self) -> np.ndarray:
        assert not self.sum.problem
        self.sum.mean_into(self.directory / "mean")
        return np.fromfile(self.directory / "mean", np.float32)

    def to_the_end(self, lost: Mapping[str, Sequence[str]] | None = None) -> None:
        """Go through all phases, in each of which some drop out before they have spoken."""
        for phase, speak in (
            (KEYS, self.keys),
            (SHARES, self.shares),
            (NUMBERS, self.numbers),
            (REVEAL, self.reveal),
        ):
            assert self.sum.phase == phase
            self.gone |= {*(lost or {}).get(phase, ())}
            speak()
            if self.close() == OVER:
                return


def check_mean(found: np.ndarray, names: Collection[str], values: Mapping[str, np.ndarray]) -> None:
    """To the grid, and the rounding of float32."""
    exact = mean_of(names, values)
    most = len(names) * GRID / sum(ROWS[name] for name in names)
    assert (np.abs(found - exact) <= most / 2 + np.abs(exact) * 2.0**-24).all()


def test_the_mean_is_the_plain_one_to_the_grid(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.to_the_end()
    check_mean(run.mean(), NAMES, run.values)


@pytest.mark.parametrize(
    ("lost", "counted"),
    [
        ({KEYS: ["eve"]}, NAMES[:4]),
        ({SHARES: ["ann", "eve"]}, NAMES[1:4]),
        ({NUMBERS: ["bob", "dia"]}, ("ann", "cem", "eve")),
        ({REVEAL: ["ann", "bob"]}, NAMES),
        ({SHARES: ["ann"], NUMBERS: ["bob"]}, NAMES[2:]),
        ({NUMBERS: ["eve"], REVEAL: ["cem"]}, NAMES[:4]),
    ],
    ids=str,
)
def test_who_drops_out_before_its_numbers_came_counts_not_and_after_it_does(
    lost: Mapping[str, Sequence[str]], counted: Sequence[str], tmp_path: Path
) -> None:
    run = Run(tmp_path)
    run.to_the_end(lost)
    assert sorted(run.sum.sent[NUMBERS]) == sorted(counted)
    check_mean(run.mean(), counted, run.values)


@pytest.mark.parametrize("phase", [SHARES, NUMBERS, REVEAL])
def test_without_more_than_half_there_is_no_sum(phase: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.to_the_end({phase: NAMES[:3]})
    assert run.sum.problem == "2 of 5 members are left, of 3"
    assert run.say("eve")["phase"] == OVER


def test_one_member_is_no_sum(tmp_path: Path) -> None:
    """Not even when it is late."""
    run = Run(tmp_path, ("ann",))
    run.keys()
    run.sum.close_due(["ann"], 900.0, is_late=True)
    assert run.sum.phase == KEYS


def test_what_the_hub_has_of_one_member_says_nothing(tmp_path: Path) -> None:
    """The numbers of each one alone look drawn; only all of them together are the sum."""
    run = Run(tmp_path)
    run.to_the_end()
    bodies = [run.sum.sent[NUMBERS][name] for name in NAMES]
    for body in bodies:
        numbers = np.fromfile(body, np.uint64)
        bits = np.unpackbits(numbers.view(np.uint8))
        assert abs(bits.mean() - 0.5) < 5 / (2 * np.sqrt(bits.size)), "half of the bits are set"
    for some in combinations(bodies, 4):
        found = np.concatenate(list(read_sum(some, run.sum._masks(), 1)))
        assert np.abs(found).mean() > 1e6, "masks of the fifth are left"


def test_shares_are_of_use_by_more_than_half_alone() -> None:
    secret = bytes(range(200, 232))
    shares = dict(enumerate(split(secret, range(1, 6), threshold(5)), start=1))
    for some in combinations(shares, 3):
        assert joined({place: shares[place] for place in some}) == secret
    for few in combinations(shares, 2):
        with pytest.raises(ValueError, match="shares of no secret"):
            joined({place: shares[place] for place in few})


def test_a_member_reveals_one_share_of_each_once_and_to_enough_alone(tmp_path: Path) -> None:
    """A hub that asks for more would see a difference."""
    run = Run(tmp_path)
    run.keys()
    run.close()
    run.shares()
    run.close()
    ann = run.members["ann"]
    sealed = run.say("ann")["sealed"]
    with pytest.raises(ValueError, match="too few"):
        ann.masks({"bob": sealed["bob"]})
    with pytest.raises(ValueError, match="bob did not send"):
        ann.masks({**sealed, "bob": sealed["cem"]})
    ann.masks(sealed)
    with pytest.raises(ValueError, match="could be seen"):
        ann.seal("ann", "another", {"ann": ann.public_keys, "bob": ["00", "00"]})
    bob = run.members["bob"]
    bob.masks(run.say("bob")["sealed"])
    with pytest.raises(ValueError, match="too few"):
        bob.reveal(["ann", "bob"])
    told = ann.reveal(["ann", "bob", "cem"])
    assert {*told} == {*NAMES}
    with pytest.raises(ValueError, match="too few"):
        ann.reveal(["cem", "dia", "eve"])


def test_numbers_that_the_grid_lacks_are_refused() -> None:
    for number in (np.inf, np.nan, 1e5):
        numbers = np.array([0.0, number], np.float32)
        with pytest.raises(ValueError, match="too large"):
            list(on_grid(BytesIO(numbers.tobytes()), 1000))


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        (KEYS, {"keys": 5}),
        (KEYS, {"keys": ["00", "no hex"]}),
        (KEYS, {"keys": ["00" * 32] * 3}),
        (SHARES, {"shares": {"ann": "00"}}),
        (SHARES, {"shares": {"mallory": "00", "bob": "00", "cem": "00", "dia": "00"}}),
        (REVEAL, {"reveal": {}}),
        (REVEAL, {"reveal": dict.fromkeys(NAMES, 7)}),
    ],
    ids=str,
)
def test_what_no_member_sends_is_refused(
    phase: str, message: dict[str, Any], tmp_path: Path
) -> None:
    run = Run(tmp_path)
    for before, speak in ((KEYS, run.keys), (SHARES, run.shares), (NUMBERS, run.numbers)):
        if before == phase:
            break
        speak()
        run.close()
    with pytest.raises(Refusal) as refused:
        run.say("eve", **message)
    assert refused.value.status == 422


def test_who_comes_late_or_from_another_sum_begins_anew(tmp_path: Path) -> None:
    run = Run(tmp_path, NAMES[:3])
    run.keys()
    run.close()
    late = run.say("eve", keys=Member().public_keys)
    assert (late["phase"], late["problem"]) == (OVER, "too late for this round")
    report = Report(island="ann", life=1, base=0, rows=1, tokens=1)
    assert run.sum.tell(report, {"attempt": "another"})["phase"] == OVER
    with pytest.raises(Refusal):
        run.sum.put("ann", tmp_path / "early")


def test_shares_of_another_key_are_no_sum(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.to_the_end({NUMBERS: ["eve"]})
    run.sum.sent[REVEAL]["ann"]["eve"] = "00" * 66
    with pytest.raises(ValueError, match="shares of"):
        run.sum.mean_into(tmp_path / "mean")
