"""The fenced blocks, links and headings of Markdown files, as tests read them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = "```"


@dataclass(frozen=True, slots=True)
class Block:
    """What stands between two fences, with the words behind the first: ``sh``, ``run``."""

    where: str
    info: tuple[str, ...]
    text: str


def blocks(path: Path) -> Iterator[Block]:
    """In order. Fences that are indented are passed over."""
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
    """Those to files of this repository, and to headings."""
    found = re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))
    return [link for link in found if "://" not in link]


def anchors(path: Path) -> set[str]:
    """How GitHub lets one link to the headings of a file."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.casefold()).replace(" ", "-") for heading in headings}
