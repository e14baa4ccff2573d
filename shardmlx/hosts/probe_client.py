"""Talks to ``probe_script`` on several hosts at once, through ssh."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shardmlx.hosts import probe_script

SECONDS_TO_CLOSE = 1.0

T = TypeVar("T")


class Probe:
    """A probe that was started with ``command``. Raises ``OSError`` if it cannot be run."""

    def __init__(self, command: Sequence[str]) -> None:
        self._reading = threading.Lock()
        self._said: list[str] = []
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # its children end with it
        )
        self.send(Path(probe_script.__file__).read_text(encoding="utf-8"))

    def send(self, value: object) -> None:
        """Send one line. A missing answer reveals a probe that has gone."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(json.dumps(value) + "\n")
                self._process.stdin.flush()

    def receive(self) -> dict[str, Any] | None:
        """Return the next answer; None once there are no more."""
        with self._reading:
            for line in self._process.stdout or ():
                # Login scripts and ssh may say other things.
                if line.startswith(probe_script.MARK):
                    with contextlib.suppress(ValueError):
                        return dict(json.loads(line.removeprefix(probe_script.MARK)))
                self._said.append(line)
        return None

    def ended(self) -> tuple[int, str]:
        """Return the exit status and all that was said, once no more answers come."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_CLOSE)
        return self._process.poll() or 0, "".join(self._said)

    def close(self) -> None:
        """End the probe, with all its children."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        # A process outside the group may hold the other end: then a thread reads for ever.
        if self._reading.acquire(timeout=SECONDS_TO_CLOSE):
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._reading.release()


def at_once(work: Mapping[str, Callable[[], T]], seconds: float) -> dict[str, T]:
    """Run each on a thread of its own; return the results, without those that take longer."""
    results: dict[str, T] = {}

    def run(name: str) -> None:
        results[name] = work[name]()

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in work]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(results)
