"""Draw a schedule in time as a picture: SVG or PNG, with matplotlib."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from shardmlx.errors import UserError
from shardmlx.pipeline.actions import Kind
from shardmlx.pipeline.simulate import Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")

Colour = tuple[float, float, float]

# Told apart by the colour-blind too: Okabe and Ito, Color Universal Design, 2008.
_COLOURS: dict[Kind, Colour] = {
    Kind.F: (0.34, 0.71, 0.91),
    Kind.B: (0.84, 0.37, 0.00),
    Kind.I: (0.90, 0.62, 0.00),
    Kind.W: (0.00, 0.62, 0.45),
}
_MEANINGS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
}
_IDLE = (0.93, 0.93, 0.94)
_GREY = (0.45, 0.45, 0.47)
_INK = (0.12, 0.14, 0.17)
_PALEST = 0.62  # how white the last stage of a rank is
_HEIGHT = 0.82  # box height, as a part of its row
_INCH = 72  # points
_DIGIT = 0.64  # its width, as a part of the font size
_DPI = 200
_STYLE = {
    "svg.fonttype": "none",  # text elements, not paths
    "svg.hashsalt": "shardmlx",  # the same ids in every run
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
}
_METADATA: dict[str, dict[str, None]] = {
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
}


@dataclass(frozen=True, slots=True)
class _Layout:
    """Measures of a picture: inches, and points of its text. More rows are lower rows."""

    left: float
    width: float  # width of the time axis
    right: float
    row: float
    rows: int
    font: float

    @classmethod
    def of(cls, simulation: Simulation, labels: Sequence[str]) -> _Layout:
        row = min(0.4, max(0.15, 8 / len(labels)))
        font = min(9.0, 0.62 * row * _INCH)
        durations = sorted(
            end - start for spans in simulation.spans for _, start, end in spans if end > start
        )
        boxes = simulation.makespan / durations[len(durations) // 2] if durations else 1
        return cls(
            left=0.3 + max(map(len, labels)) * _DIGIT * font / _INCH,
            width=min(14.0, max(7.5, 0.25 * boxes)),
            right=1.35 if any(simulation.exposed) else 0.75,
            row=row,
            rows=len(labels),
            font=font,
        )

    @property
    def size(self) -> tuple[float, float]:
        return self.left + self.width + self.right, 0.72 + self.row * self.rows + 0.55

    @property
    def axes(self) -> tuple[float, float, float, float]:
        """Left, bottom, width and height as parts of the picture."""
        width, height = self.size
        return self.left / width, 0.55 / height, self.width / width, self.row * self.rows / height


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
    if names is not None and len(names) != len(simulation.spans):
        raise ValueError(f"{len(names)} names for {len(simulation.spans)} ranks")
    ranks = range(len(simulation.spans))
    labels = [f"{names[rank]}  {rank}" if names else f"rank {rank}" for rank in ranks]
    import matplotlib.style

    kind = path.suffix.lower()[1:]
    picture = BytesIO()
    with matplotlib.style.context(["default", _STYLE]):
        figure = _figure(simulation, title, unit, labels)
        figure.savefig(picture, format=kind, dpi=_DPI, metadata=_METADATA[kind])
    try:
        path.write_bytes(picture.getvalue())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def _figure(simulation: Simulation, title: str, unit: str, labels: Sequence[str]) -> Figure:
    from matplotlib.figure import Figure

    layout = _Layout.of(simulation, labels)
    figure = Figure(figsize=layout.size)
    axes = figure.add_axes(layout.axes)
    axes.set_xlim(0, simulation.makespan or 1)
    axes.set_ylim(layout.rows - 0.5, -0.5)
    axes.set_yticks([])
    axes.tick_params(colors=_INK, labelsize=8)
    axes.set_xlabel(f"time ({unit})" if unit else "time", color=_INK, fontsize=9, parse_math=False)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    width, height = layout.size
    figure.text(
        0.15 / width,
        1 - 0.13 / height,
        title,
        va="top",
        weight="bold",
        fontsize=12,
        color=_INK,
        parse_math=False,
    )
    _draw_boxes(axes, simulation, layout)
    _draw_margins(axes, simulation, layout, labels)
    _draw_legend(figure, simulation, (layout.left / width, 1 - 0.59 / height))
    return figure


def _shade(colour: Colour, turn: int, turns: int) -> Colour:
    """Return the colour of the ``turn``-th of ``turns`` stages of a rank."""
    white = _PALEST * turn / max(1, turns - 1)
    red, green, blue = (part + (1 - part) * white for part in colour)
    return red, green, blue


def _turns(simulation: Simulation) -> list[list[int]]:
    """Return the stages of each rank in order."""
    return [sorted({action.stage for action, _, _ in spans}) for spans in simulation.spans]


def _draw_boxes(axes: Axes, simulation: Simulation, layout: _Layout) -> None:
    """Draw the boxes of each colour as one collection: single ones would take minutes."""
    from matplotlib.collections import PolyCollection

    boxes: dict[tuple[Kind, int, int], list[list[tuple[float, float]]]] = defaultdict(list)
    point = (simulation.makespan or 1) / (layout.width * _INCH)
    shortest = float("inf")
    font = 0.8 * layout.font
    axes.barh(range(layout.rows), simulation.makespan, height=_HEIGHT, color=_IDLE)
    for rank, (spans, stages) in enumerate(zip(simulation.spans, _turns(simulation), strict=True)):
        for action, start, end in spans:
            if end <= start:
                continue
            y0, y1 = rank - _HEIGHT / 2, rank + _HEIGHT / 2
            boxes[action.kind, stages.index(action.stage), len(stages)].append(
                [(start, y0), (start, y1), (end, y1), (end, y0)]
            )
            shortest = min(shortest, end - start)
            if (len(str(action.microbatch)) + 0.5) * _DIGIT * font * point < end - start:
                axes.text(
                    (start + end) / 2,
                    rank,
                    str(action.microbatch),
                    ha="center",
                    va="center_baseline",
                    fontsize=font,
                    color=_INK,
                )
    edge = 0.6 if shortest > 4 * point else 0.0
    for (kind, turn, turns), corners in boxes.items():
        collection = PolyCollection(
            corners,
            facecolors=[_shade(_COLOURS[kind], turn, turns)],
            edgecolors="white",
            linewidths=edge,
            clip_on=False,
            gid=f"{kind.value}-{turn + 1}-of-{turns}",
        )
        axes.add_collection(collection, autolim=False)


def _draw_margins(
    axes: Axes, simulation: Simulation, layout: _Layout, labels: Sequence[str]
) -> None:
    """Write names at the left, per cents at the right."""

    def write(x: float, y: float, text: str, *, weight: str = "normal") -> None:
        """Write at ``x`` inches from the left end of the time axis, ``y`` rows down."""
        axes.text(
            x / layout.width,
            y,
            text,
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="center_baseline" if y > -0.5 else "bottom",
            fontsize=layout.font if y > -0.5 else 8,
            weight=weight,
            color=_INK,
            parse_math=False,
        )

    makespan = simulation.makespan or 1
    columns = {"bubble": [f"{part:.1%}" for part in simulation.bubbles]}
    if any(simulation.exposed):
        columns["links"] = [f"{time / makespan:.1%}" for time in simulation.exposed]
    for rank, label in enumerate(labels):
        write(-0.1, rank, label)
    for number, (heading, texts) in enumerate(columns.items(), 1):
        right = layout.width + 0.6 * number
        write(right, -0.5 - 0.06 / layout.row, heading, weight="bold")
        for rank, text in enumerate(texts):
            write(right, rank, text)


def _draw_legend(figure: Figure, simulation: Simulation, at: tuple[float, float]) -> None:
    from matplotlib.patches import Patch

    kinds = {action.kind for spans in simulation.spans for action, _, _ in spans}
    turns = max(map(len, _turns(simulation)), default=0)
    patches = [
        Patch(color=colour, label=f"{kind.value} {_MEANINGS[kind]}")
        for kind, colour in _COLOURS.items()
        if kind in kinds
    ]
    patches.append(Patch(color=_IDLE, label="idle"))
    if turns > 1:
        patches += [
            Patch(color=_shade(_GREY, turn, turns), label=f"stage {turn + 1} of a rank")
            for turn in range(turns)
        ]
    figure.legend(
        handles=patches,
        loc="center left",
        bbox_to_anchor=at,
        ncols=len(patches),
        frameon=False,
        fontsize=8,
        labelcolor=_INK,
        handlelength=1.2,
        handleheight=0.9,
        columnspacing=1.4,
        borderpad=0,
        borderaxespad=0,
    )
