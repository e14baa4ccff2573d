"""Draw a schedule in time: as SVG or PNG with matplotlib, or in letters for a terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from shardmlx.errors import UserError, file_access
from shardmlx.pipeline.actions import Kind
from shardmlx.pipeline.simulate import Simulation, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")

# Told apart by the colour-blind too: Okabe and Ito, Color Universal Design, 2008.
_COLOURS = {
    Kind.F: ("forward", (0.34, 0.71, 0.91)),
    Kind.B: ("backward", (0.84, 0.37, 0.00)),
    Kind.I: ("input gradient", (0.90, 0.62, 0.00)),
    Kind.W: ("weight gradient", (0.00, 0.62, 0.45)),
}
_IDLE = (0.93, 0.93, 0.94)
_PALEST = 0.4  # opacity of a rank's last stage
_WIDTH = 12.0  # inches
_HEIGHT = 0.82  # box height, as a part of its row
_DIGIT = 0.06  # width in inches
_STYLE = {
    "svg.fonttype": "none",  # text elements, not paths
    "svg.hashsalt": "shardmlx",  # the same ids in every run
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "text.parse_math": False,
    "font.size": 8,
}
_METADATA: dict[str, dict[str, None]] = {
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
}
_LONGEST = 8  # longest action in letters, in shortest ones


def check_picture(path: Path) -> None:
    """Raise ``UserError`` for a suffix other than SVG and PNG, and without matplotlib."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"picture {path}: the suffix is none of {', '.join(SUFFIXES)}", "use one")
    if find_spec("matplotlib") is None:
        raise UserError(f"picture {path} needs matplotlib", "pip install matplotlib")


def draw_schedule(
    simulation: Simulation,
    path: str | Path,
    *,
    title: str,
    unit: str = "s",
    names: Sequence[str] | None = None,
) -> None:
    """Write the schedule as SVG or PNG, as the suffix says; the same bytes for the same input.

    One row a rank, labelled with ``names[rank]`` where given. A box for each action, with its
    micro-batch where that fits, in the colour of its kind, paler for the later stages of a rank.
    At the right each rank's bubble, and its wait for links where there is any, in per cent of the
    makespan. ``unit`` is that of the costs. Raises ``UserError`` as ``check_picture`` does, and
    for a file that cannot be written.
    """
    path = Path(path)
    check_picture(path)
    import matplotlib.style

    kind = path.suffix.lower()[1:]
    picture = BytesIO()
    with matplotlib.style.context(["default", _STYLE]):
        figure = _figure(simulation, title, unit, names)
        figure.savefig(picture, format=kind, dpi=200, metadata=_METADATA[kind])
    with file_access("write", path):
        path.write_bytes(picture.getvalue())


def _figure(simulation: Simulation, title: str, unit: str, names: Sequence[str] | None) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = range(len(simulation.spans))
    makespan = simulation.makespan or 1
    row = min(0.4, max(0.15, 8 / len(ranks)))  # inches
    figure = Figure(figsize=(_WIDTH, 1.3 + row * len(ranks)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(0, makespan)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_title(title, loc="left", weight="bold", fontsize=12)
    axes.set_xlabel(f"time ({unit})")
    axes.set_yticks(
        ranks, [f"{names[rank]}  {rank}" if names else f"rank {rank}" for rank in ranks]
    )
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "left", "right"]].set_visible(False)
    waits = axes.secondary_yaxis("right")
    waits.set_yticks(ranks, [_waits(simulation, rank) for rank in ranks])
    waits.tick_params(length=0)
    waits.spines["right"].set_visible(False)
    axes.barh(ranks, makespan, height=_HEIGHT, color=_IDLE)
    for rank in ranks:
        _draw_boxes(axes, simulation, rank)
    shown = {action.kind for spans in simulation.spans for action, _, _ in spans}
    patches = [
        Patch(color=colour, label=f"{kind.value} {meaning}")
        for kind, (meaning, colour) in _COLOURS.items()
        if kind in shown
    ]
    patches.append(Patch(color=_IDLE, label="idle"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    return figure


def _waits(simulation: Simulation, rank: int) -> str:
    """Return a rank's idle time in words."""
    text = f"bubble {simulation.bubbles[rank]:.1%}"
    if any(simulation.exposed):
        text += f", links {simulation.exposed[rank] / simulation.makespan:.1%}"
    return text


def _draw_boxes(axes: Axes, simulation: Simulation, rank: int) -> None:
    """Draw the boxes of a rank, those of one colour together: single ones would take minutes."""
    spans = [span for span in simulation.spans[rank] if span[2] > span[1]]
    stages = sorted({action.stage for action, _, _ in spans})
    inch = simulation.makespan / _WIDTH
    boxes: dict[tuple[int, Kind], list[tuple[float, float]]] = defaultdict(list)
    for action, start, end in spans:
        boxes[action.stage, action.kind].append((start, end - start))
        number = str(action.microbatch)
        if (len(number) + 2) * _DIGIT * inch < end - start:
            axes.text((start + end) / 2, rank, number, ha="center", va="center_baseline")
    for (stage, kind), ranges in boxes.items():
        paler = stages.index(stage) / max(1, len(stages) - 1)
        axes.broken_barh(
            ranges,
            (rank - _HEIGHT / 2, _HEIGHT),
            facecolors=(_COLOURS[kind][1], 1 - (1 - _PALEST) * paler),
            edgecolors="white",
            linewidths=0.6 if min(length for _, length in ranges) > _DIGIT * inch else 0.0,
            gid=f"{kind.value}-{stage}",
        )


def timeline(simulation: Simulation, width: int = 160) -> str:
    """Draw one row a rank, time to the right, dots where the rank idles.

    Each action is a cell, as wide as its time. A column is the time of the shortest action; longer
    actions end in dashes. If that takes more than ``width`` letters, each letter is the kind of the
    action at that time.
    """
    names = [f"r{rank}" for rank in range(len(simulation.spans))]
    if not simulation.makespan:
        return "\n".join(names)
    margin = len(names[-1]) + 1
    spans = [span for of_rank in simulation.spans for span in of_rank]
    durations = [end - start for _, start, end in spans if end > start]
    unit = max(min(durations), max(durations) / _LONGEST)
    column = max(len(str(action)) for action, _, _ in spans) + 1
    if any(abs(start / unit - round(start / unit)) > 1e-6 for _, start, _ in spans):
        column += 1  # rounding to letters may cost one
    letters = round(simulation.makespan / unit * column)
    if letters > width - margin:
        letters, column = max(1, width - margin), 1
    rows = [_row(of_rank, letters, simulation.makespan, column) for of_rank in simulation.spans]
    return "\n".join(name.ljust(margin) + row for name, row in zip(names, rows, strict=True))


def _row(spans: Sequence[Span], letters: int, makespan: float, column: int) -> str:
    """Draw the actions of a rank, ``makespan`` as so many ``letters``."""
    row = ""
    for action, start, end in spans:
        row += _idle(round(start / makespan * letters) - len(row), column)
        room = max(0, round(end / makespan * letters) - len(row))
        label, kind = str(action), action.kind.value
        if column == 1:
            label = kind * room
        elif len(label) >= room:
            label = kind
        elif room > 1.5 * column:
            label = label.ljust(room - 1, "-")
        row += label.ljust(room)[:room]
    return (row + _idle(letters - len(row), column)).rstrip()


def _idle(letters: int, column: int) -> str:
    dots = ".".ljust(column) * letters
    return dots[: max(0, letters - (column > 1))].ljust(letters)
