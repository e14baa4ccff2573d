"""The command ``hub`` says how islands join."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LINE = "SHARDMLX_ISLAND_TOKEN={} shardmlx train --config lora.yaml --island {} --name {}"


def said(directory: Path, output: int, lines: int, read: int) -> list[str]:
    """The first lines of a hub, which is then stopped."""
    options = ["--path", str(directory), "--islands", "ann,ben", "--port", "0"]
    command = [sys.executable, "-m", "shardmlx", "hub", *options]
    with subprocess.Popen(command, stdout=output, stderr=output) as process:
        os.close(output)
        text = b""
        while text.count(b"\n") < lines:
            text += os.read(read, 4096)
        process.send_signal(signal.SIGTERM)
    os.close(read)
    return text.decode().splitlines()[:lines]


@pytest.mark.parametrize("in_a_terminal", [True, False])
def test_the_line_of_each_island_has_its_token_in_a_terminal_and_else_its_place(
    tmp_path: Path, in_a_terminal: bool
) -> None:
    read, output = pty.openpty() if in_a_terminal else os.pipe()
    page, heading, *joining = said(tmp_path / "lab", output, 4, read)
    address = page.split()[3].rstrip(";")
    assert address.startswith("http://127.0.0.1:")
    assert heading.startswith("To join, on a machine of each island")
    files = [tmp_path / "lab" / "tokens" / name for name in ("ann", "ben")]
    tokens = [path.read_text().strip() if in_a_terminal else f'"$(cat {path})"' for path in files]
    assert [line.strip() for line in joining] == [
        LINE.format(token, address, path.name) for token, path in zip(tokens, files, strict=True)
    ]
