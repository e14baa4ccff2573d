"""A conversation at a terminal, with a rank on each of two hosts."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.helpers.hosts import Lab
from tests.helpers.terminals import Terminal


def test_a_terminal_shows_what_two_hosts_say_as_it_comes(lab: Lab, small: Path) -> None:
    """Only the first host has the model, and the terminal."""
    shutil.copytree(small, lab.home("mac1") / "model")
    most = ("--max-tokens", "256", "--timeout", "20")
    with Terminal(lab.mpirun(2, "-m", "shardmlx.chat", "--model", "model", *most)) as terminal:
        terminal.until(">>")
        terminal.type("Hello\r")
        terminal.until(r"\?2004l[^\x1b]")
        terminal.type("\x03")
        terminal.until("prompt tokens computed")
        terminal.until(">>")
        terminal.type("\x04")
        status, shown = terminal.end()
        assert status == 0, shown
        assert "mac2" in shown
        assert terminal.is_as_before()
