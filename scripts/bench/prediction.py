"""How far predictions are from what is measured on two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from scripts.bench.benchmark import Bench, Benchmark, beside, run
from scripts.bench.trained import (
    TINY,
    as_words,
    demo_lacks,
    demo_model,
    make_long_rows,
    make_wide,
    of_kind,
    trained,
)
from shardmlx.common.units import MIB
from shardmlx.config.specs import NONE
from shardmlx.pipeline.schedules import SCHEDULES
from testbed.jobs import ranks_command

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

    @property
    def options(self) -> dict[str, object]:
        """Return the options of ``train``; one token more is a target only."""
        return {
            "fine_tune_type": self.fine_tune_type, "num_layers": -1, "optimizer": "adamw",
            "batch_size": self.batch_size, "micro_batch_size": self.micro_batch_size,
            "max_seq_length": self.length + 1, "recompute": NONE,
        }  # fmt: skip


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


def measure(bench: Bench, work: Work, schedule: str, options: dict[str, object]) -> Result:
    """Return what a run took, and what it predicted of itself."""
    how: dict[str, object] = {"schedule": schedule, "pipeline_stages": 2, "val_batches": 0}
    how |= {"iters": STEPS, "steps_per_report": WINDOW}
    told = trained(bench, "run", {**work.options, **how, **options})
    seconds = [event["step_seconds"] for event in of_kind(told, "train")]
    summary = told[-1]
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
    """Return a row of the table."""
    work = result.work
    predicted = result.predicted_step_seconds
    return (
        f"{work.model} {work.fine_tune_type}",
        result.schedule,
        "/".join(map(str, result.layers)),
        f"{predicted:.3f} s",
        f"{result.step_seconds:.3f} s",
        beside(result.step_seconds, predicted),
        *peak_cells(result),
    )


def peak_cells(result: Result) -> list[str]:
    """Return the columns of both ranks' peaks."""
    return [
        cell
        for peak, expected in zip(result.peaks, result.predicted_peaks, strict=True)
        for cell in (
            f"{expected / MIB:.0f} MiB",
            f"{peak / MIB:.0f} MiB",
            beside(peak, expected),
        )
    ]


RANKS = ("rank 0 predicted", "measured", "error", "rank 1 predicted", "measured", "error")


def prediction(bench: Bench) -> None:
    """How far predictions are from what is measured: memory of every rank, and time of a step.

    Real runs of ``mpirun -n 2 python -m shardmlx.train``: SmolLM2 and an 8-layer, 512-wide model,
    LoRA and full, every schedule. ``shardmlx.profile`` measures each model and kind of training
    first, on both ranks at once. The prediction is that of ``train`` itself, from its metrics file.
    Run it on a machine that does nothing else: about 25 minutes on two cores.
    """
    data = make_long_rows(bench.directory / "data")
    sizes = TINY if bench.quick else {}
    models = {"smollm2": demo_model(bench), "wide": make_wide(bench.directory / "wide", **sizes)}
    results = []
    for work in WORKS:
        named = f"{work.model} {work.fine_tune_type}"
        schedules = [each for each in SCHEDULES if bench.wants(f"{named} {each}")]
        if not schedules:
            continue
        given = {"model": models[work.model], "data": data}
        profile = bench.path("profile.json")
        words = as_words({**work.options, "data": data}, bench.path("profile.yaml"))
        words += ["--rows", str(work.micro_batch_size), "-o", str(profile)]
        words += ["--lengths", f"{work.length // 2},{work.length}"]
        run(ranks_command(2, "-m", "shardmlx.profile", models[work.model], *words))
        how = {**given, "partitioner": "balanced", "profile": profile}
        for schedule in schedules[:1] if bench.quick else schedules:
            results.append(measure(bench, work, schedule, how))
            bench.say("  ".join(line(results[-1])))
    bench.keep(results=list(map(asdict, results)))
    header = ("work", "schedule", "layers", "step predicted", "measured", "error", *RANKS)
    bench.show("Predicted and measured", header, list(map(line, results)))


PREDICTION = Benchmark("prediction", prediction, needs=[demo_lacks])
