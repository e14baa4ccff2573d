#!/usr/bin/env python3
"""List what docs/comparison.md says of projects that have released a newer version since.

    python scripts/claims.py [--index https://pypi.org/pypi]

The table "What was looked at" names each project, the version that was looked at, and the day. The
script asks PyPI for the newest release of each. Exit status 1: some are newer, so read what the
pages say of them again, and write the new version and day into the table. 2: for some PyPI did not
answer.
"""

from __future__ import annotations

from _root import ROOT

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from packaging.version import Version

PAGE = ROOT / "docs/comparison.md"
PYPI = "https://pypi.org/pypi"
SECONDS = 20.0

ROW = re.compile(r"^\| ([\w-]+) \| (\S+) \| (\d{4}-\d\d-\d\d) \| .* \|$", re.MULTILINE)


@dataclass(frozen=True)
class LookedAt:
    """A project as the pages describe it; ``day`` is ISO 8601."""

    project: str
    version: str
    day: str


@dataclass(frozen=True)
class Release:
    """The newest release of a project; ``day`` is ISO 8601."""

    version: str
    day: str


def looked_at(page: Path) -> list[LookedAt]:
    """Return the rows of the page's table."""
    return [LookedAt(*row) for row in ROW.findall(page.read_text(encoding="utf-8"))]


def newest(project: str, index: str = PYPI) -> Release:
    """Return the newest release, by PyPI's JSON API; `URLError` if it does not answer."""
    with urlopen(f"{index}/{project}/json", timeout=SECONDS) as answer:
        found = json.load(answer)
    days = [each["upload_time"][:10] for each in found["urls"]]
    return Release(found["info"]["version"], min(days, default="an unknown day"))


def pages_that_name(project: str) -> list[str]:
    """Return the pages on which a project's name stands."""
    word = re.compile(rf"(?<![\w-]){re.escape(project)}(?![\w-])", re.IGNORECASE)
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        str(page.relative_to(ROOT))
        for page in pages
        if word.search(page.read_text(encoding="utf-8"))
    ]


def main(argv: list[str]) -> int:
    """Print a line for each project with a newer release; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--index", default=PYPI, help="where PyPI's JSON API is")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page that has the table")
    given = parser.parse_args(argv)
    index = given.index
    every = looked_at(given.page)
    newer = unanswered = 0
    for seen in every:
        try:
            release = newest(seen.project, index)
        except (URLError, TimeoutError) as error:
            print(f"{seen.project}: no answer from {index}/{seen.project}/json: {error}")
            unanswered += 1
            continue
        if Version(release.version) > Version(seen.version):
            newer += 1
            print(
                f"{seen.project}: {release.version} of {release.day}; looked at was "
                f"{seen.version} on {seen.day}: {', '.join(pages_that_name(seen.project))}"
            )
    print(f"{len(every)} projects, {newer} with a newer release, {unanswered} without an answer")
    return 2 if unanswered else int(newer > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
