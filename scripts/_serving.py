"""A server of a model, started by a program that tries clients."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def served(command: Sequence[str]) -> Iterator[str]:
    """Run the command of a server; yield its address. ``SystemExit`` if it does not start."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as server:
        try:
            assert server.stdout is not None
            said = ""
            for line in server.stdout:
                said += line
                if found := re.search(r"Serving .* at (http\S+)", line):
                    yield found[1]
                    break
            else:
                sys.exit(f"{os.path.basename(sys.argv[0])}: the server does not start:\n{said}")
        finally:
            server.terminate()
            server.communicate(timeout=60)
