#!/usr/bin/env python3
"""Attention, head and loss in pieces: what long sequences take, and that short ones lose nothing.

    python scripts/bench/long_texts.py beside [--lengths 2048,4096] [--torch PYTHON]
    python scripts/bench/long_texts.py short | demo | limit

Two ranks with a core and a BLAS thread each, 1F1B, float32, by turns within one run:

  beside   a full fine-tune of the 8-layer, 512-wide model, steps of two rows: both chunks off; in
           pieces; torch.distributed.pipelining with scaled_dot_product_attention; mlx_lm.lora on
           one core, two rows of which are a step. Peaks are of the largest process. Contenders
           keep their memory between their turns, wherefore --only takes some at a time
  short    the same model with 8 micro-batches of two rows of 128, 256 and 512 tokens: what pieces
           cost where they are not needed; peaks of MLX's arrays, and of two ranks / one rank
  demo     LoRA of SmolLM2 on the demo's data: tokens/s with the loss in pieces and without
  limit    16384 tokens under a limit of 4 GB: refused without pieces, trained with them, by our
           limit and in a memory cgroup of that size, as root

--torch is a Python that has torch: transformers, which mlx-lm imports, imports torch if it is
there, and then that counts as memory of all the others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from _compare import (
    Spread,
    Table,
    by_turns,
    environment,
    machine,
    mpirun,
    parser_of,
    pinned,
    publish,
    verdict,
)
from _models import PIRATE, SMOLLM2, check_prepared, make_long_rows, make_wide
from _training import as_flags, as_words, events_of, path_of, training
from _turns import Contender, warmed_up

HERE = Path(__file__).resolve().parent
RANKS = 2
MIB = 2**20

WHOLE = {"attention_chunk": "off", "loss_chunk": "off", "recompute": "none"}
PIECES = {"recompute": "none"}
SELECTIVE = {"recompute": "selective"}
BASE = "off"
TORCH, THEIRS, THEIRS_AGAIN = "torch 1f1b", "mlx_lm.lora", "mlx_lm.lora --grad-checkpoint"

LIMIT = 4 * 10**9
LONGEST = 16384
"""Tokens of a sequence in ``limit``."""


def full(length: int, rows: int, micro_batch_size: int) -> dict[str, Any]:
    """Return the options of a full fine-tune; one token more is a target only."""
    return {
        "fine_tune_type": "full", "num_layers": -1, "optimizer": "adamw", "schedule": "1f1b",
        "batch_size": rows, "micro_batch_size": micro_batch_size, "max_seq_length": length + 1,
    }  # fmt: skip


class Arena:
    """The contenders of a run, in a directory of their own."""

    def __init__(self, directory: Path, options: argparse.Namespace, rounds: int) -> None:
        self.directory, self.options, self.rounds = directory, options, rounds
        self.steps = 1
        changes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
        longest = {"max_position_embeddings": LONGEST}
        self.model = make_wide(directory / "model", **longest, **(changes if options.quick else {}))
        self.data = make_long_rows(directory / "data")

    def ours(self, name: str, flags: Mapping[str, Any], ranks: int = RANKS) -> Contender:
        given = {"model": self.model, "data": self.data, **flags}
        return training(
            name,
            given,
            ranks=ranks,
            steps=self.steps,
            rounds=self.rounds,
            directory=self.directory,
            bind="core",
        )

    def torch(self, length: int, rows: int) -> Contender:
        command = [self.options.torch, str(HERE / "_torch_pipeline.py"), "--schedule", "1f1b"]
        command += ["--config", str(self.model / "config.json"), "--sizes", "4,4"]
        command += ["--meet", str(path_of(self.directory, f"torch {length}"))]
        command += as_flags({"rows": rows, "microbatches": rows, "length": length, "steps": 1})
        places = [{"RANK": str(rank), "WORLD_SIZE": str(RANKS)} for rank in range(RANKS)]
        return Contender(
            TORCH,
            [[*pinned(rank, "core"), *command] for rank in range(RANKS)],
            ranks=RANKS,
            environments=[{**environment(), **place} for place in places],
        )

    def theirs(self, name: str, length: int, rows: int) -> Contender:
        """Return mlx_lm.lora with ``rows`` of one sequence a step."""
        path = path_of(self.directory, f"{name} {length}").with_suffix(".yaml")
        settings = {
            "model": str(self.model), "data": str(self.data), "train": True,
            "fine_tune_type": "full", "num_layers": -1, "optimizer": "adamw",
            "batch_size": 1, "grad_accumulation_steps": rows, "max_seq_length": length + 1,
            "iters": rows * (self.rounds + 1), "steps_per_report": rows, "val_batches": 1,
            "steps_per_eval": 10**9, "save_every": 10**9, "learning_rate": 1e-5,
            "grad_checkpoint": name == THEIRS_AGAIN, "adapter_path": str(path.with_suffix(".out")),
        }  # fmt: skip
        path.write_text(yaml.safe_dump(settings))
        program = [sys.executable, str(HERE / "_mlx_lm_lora.py"), "-c", str(path)]
        return Contender(name, [[*pinned(0, "core"), *program]], environments=[environment()])

    def wanted(self, name: str) -> bool:
        return not self.options.only or name in self.options.only


def compare(
    arena: Arena, contenders: Iterator[Contender]
) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Return the answers of each contender by turns, and what ours say at their end."""
    with warmed_up(contenders) as running:
        turns = by_turns({each.name: each.turn for each in running}, arena.rounds)
        ours = [each for each in running if each.name not in (TORCH, THEIRS, THEIRS_AGAIN)]
        return turns, {each.name: each.turn()[0] for each in ours}


def seconds_of(answers: Sequence[Any], rows: int) -> float:
    """Return the seconds of a step of ``rows``."""
    (first, *_) = answers
    if "iterations_per_second" in first:
        return rows / float(first["iterations_per_second"])
    return max(float(each["step_seconds"]) for each in answers if each)


def process_peak(turns: Sequence[Sequence[Any]], summary: Any) -> int:
    """Return the peak bytes of the largest process of a contender."""
    if summary:
        return max(int(each["process_peak_bytes"]) for each in summary["ranks"])
    return max(int(each["process_peak_bytes"]) for answers in turns for each in answers)


def mlx_peaks(summary: Any) -> list[int]:
    return [int(each["peak_memory_bytes"]) for each in summary["ranks"]]


def beside(arena: Arena) -> list[tuple[Table, Any]]:
    return [beside_at(arena, int(length)) for length in arena.options.lengths.split(",")]


def beside_at(arena: Arena, length: int) -> tuple[Table, Any]:
    rows = RANKS
    flags = full(length, rows, 1)

    def contenders() -> Iterator[Contender]:
        for name, how in (
            (BASE, WHOLE),
            ("pieces, none", PIECES),
            ("pieces, selective", SELECTIVE),
            ("pieces, full", {"recompute": "full"}),
            ("off, full", {**WHOLE, "recompute": "full"}),
        ):
            if arena.wanted(name):
                yield arena.ours(name, {**flags, **how})
        if arena.wanted(TORCH):
            yield arena.torch(length, rows)
        for name in (THEIRS, THEIRS_AGAIN):
            if arena.wanted(name):
                yield arena.theirs(name, length, rows)

    turns, summaries = compare(arena, contenders())
    base = next(iter(turns))
    seconds = {name: [seconds_of(each, rows) for each in own] for name, own in turns.items()}
    peaks = {name: process_peak(own, summaries.get(name)) for name, own in turns.items()}
    arrays = {name: max(mlx_peaks(summary)) for name, summary in summaries.items()}
    lines = [
        (
            name,
            f"{peaks[name] / MIB:.0f}",
            f"{peaks[name] / peaks[base]:.2f}",
            f"{arrays[name] / MIB:.0f}" if name in arrays else "",
            f"{arrays[name] / arrays[base]:.2f}" if name in arrays and base in arrays else "",
            f"{Spread.of(own):.1f} s",
            f"{Spread.of_ratios(own, seconds[base]):.2f}",
        )
        for name, own in seconds.items()
    ]
    header = ("what", "process peak MiB", "ratio", "arrays MiB", "ratio", "step", "ratio by turns")
    table = Table(f"{length} tokens, ratios to {base}", header, lines)
    return table, {"length": length, "turns": turns, "summaries": summaries}


def short(arena: Arena) -> list[tuple[Table, Any]]:
    lengths = (32,) if arena.options.quick else (128, 256, 512)
    return [short_at(arena, length) for length in lengths]


def short_at(arena: Arena, length: int) -> tuple[Table, Any]:
    """Whole and in pieces, on two ranks and on one."""
    flags = {**full(length, 16, 2), "unfreeze_all": True}
    kinds = {BASE: WHOLE, "pieces": PIECES, "selective": SELECTIVE}
    ranks = dict.fromkeys(kinds, RANKS)
    if length == 256:
        kinds |= {"one rank, off": WHOLE, "one rank, selective": SELECTIVE}
        ranks |= {"one rank, off": 1, "one rank, selective": 1}
    made = (
        arena.ours(name, {**flags, **how}, ranks.get(name, RANKS)) for name, how in kinds.items()
    )
    turns, summaries = compare(arena, made)
    seconds = {name: [seconds_of(each, 16) for each in own] for name, own in turns.items()}
    lines = []
    for name, own in seconds.items():
        times = Spread.of_ratios(own, seconds["one rank, off" if ranks[name] == 1 else BASE])
        peak = max(mlx_peaks(summaries[name]))
        alone = f"one rank, {'selective' if name == 'selective' else 'off'}"
        share = ""
        if ranks[name] == RANKS and alone in summaries:
            share = f"{peak / max(mlx_peaks(summaries[alone])):.3f}"
        goal = {"pieces": 1.01, "selective": 1.04}.get(name)
        reached = verdict(times.median, goal, at_most=True) if goal else ""
        cells = (f"{peak / MIB:.0f}", share, f"{Spread.of(own):.3f} s", f"{times:.3f}", reached)
        lines.append((name, *cells))
    header = ("what", "peak MiB", "of one rank", "step", "against off, by turns", "goal")
    return Table(f"{length} tokens", header, lines), {"turns": turns, "summaries": summaries}


def demo(arena: Arena) -> list[tuple[Table, Any]]:
    """LoRA as in the demo, of which the loss alone is computed in pieces."""
    flags = {
        "model": SMOLLM2, "data": PIRATE, "num_layers": -1, "batch_size": 8, "learning_rate": 1e-5,
        "max_seq_length": 512, "schedule": "zb-v", "micro_batch_size": 1, "recompute": "none",
        "optimizer": "adam",
    }  # fmt: skip
    whole, head = {"attention_chunk": "off", "loss_chunk": "off"}, {"attention_chunk": "off"}
    kinds: dict[str, dict[str, Any]] = {"off": whole, "head": head, "head and attention": {}}
    kinds |= {f"{name}, masked": {**how, "mask_prompt": True} for name, how in kinds.items()}
    arena.steps = 1 if arena.options.quick else 2
    made = (arena.ours(name, {**flags, **how}) for name, how in kinds.items())
    turns, summaries = compare(arena, made)
    speeds = {
        name: [float(answers[0]["tokens_per_second"]) for answers in own]
        for name, own in turns.items()
    }
    lines = []
    for name, own in speeds.items():
        base = "off, masked" if name.endswith("masked") else "off"
        times = Spread.of_ratios(own, speeds[base])
        goal = {"head": 1.03, "head, masked": 1.10}.get(name)
        reached = verdict(times.median, goal) if goal else ""
        peak = max(mlx_peaks(summaries[name]))
        lines.append((name, f"{Spread.of(own):.1f}", f"{times:.3f}", reached, f"{peak / MIB:.0f}"))
    header = ("what", "tokens/s", f"against {BASE}, by turns", "goal", "peak MiB")
    return [(Table("LoRA of SmolLM2-135M, zb-v", header, lines), {"turns": turns})]


def limit(arena: Arena) -> list[tuple[Table, Any]]:
    """A model of 4 layers of 256: small weights, and scores that no limit of 4 GB holds."""
    length = 1024 if arena.options.quick else LONGEST
    nbytes = LIMIT // 10 if arena.options.quick else LIMIT
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4}
    sizes |= {
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "max_position_embeddings": 2 * length,
    }
    model = make_wide(arena.directory / "long", **sizes)
    data = make_long_rows(arena.directory / "long-data", 4, 12 * length)
    flags = {**full(length, RANKS, 1), "model": model, "data": data, "iters": 2, "val_batches": 0}
    flags |= {"steps_per_report": 1, "adapter_path": arena.directory / "out"}
    # Whatever is recomputed.
    whole = {"attention_chunk": "off", "loss_chunk": "off"}
    results, lines = [], []
    for name, how, ranks, group in (
        (BASE, whole, 1, False),
        (BASE, whole, RANKS, False),
        (BASE, whole, RANKS, True),
        ("pieces", {}, RANKS, True),
    ):
        metrics = path_of(arena.directory, f"{name} {ranks} {group}").with_suffix(".jsonl")
        given = {**flags, **how, "metrics_file": metrics, "memory_limit": f"{nbytes}B"}
        words = as_words(given, metrics.with_suffix(".yaml"))
        program = mpirun(ranks, "-m", "shardmlx.train", *words, bind="core")
        found = trained(program, nbytes if group else None, metrics)
        results.append({"what": name, "ranks": ranks, **found})
        where = "--memory-limit, and in one cgroup" if group else "--memory-limit"
        lines.append((name, str(ranks), where, *map(str, found.values())))
        print("  ".join(lines[-1]), flush=True)
    header = ("chunks", "ranks", f"{nbytes} bytes by", "exit status", "said", "cgroup's peak MiB")
    return [(Table(f"{length} tokens", header, lines), results)]


def trained(command: list[str], nbytes: int | None, metrics: Path) -> dict[str, Any]:
    """Run a training, in a cgroup of ``nbytes`` if that is given: how it ended."""
    cgroup, names = _cgroup()
    if nbytes:
        cgroup.mkdir()
        (cgroup / names[0]).write_text(str(nbytes))
        enter = f'echo $$ > {cgroup}/cgroup.procs && exec "$0" "$@"'
        command = ["sh", "-c", enter, *command]
    done = subprocess.run(
        command, env={**os.environ, **environment()}, capture_output=True, text=True, check=False
    )
    peak = f"{int((cgroup / names[1]).read_text()) / MIB:.0f}" if nbytes else ""
    if nbytes:
        cgroup.rmdir()
    said = [line for line in done.stderr.splitlines() if line.startswith("shardmlx: error")]
    if done.returncode == 0:
        reports = events_of(metrics)
        steps = [each for each in reports if each["event"] == "train"]
        peaks = [each["process_peak_bytes"] // MIB for each in reports[-1]["ranks"]]
        said = [
            f"losses {', '.join(format(each['loss'], '.4f') for each in steps)}; "
            f"steps of {', '.join(format(each['step_seconds'], '.0f') for each in steps)} s; "
            f"processes of {'/'.join(map(str, peaks))} MiB"
        ]
    return {"status": done.returncode, "said": "".join(said), "peak": peak}


def _cgroup() -> tuple[Path, tuple[str, str]]:
    """Return the path of a new cgroup, and its files of limit and peak."""
    root, name = Path("/sys/fs/cgroup"), f"shardmlx-{uuid.uuid4().hex}"
    if (root / "cgroup.controllers").exists():
        (root / "cgroup.subtree_control").write_text("+memory")
        return root / name, ("memory.max", "memory.peak")
    return root / "memory" / name, ("memory.limit_in_bytes", "memory.max_usage_in_bytes")


KINDS = {"beside": (beside, 3), "short": (short, 5), "demo": (demo, 5), "limit": (limit, 1)}
"""Comparisons, and how often each contender has its turn."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--lengths", default="2048,4096", help="of beside")
    parser.add_argument("--only", nargs="*", default=[], help="names of contenders")
    parser.add_argument("--torch", default=sys.executable, help="Python that has torch")
    options = parser.parse_args()
    check_prepared()
    if options.quick:
        options.lengths = "64"
    facts = machine()
    work, rounds = KINDS[options.kind]
    with tempfile.TemporaryDirectory() as name:
        arena = Arena(Path(name), options, options.rounds or (1 if options.quick else rounds))
        results = work(arena)
    publish(
        options, facts, [table for table, _ in results], {"results": [each for _, each in results]}
    )


if __name__ == "__main__":
    main()
