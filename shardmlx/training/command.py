"""Carry out ``shardmlx train``: open the viewers of a run, then train, test, or print the plan."""

from __future__ import annotations

from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path

import numpy as np

from shardmlx.common.environment import Blas
from shardmlx.common.formatting import plural
from shardmlx.common.http_listener import bind
from shardmlx.common.reporter import Listener, Reporter
from shardmlx.config.train import TrainConfig
from shardmlx.distributed.crew import Crew, lead
from shardmlx.distributed.transport import Transport
from shardmlx.engine.batches import WANTED, token_ids
from shardmlx.loading.rank_setup import OpenedModel
from shardmlx.loading.tokenizer import read_tokenizer
from shardmlx.runreport.services import LoggedRun, RunServices, is_orderly
from shardmlx.training.load_run import load_run, show_ranks
from shardmlx.training.plan_run import PlannedRun, open_for_training, plan_run, read_sets
from shardmlx.training.run_warnings import warn_of
from shardmlx.training.sample_set import SampleSet
from shardmlx.training.sweep import plan_sweep, prepare_sweep
from shardmlx.training.train import train
from shardmlx.training.worker import TrainWorker


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
    run(config, transport, on_event=on_event)


def run(
    config: TrainConfig,
    transport: Transport,
    blas: Blas | None = None,
    *,
    on_event: Listener | None = None,
) -> None:
    """Train for the command, and print the computing device first. On all ranks."""
    with ExitStack() as stack:

        def work(crew: Crew[TrainWorker]) -> None:
            reporter = _open_viewers(config, on_event, stack)
            crew.worker.report_to(reporter)
            if blas is not None:
                reporter.say(str(blas))
            _carry_out(config, crew, reporter, stack)

        worker = TrainWorker(transport, Reporter(quiet=True))
        with closing(worker):
            lead(transport, worker, work)


def _carry_out(
    config: TrainConfig, crew: Crew[TrainWorker], reporter: Reporter, stack: ExitStack
) -> None:
    if config.sets.show_data is not None:
        open_for_training(config, crew, reporter)
        show_data(config, config.sets.show_data, crew.worker.opened, reporter)
        return
    if config.dry_run:
        dry_run(config, crew, reporter)
        return
    if config.sweep is not None:
        prepare_sweep(config, crew, reporter)
    else:
        prepare_training(config, crew, reporter)
    if config.services:
        _open_services(config, reporter, stack)
    train(crew)


def _open_services(config: TrainConfig, reporter: Reporter, stack: ExitStack) -> None:
    """Tell the services of ``--report-to`` of the run from here on; the stack closes them. Raises
    ``UserError``."""
    run = LoggedRun(
        name=Path(config.adapter_path).name,
        project=config.project_name,
        directory=Path(config.adapter_path),
        options=config.to_adapter_config(),
    )
    services = RunServices(config.services, run, reporter)
    reporter.listen(services.take)

    def close(kind: object, error: BaseException | None, trace: object) -> None:
        # A lost rank ends the job at once: no service is waited for.
        if is_orderly(error):
            services.close(config.metrics_file)

    stack.push(close)


def prepare_training(config: TrainConfig, crew: Crew[TrainWorker], reporter: Reporter) -> None:
    """Check everything, then load the run on all ranks. On rank 0. Raises ``UserError``."""
    open_for_training(config, crew, reporter)
    planned = plan_run(config, crew, reporter)
    warn_of(planned.config, planned.job.mesh.dp, reporter)
    load_run(crew, planned, reporter)


def dry_run(config: TrainConfig, crew: Crew[TrainWorker], reporter: Reporter) -> None:
    """Print the plan of a run, with the errors of one, and read no weight. On rank 0."""
    open_for_training(config, crew, reporter)
    if config.sweep is None:
        planned = plan_run(config, crew, reporter)
        for each in (planned.data.train, planned.data.valid, planned.data.test):
            look_at_all(each, reporter)
        warn_of(planned.config, planned.job.mesh.dp, reporter)
    else:
        planned = plan_sweep(config, crew, reporter).whole
    show_ranks(planned.job, crew.transport.hosts, reporter, {})
    if config.tune.train:
        reporter.say(_time(planned))
        for what, place in (
            ("the model" if config.tune.is_full else "adapters", config.adapter_path),
            ("checkpoints", config.checkpoints.checkpoint_dir),
            ("metrics", config.metrics_file),
            ("a trace", config.trace),
        ):
            if place is not None:
                is_there = ", which is there" if Path(place).exists() else ""
                reporter.say(f"Would write {what} to {place}{is_there}")
    reporter.say("Dry run: nothing was loaded or written")


def look_at_all(samples: SampleSet, reporter: Reporter) -> None:
    """Make tokens of all samples of a set, and print what comes up. Raises ``UserError``."""
    if not samples.is_complete:
        for i in reporter.track(f"tokenising {samples.name}", range(len(samples))):
            _ = samples[i]
        for text in samples.news():
            reporter.warn(text)


def show_data(config: TrainConfig, rows: int, opened: OpenedModel, reporter: Reporter) -> None:
    """Print rows of the training set as the model sees them. Raises ``UserError``."""
    tokenizer = read_tokenizer(opened.path, config.sets.trust_remote_code, opened.config)
    data = read_sets(config, opened, reporter).train
    samples = data[: rows * config.loss.together]
    for i, (given, start) in enumerate(samples):
        tokens = np.asarray(given)[: config.batch.max_seq_length]
        counts = (np.arange(len(tokens)) >= max(1, start)) & (tokens >= 0)
        what = ""
        if samples.known is not None:
            what = ", chosen" if samples.known[i, WANTED] else ", rejected"
        total = plural(len(tokens), "token")
        row = i // config.loss.together + 1
        reporter.say(f"row {row}{what}: {total}, {counts.sum()} count in the loss")
        # Runs of tokens that count, and that do not.
        ends = np.flatnonzero(np.diff(counts)) + 1
        runs = np.split(token_ids(tokens), ends), np.split(counts, ends)
        reporter.say_marked(
            (tokenizer.decode(ids.tolist()), bool(counted[0]))
            for ids, counted in zip(*runs, strict=True)
        )


def _time(planned: PlannedRun) -> str:
    step = planned.seconds()
    iters = planned.config.iters
    if step is None:
        return (
            "Time of a step: not known: measure it with shardmlx profile, and give --profile, or "
            "write flops= into the lines of --hostfile"
        )
    is_measured = planned.job.cluster.profile is not None
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
    stack.callback(reporter.close)
    if page is not None:
        reporter.say(f"The run at {page.address}")
    return reporter
