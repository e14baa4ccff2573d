#!/usr/bin/env python3
"""Build the site of the documentation. Its home is README.md.

    python scripts/site.py            # into .cache/site
    python scripts/site.py --serve    # and show it at http://localhost:8000

mkdocs.yml says how it looks. Pages are copied to .cache/pages first: README.md as index.md, those
of docs/ beside it, and docs/README.md as all-pages.md. Links between them stay links between them;
those to other files of the repository lead to its address.
"""

from __future__ import annotations

from _root import ROOT

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

PAGES = ROOT / ".cache/pages"

NAMES = {"README.md": "index.md", "docs/README.md": "all-pages.md"}
"""Pages that have another name on the site."""

BLOCK = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r'(\]\(|(?:src|srcset|href)=")(?!\w+:|#|//)([^)#"]+)')
"""A relative link of Markdown or HTML, without its anchor."""
FLAG = re.compile(r"((?<!`)`--?\w[^`\n]{0,28}`(?!`))")
"""An option in a line. Browsers would break it at its hyphens; player/site.css keeps it whole."""


def repository() -> str:
    """Return the address of the repository."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return str(tomllib.loads(text)["project"]["urls"]["Repository"])


def on_site(path: str) -> str | None:
    """Return where a file of the repository lies on the site; None if it does not."""
    if path in NAMES:
        return NAMES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def as_on_the_site(text: str, page: str) -> str:
    """Return the text of a page of the repository with links and options as the site has them."""
    place = Path(str(on_site(page))).parent

    def link(found: re.Match[str]) -> str:
        before, target = found.groups()
        path = os.path.relpath((ROOT / page).parent / target, ROOT)
        there = on_site(path)
        if there is not None:
            return before + os.path.relpath(there, place)
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{before}{repository()}/{kind}/main/{path}"

    parts = BLOCK.split(text)
    return "".join(
        part if part.startswith("```") else FLAG.sub(r"\1{.flag}", LINK.sub(link, part))
        for part in parts
    )


def copy_pages() -> None:
    """Write all pages, with their pictures, as the site has them."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES, ignore=shutil.ignore_patterns("*.md"))
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        page = str(path.relative_to(ROOT))
        copy = PAGES / str(on_site(page))
        copy.write_text(as_on_the_site(path.read_text(encoding="utf-8"), page))


def main(argv: list[str]) -> int:
    """Build the site, or show it; return the exit status of the program that does."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", action="store_true", help="show it until Ctrl-C")
    copied = parser.parse_args(argv)
    copy_pages()
    program = Path(sys.executable).with_name("zensical")
    words = ["serve"] if copied.serve else ["build", "--strict"]
    return subprocess.run([program, *words], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
