"""Draw a training step as it was on all ranks, from the file of shardmlx.train --trace.

    python -m scripts.bench.draw_trace TRACE.json PICTURE.svg [--step N] [--title TEXT]

A row for each rank: what it computed, with the micro-batch, paler for later stages of the rank; the
optimizer; and, half as high, waiting for a message and for sums. At the right the part of the step
in which the rank computed. SVG or PNG, as the suffix says; needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmlx.engine.trace import Span
from shardmlx.pipeline.actions import Action, Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart by the colour-blind too: Okabe and Ito, Color Universal Design, 2008.
FORWARD, INPUT, WEIGHT = "#56b4e9", "#e69f00", "#009e73"
OPTIMIZER, MESSAGE, SUM = "#cc79a7", "#8c8c8c", "#333333"
IDLE, INK = "#ededf0", "#1f242b"

COLOURS = {
    "F forward": FORWARD,
    "I input gradient": INPUT,
    "W weight gradient": WEIGHT,
    "optimizer": OPTIMIZER,
    "waiting for a message": MESSAGE,
    "waiting for sums": SUM,
}
OF_KIND = {Kind.F: "F forward", Kind.I: "I input gradient", Kind.W: "W weight gradient"}

ROW = 0.42  # inches
HEIGHT = 0.8  # of a box, as a part of its row
SHORTEST_WITH_TEXT = 0.012  # of the width


@dataclass(frozen=True)
class Box:
    """An action of a rank, in seconds from the start of the step."""

    what: str
    start: float
    end: float
    action: Action | None = None

    @property
    def is_work(self) -> bool:
        return not self.what.startswith("waiting")


@dataclass(frozen=True)
class Step:
    """A training step; ``ranks`` are the actions of all ranks, by name."""

    number: int
    seconds: float
    ranks: Mapping[str, Sequence[Box]]


def read_step(events: Sequence[Mapping[str, Any]], number: int | None = None) -> Step:
    """Step ``number`` of Chrome trace events; by default the last. ``SystemExit`` without it."""
    names = {each["pid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    steps: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
    for each in events:
        if each.get("cat") == Span.STEP and each["name"].startswith(("step ", "update ")):
            of_ranks = steps[int(each["name"].split()[1])]
            begin, _ = of_ranks.get(each["pid"], (each["ts"], 0.0))
            of_ranks[each["pid"]] = begin, each["ts"] + each["dur"]
    if not steps or (number is not None and number not in steps):
        raise SystemExit(f"the trace has the steps {', '.join(map(str, sorted(steps)))}")
    number = max(steps) if number is None else number
    begins = min(start for start, _ in steps[number].values())
    ranks: dict[str, list[Box]] = {names[rank]: [] for rank in sorted(names)}
    for each in events:
        if each["ph"] != "X" or each["pid"] not in steps[number]:
            continue
        start, end = steps[number][each["pid"]]
        what, action = _meaning(each)
        if what is None or not start <= each["ts"] <= end:
            continue
        first = (each["ts"] - begins) / 1e6
        box = Box(what, first, first + each["dur"] / 1e6, action)
        ranks[names[each["pid"]]].append(box)
    last = max(end for _, end in steps[number].values())
    return Step(number, (last - begins) / 1e6, ranks)


def _meaning(event: Mapping[str, Any]) -> tuple[str | None, Action | None]:
    match event["cat"]:
        case Span.COMPUTE:
            stage, kind, microbatch = re.split("([FIW])", event["name"])
            action = Action(int(stage), Kind(kind), int(microbatch))
            return OF_KIND[action.kind], action
        case Span.UPDATE:
            return "optimizer", None
        case Span.RECEIVE:
            return "waiting for a message", None
        case Span.REDUCE:
            return "waiting for sums", None
    return None, None


def draw(step: Step, path: Path, title: str) -> None:
    """Write the picture; the same bytes for the same step."""
    import matplotlib.style
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    style = {"svg.fonttype": "none", "svg.hashsalt": "shardmlx"}
    with matplotlib.style.context(["default", style]):
        width, height = 11.0, 1.35 + ROW * len(step.ranks)
        figure = Figure(figsize=(width, height))
        axes = figure.add_axes((0.13, 0.55 / height, 0.79, ROW * len(step.ranks) / height))
        axes.set_xlim(0, step.seconds)
        axes.set_ylim(len(step.ranks) - 0.5, -0.5)
        axes.set_yticks(range(len(step.ranks)), list(step.ranks), color=INK, fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", colors=INK, labelsize=8)
        axes.set_xlabel("time (s)", color=INK, fontsize=9)
        for side in ("top", "left", "right"):
            axes.spines[side].set_visible(False)
        for row, boxes in enumerate(step.ranks.values()):
            _draw_row(axes, row, boxes, step.seconds)
        used = {box.what for boxes in step.ranks.values() for box in boxes}
        patches = [
            Patch(color=colour, label=what) for what, colour in COLOURS.items() if what in used
        ]
        figure.legend(
            handles=[*patches, Patch(color=IDLE, label="idle")],
            loc="center left",
            bbox_to_anchor=(0.12, 1 - 0.56 / height),
            ncols=len(patches) + 1,
            frameon=False,
            fontsize=8,
            handlelength=1.2,
        )
        top = 1 - 0.12 / height
        figure.text(0.13, top, title, va="top", weight="bold", fontsize=12, color=INK)
        kind = path.suffix.lower()[1:]
        metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
        figure.savefig(path, format=kind, dpi=200, metadata=metadata)


def _draw_row(axes: Axes, row: int, boxes: Sequence[Box], seconds: float) -> None:
    stages = sorted({box.action.stage for box in boxes if box.action})
    axes.barh(row, seconds, height=HEIGHT, color=IDLE, zorder=1)
    for box in sorted(boxes, key=lambda box: box.is_work):
        turn = stages.index(box.action.stage) / len(stages) if box.action else 0.0
        axes.barh(
            row,
            box.end - box.start,
            left=box.start,
            height=HEIGHT if box.is_work else HEIGHT / 2,
            color=COLOURS[box.what],
            alpha=1 - 0.6 * turn if box.is_work else 1,
            edgecolor="white",
            linewidth=0.4,
            zorder=3 if box.is_work else 2,
        )
        if box.action and box.end - box.start > SHORTEST_WITH_TEXT * seconds:
            middle = (box.start + box.end) / 2
            number = str(box.action.microbatch)
            axes.text(middle, row, number, ha="center", va="center", fontsize=7, zorder=4)
    busy = sum(box.end - box.start for box in boxes if box.is_work) / seconds
    axes.text(1.005 * seconds, row, f"{busy:.1%}", va="center", fontsize=8, color=INK)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--step", type=int, help="its number (default: the last in the file)")
    parser.add_argument("--title", help="(default: the number of the step)")
    options = parser.parse_args()
    if options.picture.suffix.lower() not in (".svg", ".png"):
        parser.error(f"{options.picture}: the suffix is neither .svg nor .png")
    step = read_step(json.loads(options.trace.read_text())["traceEvents"], options.step)
    draw(step, options.picture, options.title or f"step {step.number}")


if __name__ == "__main__":
    main()
