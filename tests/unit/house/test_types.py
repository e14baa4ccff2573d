"""The types of the whole project hold. A test, so that the other worker goes on meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from testbed.jobs import ROOT


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "what", [[], [f"scripts/{path.name}" for path in sorted((ROOT / "scripts").glob("*.py"))]]
)
def test_mypy_finds_nothing(what: list[str]) -> None:
    """In the packages that pyproject.toml names, and in the scripts, which are modules by
    themselves."""
    job = subprocess.run(
        [sys.executable, "-m", "mypy", *what],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": "scripts"} if what else None,
        capture_output=True,
        text=True,
        check=False,
    )
    if job.returncode:
        pytest.fail(job.stdout + job.stderr, pytrace=False)
