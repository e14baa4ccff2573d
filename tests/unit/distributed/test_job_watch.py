"""The thread that watches the job: what it sends, hears, and does."""

from __future__ import annotations

import pickle
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import pytest

from shardmlx.distributed import fate, job_watch
from shardmlx.distributed.fate import JobFate
from shardmlx.distributed.fate_events import Action, Beat, Look, State
from shardmlx.distributed.job_watch import JobWatch
from shardmlx.distributed.messages import PeerLost
from shardmlx.distributed.shutdown import JobShutdown
from shardmlx.distributed.transport import Activity

NAMES = ("rank 0 on mac1", "rank 1 on mac2", "rank 2 on mac3")


class BeatChannel:
    """Carries the beats that it is given, and keeps those that are posted."""

    def __init__(self, *beats: tuple[int, Beat]) -> None:
        self.posted: list[tuple[int, Beat]] = []
        self.all_posted = threading.Event()
        self.fetches = threading.Semaphore(0)
        self.closed = False
        self._beats = list(beats)
        self._fetches = False

    def post(self, peer: int, data: bytes, *, is_repeated: bool) -> None:
        assert not self._fetches, "MPI's channel would wait for ever"
        self.posted.append((peer, pickle.loads(data)))
        if len(self.posted) == 2:
            self.all_posted.set()

    def fetch(self) -> Iterator[tuple[int, bytes]]:
        self._fetches = True
        while self._beats:
            peer, beat = self._beats.pop(0)
            yield peer, pickle.dumps(beat)
        self._fetches = False
        self.fetches.release()

    def close(self) -> None:
        self.closed = True


class CalmFate(JobFate):
    """A fate for which there is no need to look again."""

    def looked(self, look: Look, now: float) -> list[Action]:
        actions = super().looked(look, now)
        self.pause = 3600.0
        return actions


class Job:
    """Rank 0's watch over three ranks, whose end is only noted."""

    def __init__(
        self,
        *beats: tuple[int, Beat],
        limit: float = 60.0,
        kind: type[JobFate] = JobFate,
        pids: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.channel = BeatChannel(*beats)
        self.activity = Activity("rank 0 on mac1")
        self.activity.begin("loading")
        self.ends: list[tuple[int, str]] = []
        self.ended = threading.Event()
        self.shutdown = JobShutdown(0)
        own = kind(0, NAMES, limit, time.monotonic())
        self.watch = JobWatch(self.shutdown, self.activity, own, pids, self.channel, self._end)

    def _end(self, code: int, reason: str) -> None:
        self.ends.append((code, reason))
        self.ended.set()


def test_the_thread_sends_receives_and_acts(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job((2, Beat("step 3", ("SIGTERM",))))
    assert job.channel.all_posted.wait(10)
    assert job.ended.wait(10)
    job.watch.close()
    assert job.channel.posted[:2] == [(1, Beat("loading")), (2, Beat("loading"))]
    assert job.channel.posted[-2:] == [
        (1, Beat("loading", (), State.LEFT)),
        (2, Beat("loading", (), State.LEFT)),
    ]
    assert job.channel.closed
    assert job.ends == [(128 + signal.SIGTERM, "interrupted by SIGTERM")]
    assert job.activity.failure is None
    assert capsys.readouterr().err == "shardmlx: interrupted by SIGTERM\n"


def test_a_signal_is_heard_at_once_until_the_watch_is_closed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    job = Job(kind=CalmFate)
    assert job.channel.fetches.acquire(timeout=0.2) is False
    signal.raise_signal(signal.SIGTERM)
    assert job.ended.wait(10)
    job.watch.close()
    assert job.ends == [(128 + signal.SIGTERM, "interrupted by SIGTERM")]
    assert capsys.readouterr().err == "shardmlx: interrupted by SIGTERM\n"
    assert signal.signal(signal.SIGTERM, before) is signal.SIG_DFL
    assert not any(each.name == "heartbeat" for each in threading.enumerate())


@pytest.mark.parametrize("fails", [False, True], ids=["reports", "fails"])
def test_who_reports_or_fails_wakes_the_watch_at_once_which_then_looks_often(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer's report comes within a turn."""
    monkeypatch.setattr(fate, "SECONDS_TO_RAISE", 600.0)  # for which it would speak itself
    job = Job(kind=CalmFate)
    assert job.channel.all_posted.wait(10)
    if fails:
        job.watch.fail(PeerLost("rank 2 died"))
    else:
        job.shutdown.on_turn()
    for _ in range(5):
        assert job.channel.fetches.acquire(timeout=10)
    job.watch.close()
    assert not job.ends


def test_a_rank_that_is_asked_whether_it_lives_tells_all_at_once() -> None:
    job = Job((2, Beat("step 3", asks=True, living=(2,))))
    answer = Beat("loading", living=(0, 2))
    while (2, answer) not in job.channel.posted:
        assert not job.ended.wait(0.01)
    assert (1, answer) in job.channel.posted
    job.watch.close()
    assert job.activity.failure is None


def test_whoever_says_the_last_line_tells_its_peers_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = Job()
    assert job.channel.all_posted.wait(10)
    assert job.shutdown.report(RuntimeError("rank 0: no memory"))
    assert not job.shutdown.say("and then this")
    job.watch.close()
    assert capsys.readouterr().err == "shardmlx: failed: rank 0: no memory\n"
    assert [peer for peer, beat in job.channel.posted if beat.state is State.REPORTED] == [1, 2]


def test_who_is_about_to_report_a_failure_tells_its_peers() -> None:
    job = Job()
    job.shutdown.on_turn()
    while [peer for peer, beat in job.channel.posted if beat.fails][:2] != [1, 2]:
        assert not job.ended.wait(0.01)
    assert not job.shutdown.leaves_report()
    job.watch.close()


def test_who_hears_that_a_peer_is_about_to_report_leaves_it_to_it() -> None:
    job = Job((1, Beat("step 3", fails=True)))
    job.shutdown.on_turn()
    while not job.shutdown.leaves_report():
        assert not job.ended.wait(0.01)
    job.watch.close()
    assert not any(beat.fails for _, beat in job.channel.posted)


def test_a_process_that_ends_is_a_rank_that_died_unless_its_number_was_never_valid_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with subprocess.Popen(["sleep", "600"]) as peer, subprocess.Popen(["true"]) as other:
        other.wait()
        job = Job(pids={1: peer.pid, 2: other.pid})
        for _ in range(3):
            assert job.channel.fetches.acquire(timeout=10)
        assert not job.ends
        assert not any(beat.fails for _, beat in job.channel.posted)
        peer.kill()
    assert job.ended.wait(10)
    job.watch.close()
    died = "rank 1 on mac2 died (was it killed, or out of memory?); it was last in starting"
    assert job.ends == [(1, died)]
    assert capsys.readouterr().err == f"shardmlx: failed: rank 0 on mac1, loading: {died}\n"
    assert repr(job.activity.failure) == repr(PeerLost(died))


def test_a_failure_that_the_main_thread_does_not_meet_soon_is_reported_and_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fate, "SECONDS_TO_RAISE", 0.0)
    job = Job()
    job.watch.fail(PeerLost("rank 2 on mac3 died, or the link to it broke"))
    assert job.ended.wait(10)
    job.watch.close()
    assert job.ends == [(1, "")]
    said = "rank 0 on mac1, loading: rank 2 on mac3 died, or the link to it broke"
    assert capsys.readouterr().err == f"shardmlx: failed: {said}\n"


def test_a_rank_whose_peer_has_spoken_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job((1, Beat("step 3", (), State.REPORTED)))
    assert job.shutdown.reported.wait(10)
    assert not job.shutdown.report(RuntimeError("nothing came"))
    job.watch.close()
    assert capsys.readouterr().err == ""


def test_a_silent_rank_is_this_rank_s_failure_which_the_main_thread_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fate, "SECONDS_TO_RAISE", 600.0)
    job = Job(limit=0.0)
    while job.activity.failure is None:
        assert not job.ended.wait(0.01)
    with pytest.raises(PeerLost, match="rank 0 on mac1, loading: rank 1 on mac2 has given no sign"):
        job.activity.check(job.activity.where)
    job.watch.close()


def test_an_error_on_the_thread_is_this_rank_s_failure_and_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others would find it silent."""
    monkeypatch.setattr(job_watch, "SECONDS_TO_RAISE", 0.0)

    def fail(fate: JobFate, look: Look, now: float) -> list[Action]:
        raise KeyError("stage 1")

    monkeypatch.setattr(JobFate, "looked", fail)
    job = Job()
    assert job.ended.wait(10)
    job.watch.close()
    assert repr(job.activity.failure) == "KeyError('stage 1')"
    assert job.ends == [(1, "")]
    assert capsys.readouterr().err == f"shardmlx: failed: {job.shutdown.name}: KeyError: stage 1\n"
