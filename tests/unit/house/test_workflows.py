"""The workflows for GitHub call scripts, and run tests, that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
WORKFLOWS = {path.stem: path for path in (ROOT / ".github" / "workflows").glob("*.yml")}


def steps(name: str) -> list[str]:
    """Return what the steps of a workflow run."""
    jobs = yaml.safe_load(WORKFLOWS[name].read_text())["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


def test_there_is_one_for_each_purpose() -> None:
    assert set(WORKFLOWS) == {"linux", "mac", "weekly", "release"}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_what_a_workflow_names_is_there(name: str) -> None:
    named = re.findall(r"(?<=\./)scripts/\S+|\btests/\S+", "\n".join(steps(name)))
    assert [each for each in named if not (ROOT / each).exists()] == []


def test_the_mac_runs_all_tests_of_one_machine() -> None:
    run = "\n".join(steps("mac"))
    assert {"tests/unit", "tests/mpi", "tests/device"} <= set(run.split())
