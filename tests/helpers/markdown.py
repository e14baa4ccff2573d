"""The fenced blocks, links and headings of Markdown files, as tests read them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = "```"


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its text, and the words behind its first fence, such as ``sh``, ``run``."""

    where: str
    info: tuple[str, ...]
    text: str


def blocks(path: Path) -> Iterator[Block]:
    """Yield the fenced blocks in order. Indented fences are passed over."""
    lines = iter(enumerate(path.read_text(encoding="utf-8").splitlines(), start=1))
    for number, line in lines:
        if line.startswith(_FENCE):
            inside = []
            for _, each in lines:
                if each == _FENCE:
                    break
                inside.append(f"{each}\n")
            info = tuple(line.removeprefix(_FENCE).split())
            yield Block(f"{path.name}:{number}", info, "".join(inside))


def links(path: Path) -> list[str]:
    """Return the links to files of this repository, and to headings."""
    found = re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))
    return [link for link in found if "://" not in link]


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a file."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.casefold()).replace(" ", "-") for heading in headings}
