"""The workflows for GitHub call scripts, and run tests, that are there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
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


def run_step(
    name: str, cwd: Path, workflow: str = "release", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the step of a workflow that has this name, as GitHub does."""
    jobs = yaml.safe_load(WORKFLOWS[workflow].read_text())["jobs"]
    (step,) = (
        step for job in jobs.values() for step in job["steps"] if name in step.get("name", "")
    )
    command = ["bash", "-e", "-c", f"{step['run']}\necho 'the build goes on'"]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


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


def test_every_link_and_picture_of_pypis_page_leads_to_a_file_of_the_release(
    tmp_path: Path,
) -> None:
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    release = {"GITHUB_REPOSITORY": "ann/shardmlx", "GITHUB_REF_NAME": "v1.2.3"}
    python = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    assert run_step("Links", tmp_path, **release, **python).returncode == 0
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)", page) + re.findall(r'(?:src|srcset|href)="([^"]+)"', page)
    assert [link for link in links if not link.startswith("https://")] == []
    ours = re.compile(
        r"https://(raw\.githubusercontent\.com/ann/shardmlx|github\.com/ann/shardmlx/blob)/v1\.2\.3/"
        r"([^#]+)"
    )
    found = [match for match in map(ours.match, links) if match]
    assert len(found) > 30
    for match in found:
        assert (ROOT / match[2]).is_file()
        is_picture = Path(match[2]).suffix in (".svg", ".png")
        assert is_picture == match[1].startswith("raw.")


@pytest.mark.parametrize(
    ("number", "does"),
    [
        ("", "issue create --title Fails --body See URL."),
        ("7", "issue comment 7 --body Again: URL."),
    ],
)
def test_a_weekly_failure_opens_no_second_issue(number: str, does: str, tmp_path: Path) -> None:
    gh = tmp_path / "gh"
    gh.write_text('#!/bin/sh\necho "$*" >> calls\ncase "$2" in list) printf %s "$NUMBER";; esac\n')
    gh.chmod(0o755)
    variables = {"TITLE": "Fails", "RUN": "URL", "NUMBER": number}
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert run_step("Open an issue", tmp_path, "weekly", PATH=path, **variables).returncode == 0
    asked, done = (tmp_path / "calls").read_text().splitlines()
    assert asked.startswith("issue list --state open ")
    assert "env.TITLE" in asked
    assert done == does


def test_macs_are_not_asked_about_what_only_readers_see() -> None:
    # YAML takes the key ``on`` for True.
    events = yaml.safe_load(WORKFLOWS["mac"].read_text())[True]
    for event in ("push", "pull_request"):
        ignored = events[event]["paths-ignore"]
        assert {"**.md", "docs/**"} <= set(ignored)
        assert not any("shardmlx" in path or "tests" in path for path in ignored)


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
