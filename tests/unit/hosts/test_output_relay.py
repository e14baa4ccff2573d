"""What stands between mpirun's output and that of launch: words of rank 0 are taken out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardmlx.common.environment import (
    BEGUN,
    LAUNCHED,
    tell_launch,
    tell_launch_of_checkpoint,
)
from shardmlx.hosts.output_relay import SaidByRank0

SECRET = Path("/tmp/of-another-host/status")
OUTPUT = f"step 1\n/tmp/of-{SECRET} {BEGUN}\n{SECRET} 2\nlast line without an end: {SECRET}"
SHOWN = f"step 1\n/tmp/of-last line without an end: {SECRET}"


@pytest.mark.parametrize("size", [1, 2, 7, 40, 1000])
def test_words_of_rank_0_are_taken_out_however_the_output_is_cut(size: int) -> None:
    said = SaidByRank0(SECRET)
    data = OUTPUT.encode()
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    shown = b"".join(map(said.taken_out_of, parts)) + said.rest()
    assert shown.decode() == SHOWN
    assert said.status == 2


def test_a_checkpoint_is_told_in_output_alone_and_hides_no_other_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launch that sees the file sees the checkpoint, too."""
    for path, output in ((tmp_path / "status", False), (tmp_path / "nowhere" / "status", True)):
        said = SaidByRank0(path)
        monkeypatch.setenv(LAUNCHED, str(path))
        tell_launch(f"{BEGUN}12")
        tell_launch_of_checkpoint()
        shown = said.taken_out_of(f"step 7{capsys.readouterr().out}".encode())
        assert (shown + said.rest(), said.has_saved, said.rank_0) == (b"step 7", output, 12)
        tell_launch(1)
        tell_launch_of_checkpoint()
        said.taken_out_of(capsys.readouterr().out.encode())
        assert (said.status, said.has_saved) == (1, output)
    monkeypatch.delenv(LAUNCHED)
    tell_launch_of_checkpoint()
    assert capsys.readouterr().out == ""


def test_output_that_has_no_words_is_held_back_no_longer_than_it_may_have_some() -> None:
    said = SaidByRank0(SECRET)
    assert said.taken_out_of(b"a progress bar \r") == b"a progress bar \r"
    assert said.taken_out_of(b"see /tm") == b"see "
    assert said.taken_out_of(b"p/elsewhere") == b"/tmp/elsewhere"
    assert (said.has_begun, said.status) == (False, None)


def test_rank_0_says_how_it_ends_in_a_file_or_in_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, output in ((tmp_path / "status", False), (tmp_path / "nowhere" / "status", True)):
        said = SaidByRank0(path)
        monkeypatch.setenv(LAUNCHED, str(path))
        assert (said.has_begun, said.status) == (False, None)
        tell_launch(BEGUN)
        said.taken_out_of(capsys.readouterr().out.encode())
        assert (said.has_begun, said.status) == (True, None)
        tell_launch(0)
        shown = capsys.readouterr().out
        said.taken_out_of(shown.encode())
        assert (bool(shown), said.has_begun, said.status) == (output, True, 0)


PROGRAM = """
import os, pathlib, subprocess, sys
from shardmlx.hosts.output_relay import OutputRelay, SaidByRank0
said = SaidByRank0(pathlib.Path("/nowhere/at/all"))
with OutputRelay(said, listens=True) as relay:
    with subprocess.Popen(["sh", "-c", sys.argv[1]], stdout=relay.stdout, stderr=relay.stderr):
        relay.started()
sys.exit(said.status)
"""


def test_all_output_comes_in_its_order_and_a_child_that_stays_is_not_waited_for() -> None:
    script = (
        "for i in 1 2 3; do echo out $i; echo err $i >&2; done; echo /nowhere/at/all 7; sleep 30 &"
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=20,
        env=dict(os.environ),
    )
    assert done.returncode == 7
    assert done.stdout.splitlines() == [f"{each} {i}" for i in (1, 2, 3) for each in ("out", "err")]


KEEPING = """
import pathlib, subprocess, sys
from shardmlx.hosts.output_relay import LastWords, OutputRelay, SaidByRank0
last = LastWords()
said = SaidByRank0(pathlib.Path("/nowhere/at/all"))
with OutputRelay(said, listens=False, last_words=last) as relay:
    with subprocess.Popen(["sh", "-c", sys.argv[1]], stdout=relay.stdout, stderr=relay.stderr):
        relay.started()
print("why:", last.why or "unknown")
"""


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            "prterun noticed that process rank 1 with PID 77 on node mac-b exited on\\nsignal 9",
            "rank 1 on mac-b was ended by signal 9",
        ),
        (
            "shardmlx: failed: rank 2 on mac-c died\\nprterun noticed that process rank 0 with PID "
            "8 on node mac-a exited on signal 15",
            "rank 2 on mac-c died",
        ),
        ("a warning", ""),
    ],
    ids=["mpirun", "a rank", "nobody"],
)
def test_what_a_job_said_of_its_end_on_stderr_is_kept_and_passed_on(said: str, why: str) -> None:
    """Where stderr is a file of its own, and where it is that of stdout."""
    script = f"echo begins; printf '{said}\\n' >&2"
    for together in (False, True):
        command = [sys.executable, "-c", KEEPING, script]
        stderr = subprocess.STDOUT if together else subprocess.PIPE
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=20, check=True
        )
        assert done.stdout.splitlines()[-1] == f"why: {why or 'unknown'}"
        assert said.replace("\\n", "\n") in (done.stdout if together else done.stderr)
        assert done.stdout.startswith("begins\n")
