"""Make the links and pictures of README.md lead to a release on GitHub: PyPI shows that page, and
has no other file of the repository.

    python scripts/absolute_links.py OWNER/NAME TAG
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = "README.md"

_PICTURES = (".svg", ".png", ".jpg", ".gif", ".webp")

_LINK = re.compile(r"""(\]\(|\b(?:src|srcset|href)=")(?!\w+:)([^)"\s]+)""")
"""What begins a link, and the file or place of the page to which it leads."""


def absolute(text: str, repository: str, tag: str) -> str:
    """Return a text with links to the files of a repository as they are at a tag."""

    def lead(match: re.Match[str]) -> str:
        begin, link = match.groups()
        path, sign, place = link.partition("#")
        if path.endswith(_PICTURES):
            return f"{begin}https://raw.githubusercontent.com/{repository}/{tag}/{path}"
        return f"{begin}https://github.com/{repository}/blob/{tag}/{path or README}{sign}{place}"

    return _LINK.sub(lead, text)


def main(repository: str, tag: str) -> None:
    """Rewrite README.md in the working directory."""
    page = Path(README)
    page.write_text(absolute(page.read_text(encoding="utf-8"), repository, tag), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
