"""The site: README.md is its home, every page is reached, and every link leads somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.helpers.sources import ROOT

SITE = ROOT / ".cache/site"
REPOSITORY = "https://github.com/OWNER/shardmlx"


class Page(HTMLParser):
    """The links, the anchors and the loaded files of a page of the site."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        loaded = [values.get("src"), values.get("srcset")]
        if tag == "link" and values.get("rel") in {"stylesheet", "icon", "preload"}:
            loaded.append(values["href"])
        self.loaded += [each for each in loaded if each]


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    job = subprocess.run(
        [sys.executable, ROOT / "scripts/site.py"], capture_output=True, text=True, check=False
    )
    assert job.returncode == 0, job.stdout + job.stderr
    return {path: Page(path) for path in SITE.rglob("*.html")}


def is_outside(link: str) -> bool:
    return bool(re.match(r"\w+:|//", link))


def test_every_link_leads_to_a_file_and_to_an_anchor_of_it(pages: dict[Path, Page]) -> None:
    dead = []
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            if is_outside(link) or path.name == "404.html":
                continue
            file, _, anchor = unquote(link).partition("#")
            target = (path.parent / file).resolve() if file else path
            target = target / "index.html" if target.is_dir() else target
            known = pages[target].anchors if target in pages else {anchor}
            if not target.exists() or (anchor and anchor not in known):
                dead.append(f"{path.relative_to(SITE)}: {link}")
    assert sum(len(page.links) for page in pages.values()) > 1000
    assert dead == []


def test_files_of_the_repository_that_are_linked_exist(pages: dict[Path, Page]) -> None:
    links = {link for page in pages.values() for link in page.links if REPOSITORY in link}
    files = {re.sub(r"[^/]*/main/", "", link.removeprefix(f"{REPOSITORY}/")) for link in links}
    assert {"CHANGELOG.md", "LICENSE", "CONTRIBUTING.md", "examples/first-run.ipynb"} <= files
    files -= {REPOSITORY}
    assert {file for file in files if not (ROOT / file).exists()} == set()


def test_the_home_says_what_the_readme_says(pages: dict[Path, Page]) -> None:
    home = (SITE / "index.html").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f'<h1 id="shardmlx">{readme.splitlines()[0].removeprefix("# ")}' in home
    headings = re.findall(r"^## (.*)$", readme, re.MULTILINE)
    assert len(headings) > 5
    assert [each for each in headings if f">{each}<a" not in home] == []
    for link in (REPOSITORY, f"{REPOSITORY}/blob/main/CHANGELOG.md", "all-pages.html"):
        assert link in pages[SITE / "index.html"].links


def test_every_page_is_in_the_list_beside_the_pages(pages: dict[Path, Page]) -> None:
    home = pages[SITE / "index.html"]
    listed = {(SITE / link.partition("#")[0]).resolve() for link in home.links if ".html" in link}
    own = {path for path in pages if path.name not in {"404.html", "index.html"}}
    assert own - listed == set()
    named = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    assert len(own) == len(named)


def test_no_page_loads_anything_from_elsewhere(pages: dict[Path, Page]) -> None:
    loaded = {each for page in pages.values() for each in page.loaded}
    assert len(loaded) > 10
    assert {each for each in loaded if is_outside(each) and not each.startswith("data:")} == set()


def test_an_option_is_not_broken_at_its_hyphens(pages: dict[Path, Page]) -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in pages)
    assert '<code class="flag">--pipeline-stages</code>' in text
    assert "{.flag}" not in text
