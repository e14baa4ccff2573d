"""What is said to the user."""

from __future__ import annotations

import pytest

from shardmlx.common.reporter import Reporter


def test_what_counts_is_marked_and_data_steer_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Reporter().say_marked([("who [bold]", False), ("\x1b[2Jme\n", True)])
    assert capsys.readouterr().out == "who [bold]«\\x1b[2Jme\n»\n"
