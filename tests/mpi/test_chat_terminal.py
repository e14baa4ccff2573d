"""``shardmlx chat`` at a real terminal, under a real mpirun."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from testbed.jobs import AFTER_A_KILL, ranks_command
from testbed.small_models import small_directory
from tests.helpers.terminals import Terminal

MOST = 2048
"""Tokens, which take seconds."""
ANSWER = r"\?2004l[^\x1b]"
"""The first character of an answer: pasting has just been turned off."""
LAUNCH = [sys.executable, "-m", "shardmlx", "launch", "-n", "2", "chat"]
MPIRUN = ranks_command(1, "-m", "shardmlx.chat")


@pytest.fixture
def options(small_tokenizer: Path, tmp_path: Path) -> list[str]:
    """Those of a model that may hold several whole answers: what was cut counts for more, since
    each piece of a character becomes tokens of its own."""
    positions = 8 * MOST
    model = small_directory(tmp_path / "model", small_tokenizer, max_position_embeddings=positions)
    sizes = ["--max-tokens", str(MOST), "--cache-tokens", str(positions)]
    return ["--model", str(model), *sizes, "--timeout", "20"]


@pytest.mark.parametrize("start", [LAUNCH, MPIRUN], ids=["launch", "mpirun"])
def test_a_conversation_at_a_terminal(
    start: list[str], options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys edit a line, and the arrows bring it back; an answer shows while it grows. Ctrl-C stops
    the answer alone, and Ctrl-D leaves. The terminal is put back whatever ends the job. It has
    colours unless ``NO_COLOR`` is set, as in the second case."""
    if start == MPIRUN:
        monkeypatch.setenv("NO_COLOR", "1")
    with Terminal([*start, *options]) as terminal:
        terminal.until(r">>")
        terminal.type("Hellx\x7fo")
        terminal.until("o")
        terminal.type("\r")
        terminal.until(ANSWER)
        terminal.type("\x03")
        computed = terminal.until(r"\[\d+ of \d+ prompt tokens computed, \d+ generated")
        assert int(re.findall(r"\d+", computed)[2]) < MOST
        terminal.until(r">>")

        terminal.type("lost\x03\x1b[A")
        terminal.until("Hello")
        terminal.type("\x1b[200~, you!\nAnd they?\x1b[201~")  # pasted
        terminal.until("And they")
        terminal.type("\r")
        terminal.until(ANSWER)
        terminal.type("\x03")
        terminal.until(r"generated")
        terminal.until(r">>")
        if start == MPIRUN:
            assert not terminal.is_as_before()
            terminal.running.kill_rank(0, signal.SIGKILL)
            status, shown = terminal.end()
            assert status in AFTER_A_KILL, shown
            assert not re.search(r"\x1b\[[0-9;]*[1-9]m", shown)
            assert terminal.becomes_as_before()
            return
        terminal.type("\x04")
        status, shown = terminal.end()
        assert status == 0, shown
        assert "\x1b[0;1m>>" in shown
        assert "Peak memory" in shown
        assert "ABORT" not in shown
        assert terminal.becomes_as_before()
        assert terminal.running.left_behind() == []
