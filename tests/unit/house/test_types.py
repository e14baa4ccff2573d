"""The types of the whole project hold. A test, so that the other worker goes on meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from testbed.jobs import ROOT

SCRIPTS = [str(path) for path in sorted((ROOT / "scripts").rglob("*.py"))]


@pytest.mark.timeout(600)
def test_mypy_finds_nothing() -> None:
    job = subprocess.run(
        [sys.executable, "-m", "mypy", "shardmlx", "testbed", "tests", *SCRIPTS],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": "scripts:scripts/bench"},
        capture_output=True,
        text=True,
        check=False,
    )
    if job.returncode:
        pytest.fail(job.stdout + job.stderr, pytrace=False)
