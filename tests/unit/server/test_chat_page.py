"""The files of the chat page fit together, and nothing in them comes from elsewhere.

This is their linter: what is named is there, what is there is used. That scripts and styles are
well formed is told by a real browser, in tests/browser.
"""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

import shardmlx
from shardmlx.server.page_files import POLICY

SOURCE = Path(shardmlx.__file__).parent
FILES = {
    path.name: path.read_text()
    for directory in ("common/page", "server/pages")
    for path in sorted((SOURCE / directory).iterdir())
}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
STYLES = {name: text for name, text in FILES.items() if name.endswith(".css")}
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


def exported(text: str) -> set[str]:
    return set(re.findall(r"^export (?:const|async function\*?|function|class) (\w+)", text, re.M))


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_a_script_names_is_there_and_what_it_takes_is_used(name: str) -> None:
    text = SCRIPTS[name]
    code = re.sub(r"^\s*(//|/\*\*|\*).*", "", text, flags=re.M)
    assert set(re.findall(r'byId\("([\w-]+)"\)', code)) <= IDS
    for taken, source in re.findall(r'^import (.*?) from "\./([\w.]+)";$', text, re.M | re.S):
        names = set(re.findall(r"\w+", taken.removeprefix("* as ")))
        if not taken.startswith("*"):
            assert names <= exported(SCRIPTS[source]), source
        unused = [each for each in names if len(re.findall(rf"\b{each}\b", code)) < 2]
        assert unused == [], source
    defined = re.findall(r"^(?:export )?(?:const|let|async function\*?|function) (\w+)", code, re.M)
    everywhere = "".join(SCRIPTS.values()) + "".join(
        path.read_text() for path in (SOURCE / "runreport" / "page").glob("*.js")
    )
    where = [code if each not in exported(text) else everywhere for each in defined]
    counts = zip(defined, where, strict=True)
    assert [each for each, text in counts if len(re.findall(rf"\b{each}\b", text)) < 2] == []


@pytest.mark.parametrize("name", STYLES)
def test_what_a_style_names_is_there(name: str) -> None:
    text = re.sub(r"/\*.*?\*/", "", STYLES[name], flags=re.S)
    assert text.count("{") == text.count("}")
    selectors = " ".join(re.findall(r"([^{};]+)\{", text))
    assert set(re.findall(r"#([a-z][\w-]*)", selectors)) <= IDS
    code = "".join(SCRIPTS.values())
    for word in set(re.findall(r"\.([a-z][\w-]*)", selectors)):
        assert re.search(rf'["` ]{word}["` ]', HTML + code), word
    colours = set(re.findall(r"(--[\w-]+):", STYLES["light.css"]))
    assert set(re.findall(r"(--[\w-]+):", STYLES["dark.css"])) == colours
    assert set(re.findall(r"var\((--[\w-]+)\)", text)) <= colours


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_in_one_sitting(name: str) -> None:
    lines = FILES[name].splitlines()
    assert len(lines) <= 400
    longest = 100 if name.endswith(".js") else 180
    long = [at for at, line in enumerate(lines, 1) if len(line) > longest and "data:" not in line]
    assert long == []
