"""How far predictions are from what is measured: memory of every rank, and time of a step.

    python scripts/bench/prediction.py [--peaks] [--only WORD ...] [--json FILE]

Real runs of ``mpirun -n 2 python -m shardmlx.train``: SmolLM2 and an 8-layer, 512-wide model, LoRA
and full, every schedule. ``shardmlx.profile`` measures each model and kind of training first, on
both ranks at once. The prediction is that of ``train`` itself, from its metrics file. Run it on a
machine that does nothing else: about 25 minutes on two cores.

``--peaks`` measures memory alone: the 8-layer model in equal halves, 1F1B, by length, vocabulary
what is computed again, and whether attention and loss are computed in pieces.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from _compare import mpirun, run
from _models import SMOLLM2, check_prepared, make_long_rows, make_wide
from _training import as_words, events_of

from shardmlx.common.formatting import columns
from shardmlx.common.units import MIB
from shardmlx.config.common_options import AUTO, OFF
from shardmlx.config.specs import FULL, NONE, RECOMPUTE
from shardmlx.pipeline.schedules import SCHEDULES

STEPS, WINDOW = 6, 2
"""Steps of a run, and those that are reported together. The first report is warm-up; of the
others the fastest counts, since whatever disturbs a machine makes it slower."""


@dataclass(frozen=True)
class Work:
    """A model, how it is trained, and sequences of how many tokens."""

    model: str
    fine_tune_type: str
    length: int
    batch_size: int
    micro_batch_size: int
    vocabulary: int = 0
    """Size of the vocabulary, where it is not the model's own."""
    recompute: str = NONE
    chunk: str = AUTO
    """Pieces of attention and of the loss: auto or off."""

    def words(self, data: Path, directory: Path) -> list[str]:
        """Return the options as words of ``train``, some of them in a file in ``directory``."""
        options = {
            "fine_tune_type": self.fine_tune_type, "num_layers": -1, "optimizer": "adamw",
            "batch_size": self.batch_size, "micro_batch_size": self.micro_batch_size,
            # One token more: the last is a target only.
            "max_seq_length": self.length + 1, "data": data, "recompute": self.recompute,
            "attention_chunk": self.chunk, "loss_chunk": self.chunk,
        }  # fmt: skip
        return as_words(options, directory / "options.yaml")


@dataclass(frozen=True)
class Result:
    """Measured / predicted are in seconds and bytes; peaks of both ranks."""

    work: Work
    schedule: str
    layers: Sequence[int]
    step_seconds: float
    predicted_step_seconds: float
    peaks: Sequence[int]
    predicted_peaks: Sequence[int]


WORKS = [
    Work("smollm2", "lora", 128, 8, 1),
    Work("smollm2", "full", 128, 8, 1),
    Work("wide", "lora", 256, 16, 2),
    Work("wide", "full", 256, 16, 2),
]

PEAKS = [
    Work("wide", tune, length, 4, 1, vocabulary, again, AUTO)
    for length, vocabulary, tune, again in product(
        (512, 2048, 4096), (1024, 49152), ("lora", "full"), RECOMPUTE
    )
] + [
    Work("wide", tune, length, 4, 1, vocabulary, again, OFF)
    for length, vocabulary, tune, again in product(
        (512, 2048), (1024, 49152), ("lora", "full"), (NONE, FULL)
    )
]


def run_ranks(arguments: Sequence[object]) -> None:
    run(mpirun(2, "-m", *arguments))


def measure(
    work: Work,
    schedule: str,
    model: Path,
    data: Path,
    directory: Path,
    *more: object,
    steps: int = STEPS,
    window: int = WINDOW,
) -> Result:
    """One run, and what it predicted of itself."""
    metrics = directory / "metrics.jsonl"
    run_ranks(
        [
            "shardmlx.train", "--model", model, *work.words(data, directory),
            "--schedule", schedule, "--iters", steps, "--steps-per-report", window,
            "--val-batches", 0, "--adapter-path", directory / "out", "--metrics-file", metrics,
            *more,
        ]
    )  # fmt: skip
    events = events_of(metrics)
    seconds = [event["step_seconds"] for event in events if event["event"] == "train"]
    summary = events[-1]
    predicted = summary["predicted"]
    return Result(
        work=work,
        schedule=schedule,
        layers=predicted["num_layers"],
        step_seconds=min(seconds[1:]),
        predicted_step_seconds=predicted["step_seconds"],
        peaks=[rank["peak_memory_bytes"] for rank in summary["ranks"]],
        predicted_peaks=predicted["peak_memory_bytes"],
    )


def line(result: Result) -> tuple[str, ...]:
    """One row of the table."""
    work = result.work
    seconds, predicted = result.step_seconds, result.predicted_step_seconds
    cells = [
        f"{work.model} {work.fine_tune_type}",
        result.schedule,
        "/".join(map(str, result.layers)),
        f"{predicted:.3f} s",
        f"{seconds:.3f} s",
        f"{100 * (predicted / seconds - 1):+.1f}%",
    ]
    return (*cells, *peak_cells(result))


def peak_cells(result: Result) -> list[str]:
    """Return the columns of both ranks' peaks."""
    return [
        cell
        for peak, expected in zip(result.peaks, result.predicted_peaks, strict=True)
        for cell in (
            f"{expected / MIB:.0f} MiB",
            f"{peak / MIB:.0f} MiB",
            f"{100 * (expected / peak - 1):+.1f}%",
        )
    ]


def peak_line(result: Result) -> tuple[str, ...]:
    """One row of the table of ``--peaks``."""
    work = result.work
    return (
        str(work.length),
        str(work.vocabulary),
        work.fine_tune_type,
        work.recompute,
        work.chunk,
        *peak_cells(result),
        f"{result.step_seconds:.2f} s",
    )


HEADER_OF_PEAKS = (
    "rank 0 predicted", "measured", "error", "rank 1 predicted", "measured", "error",
)  # fmt: skip
HEADER = (
    "work", "schedule", "layers", "step predicted", "measured", "error", *HEADER_OF_PEAKS,
)  # fmt: skip
HEADER_OF_LENGTHS = (
    "tokens", "vocabulary", "tuning", "recompute", "pieces", *HEADER_OF_PEAKS, "step",
)  # fmt: skip


def compare_all(only: Sequence[str], data: Path, directory: Path) -> list[Result]:
    """Run every work in every schedule, each work after its profile."""
    results = []
    models = {"smollm2": SMOLLM2, "wide": make_wide(directory / "wide")}
    for work in WORKS:
        named = f"{work.model} {work.fine_tune_type}"
        schedules = [each for each in SCHEDULES if has_words(f"{named} {each}", only)]
        if not schedules:
            continue
        model, profile = models[work.model], directory / "profile.json"
        print(f"profile of {work.model}, {work.fine_tune_type} ...", flush=True)
        run_ranks(
            [
                "shardmlx.profile", model, *work.words(data, directory), "-o", profile,
                "--rows", work.micro_batch_size,
                "--lengths", f"{work.length // 2},{work.length}",
            ]
        )  # fmt: skip
        more = ("--partitioner", "balanced", "--profile", profile)
        for schedule in schedules:
            results.append(measure(work, schedule, model, data, directory, *more))
            print("  ".join(line(results[-1])), flush=True)
    return results


def compare_peaks(only: Sequence[str], data: Path, directory: Path) -> list[Result]:
    """Run the work of ``PEAKS``."""
    results = []
    for work in PEAKS:
        named = (
            f"T{work.length} V{work.vocabulary} {work.fine_tune_type} {work.recompute} {work.chunk}"
        )
        if has_words(named, only):
            model = directory / f"wide-{work.vocabulary}"
            if not model.exists():
                make_wide(model, vocab_size=work.vocabulary, max_position_embeddings=8192)
            even = ("--partitioner", "uniform")
            results.append(measure(work, "1f1b", model, data, directory, *even, steps=2, window=1))
            print("  ".join(peak_line(results[-1])), flush=True)
    return results


def has_words(named: str, words: Sequence[str]) -> bool:
    """Return whether every word is one of the name's."""
    return set(words) <= set(named.split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peaks", action="store_true", help="memory by length and vocabulary")
    parser.add_argument("--only", nargs="*", default=[], help="words that a row must contain")
    parser.add_argument("--json", help="write the numbers here")
    options = parser.parse_args()
    check_prepared()
    compare: Callable[[Sequence[str], Path, Path], list[Result]]
    compare, header, cells = compare_all, HEADER, line
    if options.peaks:
        compare, header, cells = compare_peaks, HEADER_OF_LENGTHS, peak_line
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        results = compare(options.only, make_long_rows(directory / "data"), directory)
    print("\n" + columns(header, [cells(result) for result in results]))
    if options.json:
        Path(options.json).write_text(json.dumps(list(map(asdict, results)), indent=1) + "\n")


if __name__ == "__main__":
    main()
