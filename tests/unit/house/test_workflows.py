"""The workflows for GitHub call scripts, and run tests, that are there."""

from __future__ import annotations

import re
import shutil
import subprocess
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


# Checks that stop


def run_step(name: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the step of the release that has this name, as GitHub does."""
    jobs = yaml.safe_load(WORKFLOWS["release"].read_text())["jobs"]
    (step,) = (
        step for job in jobs.values() for step in job["steps"] if name in step.get("name", "")
    )
    command = ["bash", "-e", "-c", f"{step['run']}\necho 'the build goes on'"]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


OWNED = (
    "pyproject.toml",
    "mkdocs.yml",
    "README.md",
    "CITATION.cff",
    "docs/developers/contributing.md",
)
"""Files that name the repository by its owner."""


def with_owner(directory: Path, owner: str) -> None:
    for name in OWNED:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / name).read_text(encoding="utf-8")
        (directory / name).write_text(text.replace("github.com/OWNER", f"github.com/{owner}"))


def test_a_release_stops_while_one_file_still_has_owner_for_its_owner(tmp_path: Path) -> None:
    with_owner(tmp_path, "ann")
    done = run_step("OWNER", tmp_path)
    assert (done.returncode, done.stdout) == (0, "the build goes on\n")
    for name in OWNED:
        assert "github.com/OWNER" in (ROOT / name).read_text(encoding="utf-8")
        shutil.copy(ROOT / name, tmp_path / name)
        done = run_step("OWNER", tmp_path)
        assert done.returncode == 1
        lines = done.stdout.splitlines()
        assert lines
        assert all(line.startswith(f"{name}:") for line in lines)
        with_owner(tmp_path, "ann")


def test_a_release_stops_where_a_file_that_it_looks_into_is_missing(tmp_path: Path) -> None:
    with_owner(tmp_path, "ann")
    (tmp_path / "CITATION.cff").unlink()
    done = run_step("OWNER", tmp_path)
    assert done.returncode == 1
    assert "CITATION.cff" in done.stderr
    assert "the build goes on" not in done.stdout


def test_no_other_file_names_the_owner() -> None:
    pages = [*ROOT.glob("*.*"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").iterdir()]
    naming = {
        path.relative_to(ROOT).as_posix()
        for path in pages
        if path.is_file() and "github.com/OWNER" in path.read_text(encoding="utf-8")
    }
    assert naming == set(OWNED)


@pytest.mark.parametrize(
    "path",
    [*sorted((ROOT / "scripts").glob("*.sh")), *sorted(WORKFLOWS.values())],
    ids=lambda path: path.name,
)
def test_no_command_fails_in_silence(path: Path) -> None:
    """``bash -e`` goes on after ``! command`` and ``command || true``; after a pipe, where only the
    last command's status counts, a workflow goes on, too, since GitHub's bash has no pipefail."""
    text = path.read_text(encoding="utf-8")
    lines = "\n".join(steps(path.stem)) if path.suffix == ".yml" else text
    forbidden = r"^\s*!\s|\|\|\s*(true|:)(\s|$)" + (r"|[^|]\|[^|]" if path.suffix == ".yml" else "")
    assert re.findall(rf"(?m).*(?:{forbidden}).*", lines) == []
    if path.suffix == ".sh" and not path.name.startswith("_"):
        assert "set -euo pipefail" in text
