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
import sys
import tempfile
from pathlib import Path

from _compare import Table, machine, parser_of, publish, run
from _islands import running_hub, train_islands
from _models import PIRATE, SMOLLM2, check_prepared
from _training import as_flags

START, TOGETHER = "before", "data parallel"
ENCODINGS = ("float32", "int8", "top-k:0.1")
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


def loss_of(directory: Path, **model: Path) -> float:
    """Return the loss of a model, with the weights that a hub wrote or without."""
    output = directory / "loss.json"
    limits = {"max_seq_length": LENGTH + 1, "limit": TEXTS, "output": output}
    run(words("evaluate", data=directory / TOGETHER, **limits, **model))
    return float(json.loads(output.read_text())["loss"])


def train_apart(
    model: Path, encoding: str, out: Path, directory: Path, options: argparse.Namespace
) -> None:
    """Train islands to the end of the run, and write what the hub made of it."""
    path, flags = out.with_name("hub"), {**TRAINING, **decayed(directory, options), "model": model}
    own: dict[str, dict[str, object]] = {
        name: {**flags, "batch_size": 1, "data": directory / name, "adapter_path": path / name}
        for name in NAMES
    }
    terms = {"encoding": encoding, "inner_steps": options.steps, "rounds": options.rounds}
    with running_hub(path, NAMES, **terms) as port:
        train_islands(path, dict.fromkeys(NAMES, port), own)
    run(words("hub", path=path, write=out))


def decayed(directory: Path, options: argparse.Namespace) -> dict[str, object]:
    """Return the options of a run whose learning rate falls to 0 with its last step."""
    steps, path = options.rounds * options.steps, directory / "cosine.yaml"
    schedule = {"name": "cosine_decay", "arguments": [LEARNING_RATE, steps]}
    path.write_text(json.dumps({"lr_schedule": schedule}))
    return {"iters": steps, "config": path}


def train_together(model: Path, out: Path, directory: Path, **own: object) -> None:
    flags = {**TRAINING, "model": model, "batch_size": len(NAMES), **own}
    run(words("train", **flags, data=directory / TOGETHER, adapter_path=out))


def losses_of_all(directory: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return the loss after each of the runs that are asked for."""
    write_data(directory)
    model, losses = directory / "model", dict[str, float]()
    train_together(SMOLLM2, model, directory, iters=options.warm_up, seed=1)
    for name in (START, TOGETHER, *ENCODINGS):
        if options.only and not any(word in name for word in options.only):
            continue
        with tempfile.TemporaryDirectory(dir=directory) as own:
            out, trained = Path(own, "out"), {"model": model}
            if name == TOGETHER:
                train_together(model, out, directory, **decayed(directory, options))
                trained = {"model": out}
            elif name != START:
                train_apart(model, name, out, directory, options)
                trained = {"model": model, "adapter_path": out}
            losses[name] = loss_of(directory, **trained)
        print(name, f"{losses[name]:.4f}", flush=True)
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
    beside = {
        name: f"{100 * (loss / base - 1):+.2f}%" if base else "" for name, loss in losses.items()
    }
    lines = [(name, f"{loss:.4f}", beside[name]) for name, loss in losses.items()]
    table = Table("SmolLM2-135M, full", ("what", "validation", "beside data parallel"), lines)
    publish(options, facts, [table], {"losses": losses})


if __name__ == "__main__":
    main()
