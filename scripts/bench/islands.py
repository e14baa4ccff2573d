#!/usr/bin/env python3
"""Losses of SmolLM2's full fine-tune: data parallel, and four islands whose hub has 3 encodings.

    python scripts/bench/islands.py [--only WORD ...] [--warm-up 60] [--steps 20] [--rounds 12]

Data parallel is one process with batches of four rows of 32 tokens; each island has a quarter of
the same rows, a process and a row a step, and reports every 20 steps. All begin with the model that
60 steps of data parallel made, since islands go on from trained weights (DiLoCo, arXiv:2311.08105).
All weights but the embedding are trained with Adam, whose learning rate falls from 1e-5 to 0 by a
cosine, as in that paper. Losses are those of the validation set, and for islands of the hub's outer
weights. Nothing is timed, so it does not matter what else the machine does.

Two hours of CPU time, 12 GB of memory, 8 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _compare import Table, machine, parser_of, publish, run
from _islands import running_hub, train_islands
from _models import PIRATE, SMOLLM2, check_prepared
from _training import as_flags

TOGETHER = "data parallel"
ENCODINGS = ("float32", "int8", "top-k:0.1")
POINTS = 3
"""Points of a curve, evenly spaced, the last at the end of the run."""
NAMES = ("ann", "bob", "cem", "dia")
LENGTH = 32
TEXTS = 40
"""Texts of the validation set that losses are means of."""

LEARNING_RATE = 1e-5

TRAINING = {
    "fine_tune_type": "full", "num_layers": -1, "optimizer": "adam",
    "learning_rate": LEARNING_RATE, "max_seq_length": LENGTH + 1, "val_batches": 0,
    "save_every": 10**9, "no_pack": True,
}  # fmt: skip


def words(command: str, **flags: object) -> list[str]:
    return [sys.executable, "-m", "shardmlx", command, *as_flags(flags)]


def write_data(directory: Path) -> None:
    """Write the data of all, and of each island: every fourth row, without a chat template."""
    texts = {}
    for split in ("train", "valid"):
        rows = map(json.loads, (PIRATE / f"{split}.jsonl").read_text().splitlines())
        told = [" ".join(turn["content"] for turn in row["messages"]) for row in rows]
        texts[split] = [json.dumps({"text": text}) + "\n" for text in told]
    parts = {TOGETHER: slice(None)}
    parts |= {name: slice(i, None, len(NAMES)) for i, name in enumerate(NAMES)}
    for name, own in parts.items():
        (directory / name).mkdir()
        splits = {"train": texts["train"][own], "valid": texts["valid"], "test": texts["valid"]}
        for split, lines in splits.items():
            (directory / name / f"{split}.jsonl").write_text("".join(lines))


def loss_of(directory: Path, model: Path, **adapters: Path) -> float:
    """Return the loss of a model, with the weights that a hub wrote or without."""
    output = directory / "loss.json"
    limits = {"max_seq_length": LENGTH + 1, "limit": TEXTS, "output": output}
    run(words("evaluate", data=directory / TOGETHER, model=model, **limits, **adapters))
    return float(json.loads(output.read_text())["loss"])


def keep(hub: Path, rounds: Iterable[int], copies: Path) -> None:
    """Copy a hub's directory as it is after each of these rounds, while it runs."""
    for number in rounds:
        version = hub / "fragment-000" / f"v{number:07}"
        while not version.exists():
            time.sleep(0.5)
        copy = copies / f"hub-{number}"
        shutil.copytree(version, copy / "fragment-000" / version.name)
        shutil.copytree(hub / "tokens", copy / "tokens")
        shutil.copy(hub / "run.json", copy)


def train_apart(
    model: Path, encoding: str, own: Path, directory: Path, options: argparse.Namespace
) -> list[Path]:
    """Train islands to the end of the run, and return what the hub has at the points."""
    path, flags = own / "hub", {**TRAINING, **decayed(directory, options), "model": model}
    islands: dict[str, dict[str, object]] = {
        name: {**flags, "batch_size": 1, "data": directory / name, "adapter_path": path / name}
        for name in NAMES
    }
    terms = {"encoding": encoding, "inner_steps": options.steps, "rounds": options.rounds}
    with running_hub(path, NAMES, **terms) as port, ThreadPoolExecutor(1) as pool:
        kept = pool.submit(keep, path, points_of(options), own)
        train_islands(path, dict.fromkeys(NAMES, port), islands)
        kept.result()
    outs = [own / f"out-{number}" for number in points_of(options)]
    for number, out in zip(points_of(options), outs, strict=True):
        run(words("hub", path=own / f"hub-{number}", write=out))
    return outs


def points_of(options: argparse.Namespace) -> list[int]:
    """Return the rounds after which losses are taken."""
    every = -(-options.rounds // POINTS)
    return [*range(every, options.rounds, every), options.rounds]


def decayed(directory: Path, options: argparse.Namespace) -> dict[str, object]:
    """Return the options of a run whose learning rate falls to 0 with its last step."""
    steps, path = options.rounds * options.steps, directory / "cosine.yaml"
    schedule = {"name": "cosine_decay", "arguments": [LEARNING_RATE, steps]}
    path.write_text(json.dumps({"lr_schedule": schedule}))
    return {"iters": steps, "config": path}


def train_together(model: Path, out: Path, directory: Path, **own: object) -> None:
    flags = {**TRAINING, "model": model, "batch_size": len(NAMES), **own}
    run(words("train", **flags, data=directory / TOGETHER, adapter_path=out))


def train_in_parts(
    model: Path, own: Path, directory: Path, options: argparse.Namespace
) -> list[Path]:
    """Train in one process that stops at each point and goes on; return what it has there."""
    flags, outs = decayed(directory, options) | {"checkpoint_dir": own / "checkpoints"}, []
    for number in points_of(options):
        outs.append(own / f"out-{number}")
        flags |= {"iters": number * options.steps}
        train_together(model, outs[-1], directory, **flags)
    return outs


def losses_of_all(directory: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the losses at the points of each of the runs that are asked for."""
    write_data(directory)
    model, losses = directory / "model", dict[str, list[float]]()
    train_together(SMOLLM2, model, directory, iters=options.warm_up, seed=1)
    print("before", f"{loss_of(directory, model):.4f}", flush=True)
    for name in (TOGETHER, *ENCODINGS):
        if options.only and not any(word in name for word in options.only):
            continue
        with tempfile.TemporaryDirectory(dir=directory) as made:
            if name == TOGETHER:
                outs = train_in_parts(model, Path(made), directory, options)
                losses[name] = [loss_of(directory, out) for out in outs]
            else:
                outs = train_apart(model, name, Path(made), directory, options)
                losses[name] = [loss_of(directory, model, adapter_path=out) for out in outs]
        print(name, *(f"{loss:.4f}" for loss in losses[name]), flush=True)
    return losses


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="words of which a run has one")
    parser.add_argument("--warm-up", type=int, default=60, help="steps before all runs")
    parser.add_argument("--steps", type=int, default=20, help="steps between two reports")
    options = parser.parse_args()
    check_prepared()
    options.rounds = 1 if options.quick else options.rounds or 12
    options.steps = 1 if options.quick else options.steps
    options.warm_up = 1 if options.quick else options.warm_up
    facts = machine()
    with tempfile.TemporaryDirectory() as made:
        losses = losses_of_all(Path(made), options)
    base = losses.get(TOGETHER)
    lines = [
        (
            name,
            *(f"{loss:.3f}" for loss in each),
            f"{100 * (each[-1] / base[-1] - 1):+.2f}%" if base else "",
        )
        for name, each in losses.items()
    ]
    after = (f"after {number * options.steps}" for number in points_of(options))
    heads = ("validation", *after, "beside data parallel")
    table = Table("SmolLM2-135M, full", heads, lines)
    publish(options, facts, [table], {"losses": losses})


if __name__ == "__main__":
    main()
