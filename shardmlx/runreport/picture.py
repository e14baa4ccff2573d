"""Draw the curves of a run as a picture: SVG or PNG, with matplotlib. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmlx.pipeline.figure import check_picture
from shardmlx.runreport.metrics_file import Event, is_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart by the colour-blind too: Okabe and Ito, Color Universal Design, 2008.
_TRAINING, _VALIDATION = "#00735f", "#d55e00"
_MARKS = {
    "checkpoint": ("#0072b2", "checkpoint", ""),
    "resume": ("#8a3fa8", "restart", "--"),
    "straggler": ("#c2410c", "straggler", "-"),
}
"""Colour, name and line of each kind of mark; a checkpoint has a triangle in place of a line."""
_INK, _GRID = "#1f2428", "#d9dddb"
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "shardmlx",  # the same ids in every run
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.grid": True,
    "grid.color": _GRID,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}
_METADATA: dict[str, dict[str, None]] = {
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
}


@dataclass(frozen=True, slots=True)
class Curve:
    """The values of a quantity at their steps; ``name`` is that of its line, if it has one."""

    steps: Sequence[int]
    values: Sequence[float]
    name: str = ""

    @classmethod
    def of(cls, events: Sequence[Event], kind: str, field: str, name: str = "") -> Curve:
        """Take a field out of all events of a kind that have a number there."""
        points = [
            (event["step"], event[field])
            for event in events
            if event["event"] == kind
            and is_number(event.get(field))
            and is_number(event.get("step"))
        ]
        return cls([step for step, _ in points], [value for _, value in points], name)


def draw_curves(events: Sequence[Event], path: Path) -> bytes:
    """Return the picture of a run's curves, in the format of ``path``'s suffix.

    Raises ``UserError`` for another suffix, and without matplotlib.
    """
    check_picture(path)
    import matplotlib.style

    kind = path.suffix.lower()[1:]
    picture = BytesIO()
    with matplotlib.style.context(["default", _STYLE]):
        _figure(events).savefig(picture, format=kind, dpi=160, metadata=_METADATA[kind])
    return picture.getvalue()


def _figure(events: Sequence[Event]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.5), layout="constrained")
    axes = figure.subplot_mosaic(
        [["loss", "loss"], ["rate", "seconds"], ["learning rate", "norm"]],
        height_ratios=[1.4, 1, 1],
    )
    _draw(
        axes["loss"],
        "Loss",
        [
            Curve.of(events, "train", "loss", "training"),
            Curve.of(events, "val", "loss", "validation"),
        ],
    )
    for name, title, field in (
        ("rate", "Tokens per second", "tokens_per_second"),
        ("seconds", "Seconds of a step", "step_seconds"),
        ("learning rate", "Learning rate", "learning_rate"),
        ("norm", "Global gradient norm", "grad_norm"),
    ):
        _draw(axes[name], title, [Curve.of(events, "train", field)])
        axes[name].set_ylim(bottom=0)
    for each in axes.values():
        _draw_marks(each, events)
        each.set_xlim(axes["loss"].get_xlim())
    axes["loss"].legend(frameon=False, ncols=5, loc="upper right")
    for name in ("learning rate", "norm"):
        axes[name].set_xlabel("step")
    return figure


def _draw(axes: Axes, title: str, curves: Sequence[Curve]) -> None:
    axes.set_title(title)
    for curve, colour in zip(curves, (_TRAINING, _VALIDATION), strict=False):
        marker = "o" if len(curve.steps) < 60 else ""
        axes.plot(
            curve.steps,
            curve.values,
            marker,
            linestyle="-",
            color=colour,
            label=curve.name or None,
            markersize=3,
            linewidth=1.6,
        )


def _draw_marks(axes: Axes, events: Sequence[Event]) -> None:
    """Draw checkpoints as triangles on the axis, restarts and stragglers as lines across."""
    for kind, (colour, name, style) in _MARKS.items():
        steps = [
            event["step"]
            for event in events
            if event["event"] == kind and is_number(event.get("step"))
        ]
        if style:
            for step in steps:
                label = name if step == steps[0] else None
                axes.axvline(step, color=colour, linestyle=style, linewidth=1.4, label=label)
        elif steps:
            on_axis = axes.get_xaxis_transform()
            axes.plot(
                steps,
                [0.0] * len(steps),
                "^",
                color=colour,
                label=name,
                transform=on_axis,
                clip_on=False,
            )
