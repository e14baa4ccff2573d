#!/usr/bin/env python3
"""Draw the badges of README.md from what the project says of itself.

    python scripts/badges.py

The licence, the version and that of Python come from pyproject.toml. What is said of Linux and of
Macs is that tests run on the one, and that docs/macs.md has no report of the other. No address is
asked for a picture.
"""

from __future__ import annotations

from _root import ROOT

import tomllib
from dataclasses import dataclass

BADGES = ROOT / "docs/pictures/badges"
NOBODY = "Nobody has sent a report yet"

GREEN, ORANGE, BLUE = "#1a7f37", "#9a5a00", "#0969da"

LETTER = 6.6
"""Pixels of a letter, on average, in the font of a badge."""


@dataclass(frozen=True)
class Badge:
    """What a badge says: its name on grey, and a value on a colour."""

    name: str
    value: str
    colour: str

    def drawn(self) -> str:
        """Return the badge as SVG."""
        left = round(LETTER * len(self.name) + 14)
        width = left + round(LETTER * len(self.value) + 14)
        words = [(left / 2, self.name), ((left + width) / 2, self.value)]
        texts = "".join(f'<text x="{x:g}" y="14">{text}</text>' for x, text in words)
        return f"""\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img">
  <title>{self.name}: {self.value}</title>
  <clipPath id="round"><rect width="{width}" height="20" rx="4"/></clipPath>
  <g clip-path="url(#round)">
    <rect width="{left}" height="20" fill="#555"/>
    <rect x="{left}" width="{width - left}" height="20" fill="{self.colour}"/>
  </g>
  <g fill="#fff" text-anchor="middle" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11">
    {texts}
  </g>
</svg>
"""


def badges() -> dict[str, Badge]:
    """Return the badges by the names of their files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    nobody = NOBODY in (ROOT / "docs/macs.md").read_text(encoding="utf-8")
    return {
        "version": Badge("version", f"{project['version']} alpha", ORANGE),
        "license": Badge("license", project["license"], BLUE),
        "python": Badge("Python", project["requires-python"].replace(">=", "") + " or newer", BLUE),
        "linux": Badge("Linux", "tested", GREEN),
        "macs": Badge(
            "Macs", "no report yet" if nobody else "reports", ORANGE if nobody else GREEN
        ),
    }


def main() -> None:
    """Write the badges."""
    BADGES.mkdir(exist_ok=True)
    for name, badge in badges().items():
        (BADGES / f"{name}.svg").write_text(badge.drawn())


if __name__ == "__main__":
    main()
