"""Outputs that pages show, beside what the commands print.

A fenced block ``console NAME`` or ``text NAME`` of a page is compared by the test that says
``lacking("PAGE.md", "NAME", output)``: each line that has numbers must come, whatever these are.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from functools import cache

from tests.helpers.markdown import blocks
from tests.helpers.sources import ROOT

_NUMBER = re.compile(r"[+-]?\d[\d.,e+-]*")
_UNITS = [
    (r"\w+ \(virtual\)", "LINK"),
    (r"N ?(GiB|MiB|KiB)\b", "SIZE"),
    (r"N ?(s|ms|us)\b", "TIME"),
]
_UNITS += [(r"N ?([MG]bit/s|[MG]bps\b|[GT]FLOP/s|[GT]\b)", "RATE"), (r"N [kMB]\b", "COUNT")]

HOST = "vm"
"""This machine, on the pages."""


def lacking(page: str, name: str, output: str, words: Mapping[str, str] | None = None) -> set[str]:
    """Return the lines of a block that an output lacks. ``words`` of the page are others here."""
    return strange(shown(page, name), output, {HOST: socket.gethostname(), **(words or {})})


def strange(text: str, output: str, words: Mapping[str, str] | None = None) -> set[str]:
    """Return the lines with numbers that an output lacks; ``...`` is any text."""
    come = [*_forms(output)]
    for old, new in (words or {}).items():
        text = re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", new, text)
    return {
        line
        for line in _forms(re.sub(r"^\$ (.*\\\n)*.*\n", "", text, flags=re.MULTILINE))
        if not any(re.fullmatch(re.escape(line).replace(r"\.\.\.", ".*"), each) for each in come)
    }


@cache
def shown(page: str, name: str) -> str:
    """Return a block of a page."""
    (path,) = ROOT.glob(page) if page == "README.md" else (ROOT / "docs").rglob(page)
    (text,) = [block.text for block in blocks(path) if block.info[1:] == (name,)]
    return text


def _forms(text: str) -> Iterator[str]:
    """Yield the lines that have numbers, with words in the place of these and of their units."""
    for line in text.splitlines():
        if re.search(r"\d", line):
            line = _NUMBER.sub("N", " ".join(line.split()))
            for pattern, word in _UNITS:
                line = re.sub(pattern, word, line)
            yield line
