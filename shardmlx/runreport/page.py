"""Make the page of a run: one HTML file with all that it needs in it. No MLX, no MPI.

The browser draws it, with uPlot 1.6.32 (MIT licence), from the events, which are in it as JSON.
uPlot's files are from its npm package, which a test checks. The Content-Security-Policy runs no
other script, and allows requests to the page's own server only.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

import shardmlx
from shardmlx.runreport.metrics_file import Event

_STYLES = ("uPlot.min.css", "light.css", "dark.css", "base.css", "report.css")
_SCRIPTS = (
    "uPlot.LICENSE",
    "uPlot.iife.min.js",
    "elements.js",
    "formats.js",
    "run.js",
    "charts.js",
    "pictures.js",
    "tables.js",
    "main.js",
)


def render_page(
    events: Sequence[Event], *, title: str, unreadable: int = 0, is_live: bool = False
) -> str:
    """Return the page of a run as HTML.

    ``unreadable`` lines of its file are mentioned. A live page asks its server for further events.
    """
    data: dict[str, Any] = {"events": events, "unreadable": unreadable, "live": is_live}
    style, script = (Markup(_inlined(names)) for names in (_STYLES, _SCRIPTS))
    return (
        _environment()
        .from_string(_read("report.html.j2"))
        .render(
            title=title,
            version=shardmlx.__version__,
            data=data,
            style=style,
            script=script,
            style_hash=_hash(style),
            script_hash=_hash(script),
            connect="'self'" if is_live else "'none'",
        )
    )


@cache
def _environment() -> Environment:
    # tojson escapes <, >, & and ': no value can end the element that it stands in.
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)


@cache
def _read(name: str) -> str:
    own = files("shardmlx.runreport") / "page" / name
    shared = files("shardmlx.common") / "page" / name
    return (own if own.is_file() else shared).read_text(encoding="utf-8").strip()


def _inlined(names: Sequence[str]) -> str:
    return "\n".join(map(_part, names))


def _part(name: str) -> str:
    text = _read(name)
    if name.endswith(".LICENSE"):
        # The page contains uPlot, and so must contain its licence.
        return f"/*\n{text}\n*/"
    if name == "dark.css":
        return f"@media (prefers-color-scheme: dark) {{\n{text}\n}}"
    # All scripts become one, in which a module's exports are visible to all after it.
    return re.sub(r"(?m)^export ", "", text)


def _hash(text: str) -> str:
    """Return the hash by which a Content-Security-Policy names an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
