"""Carry out ``shardmlx train``: open the viewers of a run, then train, test, or print the plan."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np

from shardmlx.common.environment import Blas
from shardmlx.common.formatting import plural
from shardmlx.common.http_listener import bind
from shardmlx.common.reporter import Listener, Reporter
from shardmlx.config.train import TrainConfig
from shardmlx.distributed.agreement import on_rank_0
from shardmlx.distributed.transport import Transport
from shardmlx.engine.batches import WANTED, token_ids
from shardmlx.loading.tokenizer import read_tokenizer
from shardmlx.training.planned_run import PlannedRun, open_for_training, plan_run, read_sets
from shardmlx.training.setup import TrainingRun, load_run, show_ranks
from shardmlx.training.sweep import plan_sweep, train_sweep
from shardmlx.training.trainer import Trainer


def train_model(
    config: TrainConfig, transport: Transport, *, on_event: Listener | None = None
) -> None:
    """Train a model, or test it, as ``config`` says. All ranks must call it.

    Rank 0's ``config`` counts. Adapters or weights are saved in its ``adapter_path``. ``on_event``
    is called on rank 0 with the name and the values of each report, as in ``metrics_file``. Raises
    ``AgreedError``, a ``UserError``, on all ranks for the user's mistakes, before weights are read;
    ``Stopped`` after a signal, when all is saved; ``AgreedFailure`` if the run itself cannot go on;
    ``TransportError`` and ``EngineError`` if a rank is lost or fails.
    """
    run(transport.broadcast(config, what="options"), transport, on_event=on_event)


def run(
    config: TrainConfig,
    transport: Transport,
    blas: Blas | None = None,
    *,
    on_event: Listener | None = None,
) -> None:
    """Train for the command, and print the computing device first. All ranks must call it."""
    with ExitStack() as stack:
        reporter = on_rank_0(
            transport, "opening the report", partial(_open_viewers, config, on_event, stack)
        ) or Reporter(quiet=True)
        if blas is not None:
            reporter.say(str(blas))
        transport.activity.begin("loading")
        if config.show_data is not None:
            show_data(config, config.show_data, transport, reporter)
            return
        if config.dry_run:
            dry_run(config, transport, reporter)
            return
        if config.sweep is not None:
            train_sweep(config, transport, reporter)
            return
        trainer = Trainer(prepare_training(config, transport, reporter))
        if config.train:
            trainer.train()
        if config.test:
            trainer.test()


def prepare_training(config: TrainConfig, transport: Transport, reporter: Reporter) -> TrainingRun:
    """Check everything on all ranks, then load. Collective; raises ``AgreedError``."""
    with open_for_training(config, transport, reporter) as opened:
        planned = plan_run(config, transport, reporter, opened)
        return load_run(planned, transport, reporter, opened)


def dry_run(config: TrainConfig, transport: Transport, reporter: Reporter) -> None:
    """Print the plan of a run, with the errors of one, and read no weight. Collective."""
    with open_for_training(config, transport, reporter) as opened:
        if config.sweep is None:
            planned = plan_run(config, transport, reporter, opened)
        else:
            planned, *_ = plan_sweep(config, transport, reporter, opened)
    show_ranks(planned, transport.hosts, reporter, {})
    if config.train:
        reporter.say(_time(planned))
        for what, place in (
            ("the model" if config.is_full else "adapters", config.adapter_path),
            ("checkpoints", config.checkpoint_dir),
            ("metrics", config.metrics_file),
            ("a trace", config.trace),
        ):
            if place is not None:
                is_there = ", which is there" if Path(place).exists() else ""
                reporter.say(f"Would write {what} to {place}{is_there}")
    reporter.say("Dry run: nothing was loaded or written")


def show_data(config: TrainConfig, rows: int, transport: Transport, reporter: Reporter) -> None:
    """Print rows of the training set as the model sees them. Collective."""
    with open_for_training(config, transport, reporter) as opened:

        def show() -> None:
            tokenizer = read_tokenizer(opened.path, config.trust_remote_code, opened.config)
            samples = read_sets(config, opened, reporter).train[: rows * config.together]
            for i, (given, start) in enumerate(samples):
                tokens = np.asarray(given)[: config.max_seq_length]
                counts = (np.arange(len(tokens)) >= max(1, start)) & (tokens >= 0)
                what = ""
                if samples.known is not None:
                    what = ", chosen" if samples.known[i, WANTED] else ", rejected"
                total, row = plural(len(tokens), "token"), i // config.together + 1
                reporter.say(f"row {row}{what}: {total}, {counts.sum()} count in the loss")
                # Runs of tokens that count, and that do not.
                ends = np.flatnonzero(np.diff(counts)) + 1
                runs = np.split(token_ids(tokens), ends), np.split(counts, ends)
                reporter.say_marked(
                    (tokenizer.decode(ids.tolist()), bool(counted[0]))
                    for ids, counted in zip(*runs, strict=True)
                )

        on_rank_0(transport, "reading the data", show)


def _time(planned: PlannedRun) -> str:
    step, iters = planned.seconds(planned.mean_length), planned.config.iters
    if step is None:
        return (
            "Time of a step: not known: measure it with shardmlx profile, and give --profile, or "
            "write flops= into the lines of --hostfile"
        )
    is_measured = planned.cluster.profile is not None
    source = "measured times" if is_measured else "the FLOP/s of the hostfile, an estimate"
    return (
        f"Time of a step: {step:.3g} s, of {iters} steps {timedelta(seconds=round(step * iters))}, "
        f"predicted from {source}; validation and saving come on top"
    )


def _open_viewers(config: TrainConfig, on_event: Listener | None, stack: ExitStack) -> Reporter:
    """Return the reporter of metrics file and live page; the stack closes the page."""
    listeners = [] if on_event is None else [on_event]
    page = None
    if config.metrics_port is not None:
        # Its servers and clients take a tenth of a second to import.
        from shardmlx.runreport.live import LivePage

        listener = bind(config.metrics_host, config.metrics_port, "--metrics-")
        page = LivePage(listener, config.metrics_file)
        stack.callback(page.close)
        listeners.append(page.take)
    metrics = Path(config.metrics_file) if config.metrics_file else None
    reporter = Reporter(metrics, listeners=listeners)
    if page is not None:
        reporter.say(f"The run at {page.address}")
    return reporter
