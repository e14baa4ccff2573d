"""Make the page of a run: one HTML file with all that it needs in it. No MLX, no MPI.

The browser draws it, with uPlot 1.6.32 (MIT licence), from the events, which are in it as JSON.
uPlot's files are from its npm package, which a test checks. The Content-Security-Policy runs no
other script, and allows requests to the page's own server only.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template
from markupsafe import Markup

import shardmlx
from shardmlx.common.formatting import plural
from shardmlx.config.command_line import CommandLine
from shardmlx.config.options import REQUIRED, OptionError, Options, option
from shardmlx.errors import file_access
from shardmlx.runreport.metrics_file import Event, MetricsFile
from shardmlx.runreport.thinning import thinned

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


def render_page(events: Iterable[Event], *, title: str, is_live: bool = False) -> str:
    """Return a run's page as HTML, with the events that ``thinned`` leaves; a live one asks its
    server."""
    data: dict[str, Any] = {"events": thinned(events), "live": is_live}
    style, script = (Markup("\n".join(map(_part, names))) for names in (_STYLES, _SCRIPTS))
    return _template().render(
        title=title,
        version=shardmlx.__version__,
        data=data,
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        connect="'self'" if is_live else "'none'",
    )


@cache
def _template() -> Template:
    # tojson escapes <, >, & and ': no value can end the element that it stands in.
    own = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return own.from_string(_read("report.html.j2"))


@cache
def _read(name: str) -> str:
    own = files("shardmlx.runreport") / "page" / name
    shared = files("shardmlx.common") / "page" / name
    return (own if own.is_file() else shared).read_text(encoding="utf-8").strip()


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


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """The metrics to report, and the page to write. Raises ``OptionError``."""

    metrics: str = option(
        REQUIRED,
        "file that train --metrics-file wrote, or still writes",
        metavar="METRICS",
        positional=True,
    )
    output: str | None = option(
        None,
        "page (.html) to write",
        metavar="FILE",
        unset="METRICS with .html for its suffix",
        short="-o",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.file.suffix.lower() not in (".html", ".htm"):
            raise OptionError("output", f"is {self.file}", "give it the suffix .html")
        if self.file.resolve() == Path(self.metrics).resolve():
            raise OptionError("output", f"is the metrics file {self.file}", "name another file")

    @property
    def file(self) -> Path:
        """The file to write: by default a page beside the metrics."""
        return Path(self.output or Path(self.metrics).with_suffix(".html"))


LINE = CommandLine(
    options=ReportOptions,
    command="report",
    description="Show a training run from its metrics, as one HTML file that needs no network.",
)


def run(words: Sequence[str]) -> int:
    """Write the page of ``shardmlx report``, and print where it is. Raises ``UserError``."""
    options = LINE.load(words)
    events = thinned(MetricsFile(options.metrics))
    page = render_page(events, title=options.metrics)
    with file_access("write --output", options.file, "name another file"):
        options.file.write_text(page, encoding="utf-8")
    shown = sum(event["event"] == "train" for event in events)
    left_out = sum(event["reports"] for event in events if event["event"] == "left_out")
    reports = shown + left_out
    print(f"{options.file}: {plural(reports, 'report')} of training")
    return 0
