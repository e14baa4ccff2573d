"""Runs of training in cells that seeds draw: each has the losses of one process.

    python -m tests.helpers.training_cells --cells 500

A cell is a family, an objective, a method, a precision, masks, packing and accumulation; a layout
of up to four ranks with its schedule, replicas, ZeRO and tensor shares; and perhaps a step at which
the run stops, and another layout in which it goes on. ``--first SEED --cells 1`` tries one again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from shardmlx.pipeline.schedules import SCHEDULES
from testbed.runs import events, in_file
from testbed.small_models import pirate_directory, small_directory, tokenizer_directory
from tests.helpers.mpirun import train
from tests.helpers.preference_data import preference_directory
from tests.helpers.rank_pool import close_pools

STEPS = 4

MOST_DIFFERENCE = 2e-5
"""Relative, between losses in float32."""

MOST_OF_HALVES = 2e-2
"""Relative, in bfloat16, where sums may be made in another order."""

LAYOUTS: Sequence[tuple[int, dict[str, Any]]] = (
    (1, {}),
    *((2, {"schedule": name}) for name in SCHEDULES),
    *((2, {"pipeline_stages": 1, "zero": zero}) for zero in (0, 1, 3)),
    (2, {"tensor_parallel": 2}),
    (4, {"schedule": "zb-h1"}),
    *(
        (4, {"pipeline_stages": 2, "schedule": name, "zero": zero})
        for name, zero in (("1f1b", 1), ("zb-v", 0), ("gpipe", 1), ("1f1b", 3))
    ),
    (4, {"pipeline_stages": 2, "tensor_parallel": 2, "schedule": "1f1b"}),
    (4, {"pipeline_stages": 1, "tensor_parallel": 2, "zero": 1}),
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")

OBJECTIVES = ("sft", "sft", "sft", "dpo", "cpo", "simpo", "orpo", "kto")


@dataclass(frozen=True)
class Cell:
    """What one seed draws. ``parts`` are the layouts of a run, with the last step of each."""

    family: str
    tied: bool
    options: dict[str, Any]
    parts: Sequence[tuple[int, int, dict[str, Any]]]

    @classmethod
    def of(cls, seed: int) -> Cell:
        """Draw a cell."""
        random = Random(seed)
        objective = random.choice(OBJECTIVES)
        method = random.choice([{}, {"fine_tune_type": "dora"}, {"fine_tune_type": "full"}])
        options = {
            **method,
            "objective": objective,
            "num_layers": random.choice([-1, -1, 2]),
            "grad_accumulation_steps": random.choice([1, 1, 2]),
            "micro_batch_size": random.choice([1, 2] if objective in ("sft", "kto") else [2]),
            "grad_checkpoint": random.random() < 0.3,
            "dtype": random.choice(["float32", "float32", "float32", "bfloat16"]),
            "optimizer": random.choice(["adam", "adamw", "sgd"]),
        }
        if objective == "sft":
            options |= {"mask_prompt": random.random() < 0.4, "pack": random.random() < 0.3}
        dropout = random.choice([0.0, 0.0, 0.2])
        ends = [STEPS] if random.random() < 0.5 else [random.randint(1, STEPS - 1), STEPS]
        parts = [(*random.choice(LAYOUTS), end) for end in ends]
        if any("tensor_parallel" in layout for _, layout, _ in parts):
            dropout = 0.0  # shares draw other masks
        if method.get("fine_tune_type") != "full":
            options["lora_parameters"] = {"rank": 4, "scale": 10.0, "dropout": dropout}
        return cls(
            random.choice(FAMILIES),
            random.random() < 0.3,
            options,
            [(ranks, end, layout) for ranks, layout, end in parts],
        )

    @property
    def most(self) -> float:
        """The largest difference that this cell may have."""
        return MOST_OF_HALVES if self.options["dtype"] == "bfloat16" else MOST_DIFFERENCE

    def __str__(self) -> str:
        return f"{self.family}{' tied' * self.tied} {self.options} in {list(self.parts)}"


class RefusedError(Exception):
    """A cell that has no run: its options were refused in one line."""


class Bench:
    """A directory of models and data, on which cells run."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._data = pirate_directory(root / "pirate", root / "whole")
        self._preferences = preference_directory(root, self._data)
        self._tokenizer = tokenizer_directory(root / "tokenizer", self._data)

    def check(self, cell: Cell, seed: int) -> float:
        """Return the largest relative difference of a cell's losses from those of one process.
        Raises ``RefusedError``, and ``AssertionError`` if a run fails or has other steps."""
        place = self._root / f"cell-{seed}"
        place.mkdir()
        wanted = self._losses(cell, place, "one", [(1, STEPS, {})])
        found = self._losses(cell, place, "cell", cell.parts)
        # A part that ends is validated at its end, too.
        assert found.keys() >= wanted.keys(), f"steps {found.keys()} and not {wanted.keys()}"
        return max(abs(found[key] - wanted[key]) / max(abs(wanted[key]), 0.1) for key in wanted)

    def _losses(
        self, cell: Cell, place: Path, name: str, parts: Sequence[tuple[int, int, dict[str, Any]]]
    ) -> dict[tuple[str, int], float]:
        losses = {}
        for number, (ranks, end, layout) in enumerate(parts):
            metrics = place / f"{name}-{number}.jsonl"
            options = self._common(cell, end) | cell.options | layout
            options |= {
                "adapter_path": str(place / name),
                "checkpoint_dir": str(place / f"{name}-checkpoints"),
                "metrics_file": str(metrics),
            }
            job = train(ranks, *in_file(place / f"{name}-{number}.yaml", **options))
            if job.returncode == 2 and job.stderr.count("\n") == 1:
                raise RefusedError(job.stderr.strip())
            assert job.returncode == 0, job.output
            for event in events(metrics):
                if event["event"] in ("train", "val"):
                    losses[event["event"], event["step"]] = event["loss"]
        return losses

    def _common(self, cell: Cell, end: int) -> dict[str, Any]:
        objective = cell.options["objective"]
        kind = {"sft": self._data, "kto": self._preferences / "singles"}
        return {
            "model": str(self._model(cell)),
            "data": str(kind.get(objective, self._preferences / "pairs")),
            "train": True,
            "seed": 3,
            "batch_size": 4,
            "iters": end,
            "learning_rate": 1e-3,
            "max_seq_length": 64,
            "steps_per_report": 1,
            "steps_per_eval": 2,
            "val_batches": 1,
            "checkpoint_every": 1,
        }

    def _model(self, cell: Cell) -> Path:
        path = self._root / f"{cell.family}{'-tied' * cell.tied}"
        if not path.exists():
            small_directory(path, self._tokenizer, family=cell.family, tied=cell.tied)
        return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Try cells; return 1 if one has other losses, or fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--seconds", type=float, help="stop after so many")
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    counts = Counter[str]()
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="cells-") as directory:
        bench = Bench(Path(directory))
        for seed in range(options.first, options.first + options.cells):
            if options.seconds is not None and time.monotonic() > begun + options.seconds:
                break
            cell = Cell.of(seed)
            try:
                difference = bench.check(cell, seed)
            except RefusedError as error:
                counts["refused"] += 1
                print(f"cell {seed}: {error}", flush=True)
            except BaseException as error:
                counts["failed"] += 1
                print(f"cell {seed}: {cell}: {error!r}", flush=True)
                if isinstance(error, KeyboardInterrupt):
                    break
            else:
                print(f"cell {seed}: {difference:.1e}", file=sys.stderr, flush=True)
                counts["same" if difference <= cell.most else "other"] += 1
                if cell.most == MOST_DIFFERENCE:
                    worst = max(worst, difference)
                if difference > cell.most:
                    print(f"cell {seed}: {cell}: {difference:.1e}", flush=True)
        close_pools()
    print(f"{dict(counts)}, worst difference {worst:.1e}, {time.monotonic() - begun:.0f} s")
    return int(counts["other"] + counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
