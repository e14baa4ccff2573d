#!/usr/bin/env python3
"""The operations of a layer, forward and backward: MLX's, ours, and torch's.

    python scripts/bench/operations.py [--torch PYTHON] [--length 256]

The shapes are of the model of pipeline.py, a micro-batch of two rows, float32 on one core. Each
operation is computed several times in a turn, of which the fastest counts. Ours are attention in
pieces, SwiGLU of --recompute selective, and the loss with its gradient; the others are MLX's. Half
a minute on one core.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from _compare import Spread, Table, by_turns, environment, machine, parser_of, pinned, publish
from _turns import Contender, warmed_up

HERE = Path(__file__).resolve().parent
KINDS = {"MLX": "mlx", "ours": "ours", "torch": "torch"}


def contender(name: str, python: str, length: int) -> Contender:
    command = [python, str(HERE / "_operations.py"), KINDS[name]]
    command += ["--rows", "2", "--length", str(length)]
    return Contender(name, [[*pinned(0, "core"), *command]], environments=[environment()])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--torch", default=sys.executable, help="Python that has torch")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    options = parser.parse_args()
    length = 32 if options.quick else options.length
    facts = machine()
    pythons = {name: options.torch if name == "torch" else sys.executable for name in KINDS}
    rounds = options.rounds or (1 if options.quick else 7)
    made = (contender(name, python, length) for name, python in pythons.items())
    with warmed_up(made) as running:
        turns = by_turns({each.name: each.turn for each in running}, rounds)
    table = operations(turns, length)
    publish(options, facts, [table], {"turns": turns})


def operations(turns: Mapping[str, Sequence[Sequence[dict[str, float]]]], length: int) -> Table:
    """Return milliseconds by operation, and how many times torch's they are."""
    first = turns["torch"][0][0]
    lines = []
    for operation in first:
        seconds = {name: [answers[0][operation] for answers in own] for name, own in turns.items()}
        cells = [f"{1e3 * min(own):.2f}" for own in seconds.values()]
        ratios = [
            f"{Spread.of_ratios(seconds[name], seconds['torch']):.2f}" for name in ("MLX", "ours")
        ]
        lines.append((operation, *cells, *ratios))
    header = ("operation, ms", *turns, "MLX / torch", "ours / torch")
    return Table(f"Forward and backward, 2 x {length} tokens", header, lines)


if __name__ == "__main__":
    main()
