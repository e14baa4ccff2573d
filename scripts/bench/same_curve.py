"""The same losses as mlx_lm.lora: numbers and a picture."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import yaml

from scripts.bench.benchmark import Bench, Benchmark, machine, run
from scripts.bench.trained import PIRATE, demo_lacks, demo_model, of_kind, trained
from testbed.jobs import ROOT

NUMBERS = ROOT / "docs/pictures/same-curve.json"
PICTURE = NUMBERS.with_suffix(".svg")

THEIRS = "mlx_lm.lora"

OPTIONS: dict[str, Any] = {
    "train": True,
    "fine_tune_type": "lora",
    "num_layers": 16,
    "lora_parameters": {"rank": 8, "dropout": 0.0, "scale": 20.0},
    "mask_prompt": True,
    "optimizer": "adamw",
    "learning_rate": 4e-4,
    "batch_size": 4,
    "max_seq_length": 128,
    "seed": 0,
    "iters": 50,
    "steps_per_report": 1,
    "steps_per_eval": 1000,
    "val_batches": 1,
    "save_every": 1000,
}
"""What both programs are given; paths are added."""

RANKS = {"1 rank": 1, "2 ranks": 2, "4 ranks": 4}


def losses_of_all(bench: Bench) -> dict[str, list[float]]:
    """Return the losses of all steps, of mlx_lm.lora and of our runs."""
    config = bench.path("lora.yaml")
    own = {"model": str(demo_model(bench)), "data": str(PIRATE)}
    own["adapter_path"] = str(bench.path("out"))
    fewer = {"iters": 2, "num_layers": 8} if bench.quick else {}
    config.write_text(yaml.safe_dump({**OPTIONS, **own, **fewer}))
    run([sys.executable, "-m", "testbed.mlx_lm_lora", config])
    theirs = json.loads(config.with_suffix(".json").read_text())["train"]
    losses = {THEIRS: [loss for _, loss in theirs]}
    bench.say(THEIRS, losses[THEIRS][-1])
    for name, ranks in RANKS.items():
        told = trained(bench, name, {"config": config, "pipeline_stages": ranks}, ranks=ranks)
        losses[name] = [each["loss"] for each in of_kind(told, "train")]
        bench.say(name, losses[name][-1])
    return losses


def largest_difference(losses: Mapping[str, Sequence[float]]) -> float:
    """Return by how much a loss of ours differs from mlx_lm.lora's at most, relative to it."""
    theirs = losses[THEIRS]
    return max(
        abs(ours - their) / their
        for name in RANKS
        for ours, their in zip(losses[name], theirs, strict=True)
    )


# The picture, written by hand: it follows the reader's scheme, and the same numbers give the same
# bytes.

WIDTH, HEIGHT = 760, 330
LEFT, RIGHT, TOP, BOTTOM = 50, 745, 30, 285


@dataclass(frozen=True)
class Scale:
    """Where a step and a loss lie in the picture."""

    steps: int
    most: float
    """Loss at the top; 0 is at the bottom."""

    def place(self, step: int, loss: float) -> tuple[float, float]:
        """Return the place of a loss, in pixels from the left and from the top."""
        right = LEFT + (RIGHT - LEFT) * (step - 1) / (self.steps - 1)
        down = BOTTOM - (BOTTOM - TOP) * loss / self.most
        return round(right, 1), round(down, 1)


STYLE = """\
    svg { --ink: #1f2328; --soft: #59636e; --line: #d1d9e0 }
    svg { --wide: #b6d7ff; --one: #0969da; --two: #bc4c00; --four: #1a7f37 }
    @media (prefers-color-scheme: dark) {
      svg { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d }
      svg { --wide: #1f4a80; --one: #79c0ff; --two: #f0883e; --four: #56d364 }
    }
    text { fill: var(--ink) }
    .soft { fill: var(--soft); font-size: 13px }
    .grid { stroke: var(--line) }
    .theirs { fill: none; stroke: var(--wide); stroke-width: 9; stroke-linejoin: round }
    .one { fill: none; stroke: var(--one); stroke-width: 1.5 }
    .two { fill: none; stroke: var(--two); stroke-width: 2 }
    .four { stroke: var(--four); stroke-width: 2 }"""


def mark(name: str, at: tuple[float, float]) -> str:
    """Return a circle for a loss of two ranks, a cross for one of four."""
    x, y = at
    if name == "2 ranks":
        return f'<circle class="two" cx="{x}" cy="{y}" r="5"/>'
    return f'<path class="four" d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"/>'


def line(kind: str, points: Sequence[tuple[float, float]]) -> str:
    """Return a line through points."""
    return f'<polyline class="{kind}" points="{" ".join(f"{x},{y}" for x, y in points)}"/>'


def key() -> list[str]:
    """Return the names of the four curves, each with its line or mark."""
    y = TOP + 12
    parts = [
        line("theirs", [(330, y), (360, y)]),
        f'<text x="370" y="{y + 5}">{THEIRS}</text>',
        line("one", [(330, y + 26), (360, y + 26)]),
        f'<text x="370" y="{y + 31}">shardmlx, 1 rank</text>',
    ]
    for row, name in enumerate(("2 ranks", "4 ranks")):
        down = y + 26 * row
        parts += [mark(name, (560, down)), f'<text x="575" y="{down + 5}">{name}</text>']
    return parts


def drawn(losses: Mapping[str, Sequence[float]]) -> str:
    """Return the picture of the losses, as SVG."""
    steps = len(losses[THEIRS])
    scale = Scale(steps, float(int(max(map(max, losses.values()))) + 1))
    places = {
        name: [scale.place(step, loss) for step, loss in enumerate(own, 1)]
        for name, own in losses.items()
    }
    parts = []
    for loss in range(0, int(scale.most) + 1, 2):
        _, y = scale.place(1, loss)
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{RIGHT}"/>')
        parts.append(
            f'<text class="soft" x="{LEFT - 10}" y="{y + 4}" text-anchor="end">{loss}</text>'
        )
    for step in range(10, steps + 1, 10):
        x, _ = scale.place(step, 0)
        parts.append(
            f'<text class="soft" x="{x}" y="{BOTTOM + 20}" text-anchor="middle">{step}</text>'
        )
    parts.append(f'<text class="soft" x="{LEFT}" y="{TOP - 12}">loss</text>')
    middle = (LEFT + RIGHT) // 2
    parts.append(
        f'<text class="soft" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">step</text>'
    )
    parts += [line("theirs", places[THEIRS]), line("one", places["1 rank"])]
    # Every second step of each, in turn: both marks at one place would hide the lines.
    parts += [mark("2 ranks", at) for at in places["2 ranks"][::2]]
    parts += [mark("4 ranks", at) for at in places["4 ranks"][1::2]]
    body = "\n  ".join([*parts, *key()])
    first, last = losses[THEIRS][0], losses[THEIRS][-1]
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"
     role="img" aria-labelledby="title desc"
     font-family="-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif" font-size="15">
  <title id="title">Losses of mlx_lm.lora, and of shardmlx on 1, 2 and 4 ranks</title>
  <desc id="desc">{steps} steps, from {first:.2f} to {last:.2f}: they lie on each other.</desc>
  <style>
{STYLE}
  </style>
  {body}
</svg>
"""


def same_curve(bench: Bench) -> None:
    """The losses of mlx_lm.lora, and of the same run on 1, 2 and 4 ranks; draw them as one picture.

    One set of options, given to mlx_lm.lora and to shardmlx.train: the demo's model and data, LoRA
    of rank 8, float32, dropout 0. Numbers go to docs/pictures/same-curve.json with the machine and
    all versions, the picture to docs/pictures/same-curve.svg. With --quick nothing is written, and
    --draw draws the stored numbers again. About ten minutes on two cores.
    """
    if bench.options.draw:
        losses = json.loads(NUMBERS.read_text())["losses"]
    else:
        losses = losses_of_all(bench)
    if bench.quick:
        bench.say(drawn(losses)[:200])
        return
    if not bench.options.draw:
        when = datetime.now(UTC).date().isoformat()
        numbers = {"made": when, "machine": machine(), "options": OPTIONS, "losses": losses}
        NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n")
    PICTURE.write_text(drawn(losses))
    print(f"{PICTURE.relative_to(ROOT)}: largest difference {largest_difference(losses):.1e}")


def add_draw(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draw", action="store_true", help="only draw the stored numbers")


SAME_CURVE = Benchmark("same-curve", same_curve, add_draw, needs=[demo_lacks])
