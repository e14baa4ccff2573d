"""The files of the chat page fit together, and nothing in them comes from elsewhere.

That scripts and styles do what they should is told by a real browser, in tests/browser.
"""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import shardmlx
from shardmlx.common.http_listener import POLICY

SOURCE = Path(shardmlx.__file__).parent
FILES = {
    path.name: path.read_text()
    for directory in ("common/page", "server/pages")
    for path in sorted((SOURCE / directory).iterdir())
}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
HTML = FILES["chat.html"]
VOID = {"meta", "link", "input", "rect", "br", "hr", "img"}
"""Elements that no tag ends; `rect` ends itself."""


class Reader(HTMLParser):
    """The elements of a page, each with its attributes, and what is wrong with their order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.wrong: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID and (not self.open or self.open.pop() != tag):
            self.wrong.append(tag)

    def values(self, *names: str) -> list[str]:
        """Return the values of all attributes with these names."""
        return [each[name] or "" for _, each in self.elements for name in names if name in each]


READER = Reader(HTML)
IDS = set(READER.values("id"))


def test_each_element_ends_and_what_it_names_is_there() -> None:
    assert (READER.wrong, READER.open) == ([], [])
    assert [each for each, times in Counter(READER.values("id")).items() if times > 1] == []
    named = READER.values("for", "aria-labelledby", "aria-describedby", "popovertarget")
    assert set(named) <= IDS
    for tag, attributes in READER.elements:
        assert [name for name in attributes if name == "style" or name.startswith("on")] == []
        assert tag != "button" or attributes.get("type") or attributes.get("class") == "main"


def test_the_page_loads_its_own_files_and_each_of_them() -> None:
    loaded = {each for each in READER.values("src", "href") if not each.startswith(("data:", "#"))}
    assert all(each.startswith("page/") for each in loaded)
    imported = {
        name for text in SCRIPTS.values() for name in re.findall(r'from "\./([\w.]+)"', text)
    }
    assert {each.removeprefix("page/") for each in loaded} | imported | {"chat.html"} == set(FILES)
    assert [tag for tag, each in READER.elements if tag == "script" and "src" not in each] == []
    assert "<style" not in HTML
    for name, text in FILES.items():
        places = set(re.findall(r"https?://[\w.]+|url\(|@import", text))
        assert places <= {"http://www.w3.org"}, name


def test_the_policy_lets_nothing_else_in() -> None:
    parts = dict(part.split(" ", 1) for part in POLICY.split("; "))
    assert parts["default-src"] == "'none'"
    assert set(parts.values()) == {"'none'", "'self'", "data:", "'script'"}
    assert [name for name, value in parts.items() if "data:" in value] == ["img-src"]


def test_text_becomes_no_markup_and_no_code() -> None:
    makers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|Function\("
    assert re.findall(makers, "".join(SCRIPTS.values())) == []
