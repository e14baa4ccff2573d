"""The page of a run is one file, in which nothing runs but its own script."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import shardmlx
from shardmlx.runreport.page import render_page
from tests.helpers.stories import story

PARTS = Path(shardmlx.__file__).parent / "runreport" / "page"
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;'\"\ud800"
OWN = [path for path in sorted(PARTS.glob("*.js")) if not path.name.startswith("uPlot")]

UPLOT = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
"""SHA-256 of the files as they are in npm's uplot 1.6.32."""


class Reader(HTMLParser):
    """Reads a page as a browser would: its elements, their attributes and texts."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.attributes: list[dict[str, str | None]] = []
        self.texts: dict[str, list[str]] = {}
        self._in = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes.append(dict(attrs))
        if tag in ("script", "style", "title"):
            self._in = tag
            self.texts.setdefault(tag, []).append("")

    def handle_data(self, data: str) -> None:
        if self._in:
            self.texts[self._in][-1] += data

    def handle_endtag(self, tag: str) -> None:
        if tag == self._in:
            self._in = ""


def data_of(page: str) -> Any:
    return json.loads(Reader(page).texts["script"][0])


def test_the_page_holds_the_events_as_they_are() -> None:
    page = render_page(story(), title="run")
    assert data_of(page) == {"events": story(), "live": False}


def test_what_a_file_says_becomes_no_markup() -> None:
    event = {"event": "start", "options": {EVIL: EVIL}, "layout": {"ranks": [{"host": EVIL}]}}
    page = render_page([event], title=EVIL[:-1])
    assert data_of(page)["events"] == [event]
    plain = Reader(render_page([], title="run"))
    assert Reader(page).tags == plain.tags
    assert Reader(page).texts["title"] == [EVIL[:-1]]


@pytest.mark.parametrize("is_live", [False, True])
def test_the_policy_lets_only_the_pages_own_code_run(is_live: bool) -> None:
    page = Reader(render_page(story(), title="run", is_live=is_live))
    (policy,) = [each["content"] for each in page.attributes if "http-equiv" in each]
    assert policy is not None
    for tag in ("script", "style"):
        digest = hashlib.sha256(page.texts[tag][-1].encode()).digest()
        assert f"{tag}-src 'sha256-{base64.b64encode(digest).decode()}'" in policy.split("; ")
    assert policy.startswith("default-src 'none'; ")
    assert ("connect-src 'self'" in policy) == is_live
    assert "unsafe" not in policy


def test_nothing_is_loaded_from_elsewhere() -> None:
    page = Reader(render_page(story(), title="run"))
    assert page.tags["script"] == 2
    for each in page.attributes:
        for name in ("src", "href"):
            assert (each.get(name) or "data:").startswith("data:")
    places = set(re.findall(r"https?://[^'\"\s>)]*", "".join(page.texts["script"])))
    assert places == {"https://github.com/leeoniya/uPlot", "http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_text_becomes_no_markup_and_no_code(path: Path) -> None:
    makers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|Function\("
    assert re.findall(makers, path.read_text()) == []


def test_uplot_is_as_its_makers_published_it_and_comes_with_its_licence() -> None:
    for name, digest in UPLOT.items():
        assert hashlib.sha256((PARTS / name).read_bytes()).hexdigest() == digest, name
    assert (PARTS / "uPlot.LICENSE").read_text().strip() in render_page([], title="run")
