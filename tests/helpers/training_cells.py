"""Runs of training in cells that seeds draw: each has the losses of one process.

    python -m tests.helpers.training_cells --cells 500

A cell is a family, an objective, a method, an optimizer, a precision, masks, packing, accumulation
and what is computed again or in pieces; a layout of up to four ranks with its schedule, replicas,
ZeRO and tensor shares; and perhaps a step at which the run stops, and another layout in which it
goes on. ``--first SEED --cells 1`` tries one again.

Nothing is drawn that a run refuses: a refused cell is a fault of this file. Dropout is not drawn
beside tensor shares, which draw other masks (``docs/which-parallelism.md``).
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

from shardmlx.config.train import LINE
from shardmlx.errors import UserError
from shardmlx.pipeline.schedules import SCHEDULES
from testbed.family_configs import CONFIGS
from testbed.runs import events, in_file
from testbed.small_models import (
    SMALL_VOCABULARY,
    pirate_directory,
    small_directory,
    tokenizer_directory,
    with_tokenizer,
)
from tests.helpers.mpirun import train
from tests.helpers.preference_data import preference_directory
from tests.helpers.rank_pool import close_pools

STEPS = 4

SECONDS_OF_A_RUN = 600.0
"""More is a hang. The first run of a pool imports everything, beside whatever else runs."""

MOST_DIFFERENCE = 2e-5
"""Relative, between losses in float32."""

MOST_OF_HALVES = 2e-2
"""Relative, in bfloat16, where sums may be made in another order."""

LAYOUTS: Sequence[tuple[int, dict[str, Any]]] = (
    (1, {}),
    *((2, {"schedule": name}) for name in SCHEDULES),
    *((2, {"pipeline_stages": 1, "zero": zero}) for zero in (0, 1, 3)),
    (2, {"pipeline_stages": 1, "replica_rows": "3,1"}),
    (2, {"tensor_parallel": 2}),
    (2, {"tensor_parallel": 2, "tensor_shares": "2,1"}),
    (4, {"schedule": "zb-h1"}),
    *(
        (4, {"pipeline_stages": 2, "schedule": name, "zero": zero})
        for name, zero in (("1f1b", 1), ("zb-v", 0), ("gpipe", 1), ("1f1b", 3))
    ),
    *(
        (4, {"pipeline_stages": 2, "tensor_parallel": 2, "schedule": name})
        for name in ("1f1b", "zb-v")
    ),
    (4, {"pipeline_stages": 1, "tensor_parallel": 2}),
)

SHARED = ("llama", "mistral", "qwen2", "qwen3", "phi3")
"""Families of which all layouts take models; with tied embeddings all but phi3's."""

EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
"""Families of mixtures: no DoRA of experts, and on a CPU no experts in bfloat16."""

FAMILIES = (
    *SHARED,
    *("gemma2", "gemma3_text", "granite", "starcoder2", "glm4", "cohere2", "olmo2", "smollm3"),
    *EXPERTS,
)

OBJECTIVES = ("sft", "sft", "sft", "dpo", "cpo", "simpo", "orpo", "kto")

METHODS = ("lora", "lora", "dora", "full", "full")

OPTIMIZERS = ("adam", "adamw", "sgd", "muon", "adafactor")

WITH_SHARES = OPTIMIZERS[:3]
"""Optimizers that tensor shares take."""

SCHEDULE_OF_RATE = {"name": "cosine_decay", "arguments": [1e-3, STEPS]}


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
        together = random.choice([1, 1, 2])
        ends = [random.randint(together, STEPS - 1)] if random.random() < 0.5 else []
        ends.append(STEPS)
        layouts = [random.choice(LAYOUTS) for _ in ends]
        is_shared = any("tensor_parallel" in layout for _, layout in layouts)
        family = random.choice(SHARED if is_shared else FAMILIES)
        options = {
            **cls._tuning(random, family, is_shared),
            **cls._rows(random, any("replica_rows" in layout for _, layout in layouts)),
            "grad_accumulation_steps": together,
            "recompute": random.choice(["none", "none", "selective", "full"]),
            "attention_chunk": random.choice(["auto", "off"]),
        }
        parts = [(*layout, end) for layout, end in zip(layouts, ends, strict=True)]
        return cls(
            family,
            family in SHARED[:4] and random.random() < 0.4,
            options,
            [(ranks, end, layout) for ranks, layout, end in parts],
        )

    @staticmethod
    def _tuning(random: Random, family: str, is_shared: bool) -> dict[str, Any]:
        """Draw what is trained, and how it is updated."""
        has_experts = family in EXPERTS
        method = random.choice([each for each in METHODS if each != "dora" or not has_experts])
        options = {
            "fine_tune_type": method,
            "num_layers": random.choice([-1, -1, 2]),
            "dtype": random.choice(["float32"] * 3 + ["float32" if has_experts else "bfloat16"]),
            "optimizer": random.choice(WITH_SHARES if is_shared else OPTIMIZERS),
            "max_grad_norm": random.choice([None, 0.5]),
            "lr_schedule": random.choice([None, SCHEDULE_OF_RATE]),
        }
        if method == "full":
            options["unfreeze_all"] = not is_shared and random.random() < 0.3
            options["master_weights"] = options["dtype"] == "bfloat16" and random.random() < 0.5
        else:
            dropout = 0.0 if is_shared else random.choice([0.0, 0.0, 0.2])
            options["lora_parameters"] = {"rank": 4, "scale": 10.0, "dropout": dropout}
        return options

    @staticmethod
    def _rows(random: Random, is_unequal: bool) -> dict[str, Any]:
        """Draw the objective, and how the rows of a step are taken."""
        objective = random.choice(("sft", "kto") if is_unequal else OBJECTIVES)
        size = 1 if is_unequal else random.choice([1, 2])
        options: dict[str, Any] = {
            "objective": objective,
            "micro_batch_size": size if objective in ("sft", "kto") else 2,  # both of a pair
        }
        if objective == "sft":
            options |= {
                "mask_prompt": random.random() < 0.4,
                "pack": random.random() < 0.3,
                "loss_chunk": random.choice(["auto", "counted", "off"]),
            }
        return options

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

    def __init__(self, root: Path, data: Path, tokenizer: Path) -> None:
        self._root = root
        self._data = data
        self._tokenizer = tokenizer
        self._preferences = preference_directory(root, data)

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
            words = in_file(place / f"{name}-{number}.yaml", **options)
            try:
                LINE.load([*map(str, words)])  # ranks of a pool would wait for one that refuses
            except UserError as error:
                raise RefusedError(str(error)) from None
            job = train(ranks, *words, timeout=SECONDS_OF_A_RUN)
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
            "val_batches": -1,  # a run that stops has a validation more, which would draw others
            "checkpoint_every": 1,
        }

    def _model(self, cell: Cell) -> Path:
        path = self._root / f"{cell.family}{'-tied' * cell.tied}"
        if not path.exists() and cell.family in SHARED:
            small_directory(path, self._tokenizer, family=cell.family, tied=cell.tied)
        elif not path.exists():
            config = CONFIGS[cell.family] | {"vocab_size": SMALL_VOCABULARY, "eos_token_id": 1}
            if cell.family == "gemma2":
                config["query_pre_attn_scalar"] = 20  # transformers takes no float
            with_tokenizer(path, config, self._tokenizer)
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
        root = Path(directory)
        data = pirate_directory(root / "pirate", root / "whole")
        bench = Bench(root, data, tokenizer_directory(root / "tokenizer", data))
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
