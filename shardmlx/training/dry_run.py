"""Print a training run without running it: its plan, its time, and its output files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardmlx.common.reporter import Reporter
from shardmlx.config.train import TrainConfig
from shardmlx.costmodel.predict import predict
from shardmlx.distributed.transport import Transport
from shardmlx.training.plan import PLANNED, layers_of, planned_columns
from shardmlx.training.planned_run import PlannedRun, open_for_training, plan_run

_MINUTE, _HOUR = 60.0, 3600.0


def dry_run(config: TrainConfig, transport: Transport, reporter: Reporter) -> None:
    """Make the plan of a run as a run does, and print it. No weight is read, nothing is written.

    All ranks must call it. Raises ``AgreedError`` where a run would.
    """
    with open_for_training(config, transport, reporter) as opened:
        planned = plan_run(config, transport, reporter, opened)
    limits = planned.limits
    reporter.table(
        ("rank", "host", "layers", *PLANNED),
        [
            (
                str(rank),
                host,
                layers_of(planned.plan, rank),
                *planned_columns(limits[rank]),
            )
            for rank, host in enumerate(transport.hosts)
        ],
    )
    if planned.config.train:
        reporter.say(_time(planned))
    for line in _files(planned.config):
        reporter.say(line)
    reporter.say("Dry run: nothing was loaded or written")


def _time(planned: PlannedRun) -> str:
    """Return the predicted time of a step and of the run."""
    cluster, config = planned.inputs.cluster, planned.config
    if cluster.unit != "seconds":
        return (
            "Time of a step: not known: measure it with shardmlx profile, and give --profile, or "
            "write flops= into the lines of --hostfile"
        )
    step = predict(
        planned.plan,
        planned.inputs.sizes,
        cluster,
        planned.mean_length,
        recompute=planned.inputs.sizes.batch.recomputed,
    ).step_seconds
    source = "measured times" if cluster.profile else "the FLOP/s of the hostfile, an estimate"
    return (
        f"Time of a step: {step:.3g} s, of {config.iters} steps {_words(step * config.iters)}, "
        f"predicted from {source}; validation and saving come on top"
    )


def _words(seconds: float) -> str:
    if seconds < 2 * _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    return f"{seconds / _HOUR:.1f} h"


def _files(config: TrainConfig) -> Iterator[str]:
    """Yield a line for each output of the run, on rank 0 unless it says more."""
    if not config.train:
        return
    what = "the model" if config.fine_tune_type == "full" else "adapters"
    yield f"Would write {what} to {_place(config.adapter_path)}, every {config.save_every} steps"
    if config.checkpoint_dir is not None:
        yield (
            f"Would write checkpoints to {_place(config.checkpoint_dir)}, every "
            f"{config.checkpoint_every} steps, and keep {config.keep_checkpoints} "
            f"(--checkpoint-storage {config.checkpoint_storage})"
        )
    else:
        yield "Would write no checkpoints: give --checkpoint-dir to resume a run"
    for name, file in (("metrics", config.metrics_file), ("a trace", config.trace)):
        if file is not None:
            yield f"Would write {name} to {_place(file)}"


def _place(path: str) -> str:
    there = ", which is there" if Path(path).exists() else ""
    return f"{path}{there}"
