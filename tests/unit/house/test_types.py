"""The types of the whole project hold. A test, so that the other worker goes on meanwhile."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.jobs import ROOT


@pytest.mark.timeout(600)
def test_mypy_finds_nothing() -> None:
    job = subprocess.run(
        [sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if job.returncode:
        pytest.fail(job.stdout + job.stderr, pytrace=False)
