"""Rounds: when they close, and which reports count in them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmlx.errors import UserError
from shardmlx.islands.hub_options import HubOptions
from shardmlx.islands.protocol import Join, Joined, Progress, Refusal, SharedTensor
from shardmlx.islands.rounds import IslandState, Rounds
from shardmlx.islands.store import PUBLISHED, Report

JOIN = Join(name="ann", model={}, tensors=(SharedTensor("a", (4,)),), adapter_config={})


class Hub:
    """A hub with a clock that stands, whose only tensor is four equal numbers, at first 0."""

    def __init__(self, path: Path, *, joins: str = "ann,ben", **options: Any) -> None:
        options = {"outer_optimizer": "average", **options}
        self.options = HubOptions.from_flat(path=str(path), islands="ann,ben,cid", **options)
        self.joins = joins
        self.time = 0.0
        self.open()

    def open(self) -> None:
        self.rounds = Rounds(self.options, lambda: self.time)
        if self.rounds.run.first is None:
            for name in self.joins.split(","):
                self.join(name)
                if self.fragment.version is None:
                    self.rounds.seed(name, 0, self.body(0.0))

    def restart(self) -> None:
        self.rounds.run.close()
        self.open()

    @property
    def fragment(self) -> Any:
        return self.rounds.fragment(0)

    def join(self, name: str) -> Joined:
        self.rounds.hear(name)
        return self.rounds.join(name, replace(JOIN, name=name))

    def body(self, value: float) -> Path:
        path: Path = self.fragment.new_file()
        path.write_bytes(np.full(4, value, np.float32).tobytes())
        return path

    def report(self, name: str, value: float, base: int = 0, rows: int = 1, life: int = 1) -> None:
        """Put a report whose outer step would be to minus its value."""
        self.rounds.hear(name)
        report = Report(island=name, life=life, base=base, rows=rows, tokens=10)
        self.rounds.take(report, 0, self.body(value))

    def close(self) -> tuple[int, float]:
        """Close what is due; return the version and its number."""
        self.rounds.close_due()
        return self.fragment.version, float(
            np.fromfile(self.fragment.path(PUBLISHED), np.float32)[0]
        )


Make = Callable[..., Hub]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Make]:
    """A function of options that makes one hub."""
    hubs: list[Hub] = []

    def make(**options: Any) -> Hub:
        hubs.append(Hub(tmp_path, **options))
        return hubs[-1]

    yield make
    for hub in hubs:
        hub.rounds.run.close()


def refused(hub: Hub, *args: Any, **options: Any) -> Refusal:
    with pytest.raises(Refusal) as refusal:
        hub.report(*args, **options)
    return refusal.value


def test_a_round_closes_once_all_that_are_present_have_reported(made: Make) -> None:
    hub = made()
    hub.report("ann", 1)
    assert hub.close() == (0, 0)
    hub.report("ben", 3)
    assert hub.close() == (1, -2)


def test_it_does_not_wait_for_one_unheard_for_a_minute_nor_for_one_that_leaves(
    made: Make,
) -> None:
    hub = made()
    hub.time = 30
    hub.report("ann", 1)
    assert hub.close() == (0, 0)
    hub.time = 60
    assert hub.rounds.present() == ["ann", "ben"]
    hub.time = 61
    assert hub.rounds.present() == ["ann"]
    assert hub.close() == (1, -1)
    hub.rounds.hear("cid")  # who has not joined
    assert hub.rounds.present() == ["ann"]
    hub.rounds.hear("ben")
    hub.report("ann", 1, base=1)
    assert hub.close() == (1, -1)
    hub.rounds.progress("ben", Progress(step=1, tokens=1, leaving=True))
    assert hub.close() == (2, -2)
    hub.join("ben")
    assert hub.rounds.present() == ["ann", "ben"]


def test_after_the_deadline_it_closes_without_the_late_one_who_counts_in_the_next(
    made: Make,
) -> None:
    hub = made(deadline=5)
    assert hub.close() == (0, 0)  # its five seconds begin with the first report
    hub.time = 1
    hub.report("ann", 1)
    assert hub.close() == (0, 0)
    hub.time = 5.9
    assert hub.close() == (0, 0)
    hub.time = 6
    assert hub.close() == (1, -1)
    hub.report("ben", 4)
    assert [hub.rounds.islands[name].late for name in ("ann", "ben")] == [0, 1]
    assert hub.close() == (1, -1)  # its five seconds begin now
    hub.report("ann", 2, base=1)
    assert hub.close() == (2, -4)


def test_a_report_counts_once_and_one_of_a_later_life_too_but_none_of_an_earlier(
    made: Make,
) -> None:
    hub = made(joins="ann")
    for value in (5, 1):
        hub.report("ann", value)
    assert hub.close() == (1, -1)
    for _ in range(2):
        refusal = refused(hub, "ann", 1)
        assert (refusal.status, refusal.more) == (409, {"version": 1})
        hub.restart()
    assert hub.join("ann").life == 2
    hub.report("ann", 2, life=2)
    assert hub.close() == (2, -3)
    assert refused(hub, "ann", 1, base=1).status == 409


def test_an_island_that_goes_on_from_an_old_checkpoint_counts_nothing_twice(made: Make) -> None:
    """The round closed without its first report, and the second has what was trained after it."""
    hub = made(deadline=5)
    hub.report("ben", 4)
    hub.time = 6
    assert hub.close() == (0, 0)
    hub.time = 12
    assert hub.close() == (1, -4)
    hub.report("ann", 1)
    hub.report("ann", 2, base=1)
    refusal = refused(hub, "ann", 3)
    assert (refusal.status, refusal.more) == (409, {"version": 1})
    hub.report("ben", 0, base=1)
    assert hub.close() == (2, -5.5)


def test_a_report_that_comes_late_replaces_none_of_its_base_that_has_more_rows(made: Make) -> None:
    hub = made(joins="ann")
    hub.report("ann", 3, rows=6)
    hub.report("ann", 1, rows=2)
    assert hub.close() == (1, -3)


def test_a_version_of_another_hub_is_refused(made: Make) -> None:
    assert refused(made(), "ann", 1, base=3).status == 409


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_refused_and_leaves_no_file(
    made: Make, value: float
) -> None:
    hub = made()
    assert refused(hub, "ann", value).status == 422
    assert hub.fragment.pending == []


def test_a_norm_beyond_five_times_the_others_is_refused(made: Make) -> None:
    hub = made(max_norm_ratio=5, joins="ann,ben,cid")
    hub.report("ann", 1)
    hub.report("ben", 2)
    assert refused(hub, "cid", 8).status == 422
    hub.report("cid", 7)
    hub.close()
    hub.restart()
    assert refused(hub, "ann", 30, base=1).status == 422


def test_a_round_does_not_wait_for_one_whose_difference_it_refused(made: Make) -> None:
    hub = made(max_norm_ratio=5)
    hub.report("ann", 1)
    assert hub.close() == (0, 0)
    assert refused(hub, "ben", 8).status == 422
    assert hub.close() == (1, -1)
    hub.report("ann", 1, base=1)
    assert hub.close() == (1, -1)


def test_norms_are_compared_with_those_of_islands_that_are_present(made: Make) -> None:
    hub = made(max_norm_ratio=5)
    hub.report("ann", 1)
    hub.report("ben", 1)
    assert hub.close() == (1, -1)
    hub.time = 61
    hub.report("ann", 9, base=1)
    hub.rounds.progress("ann", Progress(step=1, tokens=1, leaving=True))
    assert refused(hub, "ben", 46, base=1).status == 422  # her report waits for the round
    hub.report("ben", 45, base=1)


def test_fedavg_weighs_by_rows(made: Make) -> None:
    hub = made(mode="fedavg")
    hub.report("ann", 1, rows=30)
    hub.report("ben", 5, rows=10)
    assert hub.close() == (1, -2)


def test_with_clipping_all_weigh_the_same_and_no_norm_is_above_it(made: Make) -> None:
    hub = made(mode="fedavg", clip=2.0)  # a norm is twice the number
    hub.report("ann", 0.5, rows=100)
    hub.report("ben", 50)
    assert hub.close() == (1, -0.75)


def test_an_asynchronous_report_counts_at_once_and_the_less_the_older_it_is(
    made: Make,
) -> None:
    hub = made(mode="async", outer_optimizer="sgd", joins="ann,ben")
    hub.report("ann", 1)
    assert hub.close() == (1, -1)
    hub.report("ann", 1, base=1)
    assert hub.close() == (2, -2)
    hub.report("ben", 6)
    assert hub.close() == (3, -4)


def test_an_asynchronous_island_takes_no_version_that_lacks_its_report(made: Make) -> None:
    hub = made(mode="async", joins="ann,ben")
    hub.report("ann", 1)
    assert hub.close() == (1, -1)
    hub.report("ben", 2)
    assert hub.rounds.version_for("ann", 0, after=0) == 1
    assert hub.rounds.version_for("ben", 0, after=0) == 0
    assert hub.rounds.version_for("ben", 0, after=-1) == 1  # it has joined anew, with nothing
    hub.close()
    assert hub.rounds.version_for("ben", 0, after=0) == 2


def test_an_asynchronous_run_that_has_ended_gives_its_last_version_to_all(made: Make) -> None:
    hub = made(mode="async", joins="ann,ben", rounds=1)
    hub.report("ann", 1)
    assert hub.close() == (1, -1)
    hub.report("ben", 2)
    assert hub.rounds.version_for("ben", 0, after=0) == 1


def test_in_rounds_an_island_takes_a_version_that_lacks_its_report(made: Make) -> None:
    hub = made(deadline=5)
    hub.report("ann", 1)
    assert hub.close() == (0, 0)
    hub.time = 5
    assert hub.close() == (1, -1)
    hub.report("ben", 2)
    assert hub.rounds.version_for("ben", 0, after=0) == 1


def test_asynchronous_reports_that_wait_together_are_steps_of_their_own(made: Make) -> None:
    hub = made(mode="async", outer_optimizer="sgd", joins="ann,ben")
    hub.report("ann", 1)
    hub.report("ben", 6)
    assert hub.close() == (2, -4)  # the second is one version old


def test_a_median_does_not_follow_one_liar_of_three(made: Make) -> None:
    hub = made(aggregate="median", joins="ann,ben,cid")
    for name, value in (("ann", 1.0), ("ben", 2.0), ("cid", 1e20)):
        hub.report(name, value)
    assert hub.close() == (1, -2)


def test_elastic_weights_are_pulled_to_each_island(made: Make) -> None:
    hub = made(outer_optimizer="elastic:0.125")
    hub.report("ann", 1)
    hub.report("ben", 2)
    assert hub.close() == (1, -0.375)


def test_a_parameter_server_reports_each_step_and_takes_the_mean(made: Make) -> None:
    hub = made(mode="parameter-server", outer_optimizer=None)
    assert (hub.options.terms.inner_steps, hub.options.terms.optimizer.name) == (1, "sgd")
    hub.report("ann", 1)
    hub.report("ben", 2)
    assert hub.close() == (1, -1.5)


def test_after_a_restart_islands_have_time_to_be_heard_of(made: Make) -> None:
    hub = made()
    hub.report("ann", 1)
    hub.time = 1000
    hub.restart()
    assert hub.rounds.present() == ["ann", "ben"]
    assert hub.close() == (0, 0)
    hub.time = 1061
    assert hub.close() == (1, -1)


def test_the_run_ends_after_its_rounds_and_keeps_reports_for_a_longer_one(
    made: Make,
) -> None:
    hub = made(joins="ann", rounds=1)
    hub.report("ann", 1)
    hub.close()
    answer = hub.rounds.progress("ann", Progress(step=1, tokens=1))
    assert answer == {"ended": True, "evaluate": True}
    hub.report("ann", 1, base=1)
    assert hub.close() == (1, -1)
    hub.options = replace(hub.options, rounds=None, tokens=20)
    assert hub.rounds.tokens == 10
    hub.restart()
    assert hub.close() == (2, -2)
    assert (hub.rounds.tokens, hub.rounds.ended) == (20, True)


def test_the_first_of_those_present_validates(made: Make) -> None:
    hub = made()
    message = Progress(step=1, tokens=1)
    answers = {name: hub.rounds.progress(name, message) for name in ("ben", "ann")}
    assert answers == {
        "ben": {"ended": False, "evaluate": False},
        "ann": {"ended": False, "evaluate": True},
    }


def test_a_run_ends_after_its_hours_whatever_the_machines_clock_says(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = made(hours=2, joins="ann")
    ahead = [0.0]
    monkeypatch.setattr(time, "time", lambda: 1e9 + hub.time + ahead[0])
    hub.time, ahead[0] = 3600.0, -1e9  # the machine has begun in 1970, and asks a time server
    assert hub.join("ann").life == 2
    ahead[0] = 0.0
    for jump in (1e6, -1e6, 0.0):
        ahead[0] = jump
        assert not hub.rounds.ended
    hub.time = 7199.0
    assert not hub.rounds.ended
    hub.time = 7200.0
    assert hub.rounds.ended


def test_a_restart_counts_the_hours_from_the_first_start_on(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = [0.0]
    monkeypatch.setattr(time, "time", lambda: 1e9 + hubs[-1].time + ahead[0] if hubs else 1e9)
    hubs: list[Hub] = []
    hubs.append(made(hours=2, joins="ann"))
    hub = hubs[0]
    hub.time = 100.0
    ahead[0] = 1e6  # the clock was wrong when the run began
    hub.join("ann")
    hub.time = 7100.0
    hub.restart()
    assert hub.rounds.run.seconds == pytest.approx(7100)
    assert not hub.rounds.ended
    hub.time = 7200.0
    assert hub.rounds.ended
    ahead[0] = -1e6  # it was set back while the hub was away
    hub.restart()
    assert hub.rounds.run.seconds == 0.0


def test_only_the_first_seeds_and_another_does_if_it_dies_and_the_first_whole_one_counts(
    tmp_path: Path,
) -> None:
    now = [0.0]
    rounds = Rounds(HubOptions.from_flat(path=str(tmp_path), islands="ann,ben"), lambda: now[0])
    rounds.hear("ann")
    assert rounds.join("ann", JOIN).versions == [None]
    rounds.hear("ben")
    with pytest.raises(Refusal) as refusal:
        rounds.join("ben", replace(JOIN, name="ben"))
    assert refusal.value.more == {"retry": True}
    assert rounds.join("ann", JOIN).versions == [None]
    assert (rounds.version, rounds.tokens, rounds.version_for("ann", 0, after=-1)) == (0, 0, -1)
    with pytest.raises(Refusal) as refusal:
        rounds.check(Report(island="ann", life=1, base=0, rows=1, tokens=1), 0)
    assert (refusal.value.status, refusal.value.more) == (409, {"retry": True})
    now[0] = 61
    rounds.hear("ben")
    joined = rounds.join("ben", replace(JOIN, name="ben"))
    assert joined.versions == [None]
    body = rounds.fragment(0).new_file()
    body.write_bytes(np.array([0, 0, np.nan, 0], np.float32).tobytes())
    with pytest.raises(Refusal) as refusal:
        rounds.seed("ann", 0, body)
    assert refusal.value.status == 422
    body.write_bytes(bytes(16))
    rounds.seed("ann", 0, body)  # she was alive, and came first
    with pytest.raises(Refusal) as refusal:
        rounds.seed("ben", 0, body)
    assert (refusal.value.status, refusal.value.more) == (409, {"version": 0})
    with pytest.raises(Refusal, match="--name is cid"):
        rounds.join("ann", replace(JOIN, name="cid"))
    with pytest.raises(UserError, match=r"b \[4\]"):
        rounds.join("ann", replace(JOIN, tensors=(SharedTensor("b", (4,)),)))
    rounds.run.close()


def test_no_more_than_three_reports_of_an_island_wait(made: Make) -> None:
    hub = made(deadline=1)
    for version in range(4):
        hub.time += 10
        hub.report("ann", 1, base=version)
        hub.close()
        hub.time += 10
        hub.close()
    hub.options = replace(hub.options, rounds=1)
    hub.restart()
    for base in range(3):
        hub.report("ben", 1, base=base)
    assert refused(hub, "ben", 1, base=3).more == {"retry": True}
    hub.report("ann", 1, base=4)


def test_a_report_that_comes_ends_a_wait_and_so_does_whoever_wakes_it(made: Make) -> None:
    hub = made()
    assert not hub.rounds.wait(0)
    hub.report("ann", 1)
    assert hub.rounds.wait(60)
    assert not hub.rounds.wait(0)
    hub.rounds.awake()
    assert hub.rounds.wait(60)


def test_a_fragment_that_is_none_is_refused(made: Make) -> None:
    with pytest.raises(Refusal) as refusal:
        made().rounds.fragment(1)
    assert refusal.value.status == 404


def test_a_hub_without_islands_is_refused_and_locks_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refusal:
        Rounds(HubOptions.from_flat(path=str(tmp_path)))
    assert refusal.value.problem == f"{tmp_path} has no tokens"
    Rounds(HubOptions.from_flat(path=str(tmp_path), islands="ann")).run.close()


def test_first_weights_are_whole_numbers_whatever_encoding_reports_have(tmp_path: Path) -> None:
    options = HubOptions.from_flat(path=str(tmp_path), islands="ann", encoding="top-k:0.5")
    rounds = Rounds(options)
    with closing(rounds.run):
        rounds.join("ann", JOIN)
        body = rounds.fragment(0).new_file()
        body.write_bytes(np.arange(4, dtype=np.float32).tobytes())
        rounds.seed("ann", 0, body)
        assert rounds.fragment(0).version == 0


def test_a_round_is_one_that_all_fragments_have(tmp_path: Path) -> None:
    names = ("layers.0.a", "layers.1.a", "layers.1.b")
    join = replace(JOIN, tensors=tuple(SharedTensor(name, (2,)) for name in names))
    options = HubOptions.from_flat(path=str(tmp_path), islands="ann", fragments=2, rounds=1)
    rounds = Rounds(options)
    with closing(rounds.run):
        rounds.join("ann", join)
        sizes = [each.seed_bytes for each in rounds.run.fragments]
        assert sizes == [8, 16]
        body = tmp_path / "body"
        body.write_bytes(np.array([0, 0, 0, np.inf], np.float32).tobytes())
        with pytest.raises(Refusal, match="not finite"):
            rounds.seed("ann", 1, body)
        for number, size in enumerate(sizes):
            body.write_bytes(bytes(size))
            rounds.seed("ann", number, body)
        for number, size in enumerate(sizes):
            assert (rounds.version, rounds.tokens, rounds.ended) == (0, 10 * number, False)
            body.write_bytes(bytes(size))
            report = Report(island="ann", life=1, base=0, rows=1, tokens=10)
            rounds.take(report, number, body)
            rounds.close_due()
        assert (rounds.version, rounds.tokens, rounds.ended) == (1, 10, True)


def test_whoever_changes_a_fragment_holds_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(HubOptions.from_flat(path=str(tmp_path), islands="ann"))
    with closing(rounds.run):
        rounds.join("ann", JOIN)
        fragment = rounds.fragment(0)
        report = Report(island="ann", life=1, base=0, rows=1, tokens=1)
        flush = os.fsync
        was_held: list[bool] = []

        def watched(descriptor: int) -> None:
            was_held.append(fragment.lock.locked())
            flush(descriptor)

        monkeypatch.setattr(os, "fsync", watched)
        body = tmp_path / "body"
        changes: list[Callable[[], None]] = [
            lambda: rounds.seed("ann", 0, body),
            lambda: rounds.take(report, 0, body),
            rounds.close_due,
        ]
        for change in changes:
            body.write_bytes(bytes(16))
            was_held.clear()
            change()
            assert {*was_held} == {True}
        assert fragment.version == 1


def test_islands_that_join_at_once_are_all_written_down(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = made(joins="ann")
    upload = hub.body(1.0)
    flush = os.fsync
    joins: list[Future[Joined]] = []
    with ThreadPoolExecutor(1) as pool:

        def watched(descriptor: int) -> None:
            if not joins:
                joins.append(pool.submit(hub.join, "ben"))
                wait(joins, timeout=0.05)  # as long as ann is being written down, he waits
            flush(descriptor)

        monkeypatch.setattr(os, "fsync", watched)
        assert hub.join("ann").life == 2
        assert joins[0].result(20).life == 1
    assert upload.exists()  # a report of whoever is in already
    hub.restart()
    assert hub.rounds.run.lives == {"ann": 2, "ben": 1}


def test_a_difference_that_cannot_be_decoded_is_refused(made: Make) -> None:
    hub = made(joins="ann", encoding="top-k:0.5")
    body = hub.fragment.new_file()
    body.write_bytes(np.array([0, 4], np.uint32).tobytes() + bytes(8))
    with pytest.raises(Refusal, match="a number at 4 of a tensor of 4") as refusal:
        hub.rounds.take(Report(island="ann", life=1, base=0, rows=1, tokens=1), 0, body)
    assert refusal.value.status == 422
    assert hub.fragment.pending == []


def test_an_island_without_rows_counts_as_one_with_a_row(made: Make) -> None:
    hub = made(mode="fedavg")
    hub.report("ann", 4, rows=0)
    hub.report("ben", 1, rows=3)
    assert hub.close() == (1, -1.75)


def test_the_page_is_told_all_of_each_island_and_fragment(made: Make) -> None:
    hub = made(joins="ann,ben", mode="fedavg")
    hub.report("ann", 1)
    hub.report("ben", 3)
    assert hub.close() == (1, -2)
    hub.time = 50
    hub.rounds.progress("ben", Progress(step=4, tokens=7, loss=2.5))
    hub.report("ben", 1, base=1)
    hub.time = 62
    hub.rounds.strangers["a guess"] += 2
    status = hub.rounds.status()
    unknown = {"heard": None, "progress": None, "leaving": False, "late": 0, "refused": 0}
    unseen = {"losses": [], "joined": False, "present": False, "silent": None}
    assert status["islands"]["cid"] == {**unknown, **unseen}
    ben = status["islands"]["ben"]
    assert (ben["joined"], ben["present"], ben["silent"]) == (True, True, 12.0)
    assert (ben["losses"], ben["progress"]["step"]) == ([(4, 2.5)], 4)
    ann = status["islands"]["ann"]
    assert (ann["joined"], ann["present"], ann["silent"]) == (True, False, 62.0)
    assert status["fragments"] == [{"version": 1, "reports": ["ben"]}]
    parts = ("model", "rounds", "tokens", "ended", "epsilon")
    assert [status[part] for part in parts] == [{}, 1, 20, False, None]
    assert (status["strangers"], status["terms"]["mode"]) == ({"a guess": 2}, "fedavg")


def test_before_an_island_joins_the_page_has_no_model_no_round_and_no_token(tmp_path: Path) -> None:
    rounds = Rounds(HubOptions.from_flat(path=str(tmp_path), islands="ann"))
    status = rounds.status()
    rounds.run.close()
    parts = ("model", "rounds", "tokens", "fragments")
    assert [status[part] for part in parts] == [None, 0, 0, []]


def test_a_curve_has_each_loss_once_and_every_other_point_once_there_are_400() -> None:
    island = IslandState()
    for step in range(400):
        for loss in (None, step / 2, step / 2):
            island.take(Progress(step=step, tokens=0, loss=loss))
    assert island.losses == [(step, step / 2) for step in range(400)]
    island.take(Progress(step=400, tokens=0, loss=200.0))
    assert island.losses == [(step, step / 2) for step in range(0, 401, 2)]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"clip": 1.0}, "clip"),
        ({"mode": "fedavg", "clip": 1.0, "aggregate": "median"}, "clip"),
        ({"mode": "fedavg", "noise": 1.0}, "noise"),
        ({"mode": "parameter-server", "overlap": 1}, "overlap"),
        ({"encoding": "zip"}, "zip"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        HubOptions.from_flat(path="lab", **options)
