"""The training run: what ``mlx_lm.lora`` does, on every rank of the mesh.

What shows in the loss curve is as mlx-lm has it: the order of batches, their padding, when
validation draws its own, how gradients of several steps make one update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.tuner.callbacks import get_reporting_callbacks
from mlx_lm.utils import maybe_set_recommended_wired_limit

from shardmlx.agreement import by_rank_0
from shardmlx.batches import Batch, iterate_batches, split
from shardmlx.comparison import Expected, Lengths, expect, percent
from shardmlx.config import TrainConfig
from shardmlx.environment import Blas
from shardmlx.job import SETUP_SECONDS, Job, prepare_job
from shardmlx.measure import Meter, RankReport
from shardmlx.optimizer import Updater
from shardmlx.report import Bar, Reporter
from shardmlx.saving import Collector, save_adapters, save_model, write_adapter_config
from shardmlx.tables import gigabytes
from shardmlx.trace import Span
from shardmlx.transport import Transport


def run(config: TrainConfig, transport: Transport, blas: Blas) -> None:
    """Train, or test, as rank 0's ``config`` says. Collective.

    Every machine may read an options file of its own: rank 0's is the one that counts. Raises
    ``AgreedError`` on all ranks alike for what the user can mend.
    """
    config = transport.broadcast(config, what="options")
    metrics = Path(config.metrics_file) if config.metrics_file else None
    quiet = transport.rank != 0
    reporter = by_rank_0(transport, "start", lambda: Reporter(metrics)) or Reporter(quiet=quiet)
    try:
        reporter.say(str(blas))
        maybe_set_recommended_wired_limit()
        trainer = Trainer(prepare_job(config, transport, reporter))
        if config.train:
            trainer.train()
        if config.test:
            trainer.test()
    finally:
        reporter.close()


class Trainer:
    """One rank's part of the run. All public methods are collective."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._config = config = job.config
        self._transport = job.transport
        self._reporter = job.reporter
        self._engine = job.engine
        trace = Path(config.trace) if config.trace else None
        self._meter = Meter(job.transport, job.engine.recorder, trace)
        self._updater = Updater(job.optimizer, job.stages)
        self._collector = Collector(job.plan, job.transport, [s.part for s in job.stages])
        # In the place of mlx-lm's np.random: training and validation draw from the same state.
        self._random = np.random.RandomState(config.seed)
        self._losses: list[dict[int, float]] = []
        self._tokens: list[int] = []
        self._lengths = Lengths()
        self._grad_norm: float | None = None
        self._total_tokens = 0
        self._callback: Any = None

    def train(self) -> None:
        """All iterations, with validation, reports and saving in between."""
        config = self._config
        by_rank_0(self._transport, "opening the output", self._open_output)
        batches = self._batches("train", loop=True)
        start = time.monotonic()
        with self._reporter.bar("training", config.iters) as bar:
            for step in range(1, config.iters + 1):
                with self._engine.recorder.span(Span.STEP, f"batch {step}"):
                    (batch,) = self._next(batches, 1)
                self._meter.count(step)
                if step in (1, config.iters) or step % config.steps_per_eval == 0:
                    self._validate(step)
                with self._engine.recorder.span(Span.STEP, f"step {step}"):
                    self._step(step, batch)
                self._meter.count(step)
                bar.advance()
                if self._reports_at(step):
                    self._report(step, bar)
                if step % config.save_every == 0:
                    self._save(f"{step:07d}_adapters.safetensors")
        if config.iters % config.save_every:
            self._save(None)
        self._meter.write_trace()
        self._summarise(time.monotonic() - start)
        self._reporter.say(f"Saved to {config.adapter_path}")

    def test(self) -> None:
        """Loss on the test set."""
        loss = self._evaluate("test", self._config.test_batches, "testing")
        if loss is not None:
            perplexity = math.exp(min(loss, 700.0))
            self._reporter.say(f"Test loss {loss:.3f}, Test ppl {perplexity:.3f}.")
            self._reporter.event("test", {"loss": loss, "perplexity": perplexity})

    def _open_output(self) -> None:
        config = self._config
        if config.fine_tune_type != "full":
            write_adapter_config(Path(config.adapter_path), config.to_adapter_config())
        self._callback = get_reporting_callbacks(
            config.report_to,
            project_name=config.project_name,
            log_dir=config.adapter_path,
            config=config.to_adapter_config(),
        )

    def _batches(self, name: str, *, loop: bool) -> Iterator[Batch] | None:
        """On rank 0, the batches of a data set."""
        if self._job.data is None:
            return None
        return iterate_batches(
            getattr(self._job.data, name),
            self._config.batch_size,
            self._config.max_seq_length,
            self._random,
            loop=loop,
        )

    def _next(self, batches: Iterator[Batch] | None, count: int) -> list[Batch]:
        """The next ``count`` batches of rank 0, fewer at the end, on all ranks."""
        mine = None if batches is None else list(islice(batches, count))
        got: list[Batch] = self._transport.broadcast(mine, what="next batch")
        return got

    def _step(self, step: int, batch: Batch) -> None:
        config, plan = self._config, self._job.plan
        last_of_update = step % config.grad_accumulation_steps == 0
        tokens = batch.valid_tokens
        microbatches = split(batch, plan.mesh.dp, self._engine.replica, plan.micro_batch_size)
        self._lengths.count(microbatches)
        losses = self._engine.train_step(
            microbatches,
            scale=1 / max(1, tokens),
            key=(config.seed, step),
            reduce=last_of_update,
        )
        self._losses.append(losses)
        self._tokens.append(tokens)
        if last_of_update:
            self._update(step)
        if mx.get_cache_memory() > config.clear_cache_threshold:
            mx.clear_cache()

    def _update(self, step: int) -> None:
        """One optimizer update with the mean of the gradients since the last."""
        limit = self._config.max_grad_norm
        scale = 1 / self._config.grad_accumulation_steps
        until_next = range(step, step + self._config.grad_accumulation_steps)
        if limit is not None or any(map(self._reports_at, until_next)):
            self._grad_norm = norm = scale * self._engine.gradient_norm()
            if limit is not None and norm > limit:
                scale *= limit / (norm + 1e-6)
        with self._engine.recorder.span(Span.UPDATE, "optimizer"):
            self._updater.apply(scale)

    def _reports_at(self, step: int) -> bool:
        return step % self._config.steps_per_report == 0 or step == self._config.iters

    def _report(self, step: int, bar: Bar) -> None:
        report = self._meter.report(self._losses)
        steps, tokens = len(self._tokens), sum(self._tokens)
        valid, self._losses, self._tokens = self._tokens, [], []
        self._total_tokens += tokens
        if report is None:
            return
        ranks, losses = report
        loss = (
            sum(
                sum(sum(of_rank[i].values()) for of_rank in losses) / max(1, valid[i])
                for i in range(steps)
            )
            / steps
        )
        step_seconds = ranks[0].times.step_seconds
        speed = tokens / steps / step_seconds
        rate = self._updater.learning_rate
        bar.note(f"loss {loss:.3f}  {speed:.0f} tok/s")
        if not math.isfinite(loss):
            self._reporter.warn(
                f"step {step}: the loss is {loss}: the weights are spoiled; lower --learning-rate"
            )
        self._reporter.say(
            f"step {step}: loss {loss:.4f}, learning rate {rate:.2e}, {speed:.1f} tokens/s, "
            f"{step_seconds:.2f} s a step | " + " | ".join(map(_describe, ranks))
        )
        self._reporter.event(
            "train",
            {
                "step": step,
                "loss": loss,
                "tokens": tokens,
                "tokens_per_second": speed,
                "learning_rate": rate,
                "grad_norm": self._grad_norm,
                "step_seconds": step_seconds,
                "bubble": sum(rank.times.bubble for rank in ranks) / len(ranks),
                "ranks": [rank.as_json() for rank in ranks],
            },
        )
        if self._callback is not None:
            self._callback.on_train_loss_report(
                {
                    "iteration": step,
                    "train_loss": loss,
                    "learning_rate": rate,
                    "iterations_per_second": 1 / step_seconds,
                    "tokens_per_second": speed,
                    "trained_tokens": self._total_tokens,
                    "peak_memory": max(rank.peak_memory_bytes for rank in ranks) / 1e9,
                }
            )

    def _summarise(self, seconds: float) -> None:
        ranks = self._meter.summary()
        if not ranks:
            return
        expected = self._expected()
        pp = self._job.plan.mesh.pp
        predicted = [expected.peaks[each.rank % pp] for each in ranks]
        self._reporter.table(
            (
                "rank",
                "host",
                "step",
                "compute",
                "exposed communication",
                "bubble",
                "peak memory",
                "predicted",
                "",
            ),
            [
                (
                    str(each.rank),
                    self._transport.hosts[each.rank],
                    f"{each.times.step_seconds:.3f} s",
                    f"{each.times.compute_seconds:.3f} s",
                    f"{each.times.exposed_comm_seconds:.3f} s",
                    f"{100 * each.times.bubble:.1f}%",
                    gigabytes(each.peak_memory_bytes),
                    gigabytes(peak),
                    percent(each.peak_memory_bytes, peak),
                )
                for each, peak in zip(ranks, predicted, strict=True)
            ],
        )
        step_seconds = ranks[0].times.step_seconds
        if expected.step_seconds is not None:
            self._reporter.say(
                f"Step: {step_seconds:.3f} s, predicted {expected.step_seconds:.3f} s "
                f"({percent(step_seconds, expected.step_seconds)})"
            )
        self._reporter.event(
            "summary",
            {
                "steps": self._config.iters,
                "tokens": self._total_tokens,
                "seconds": round(seconds, 3),
                "ranks": [each.as_json() for each in ranks],
                "predicted": expected.as_json(),
            },
        )

    def _expected(self) -> Expected:
        """What the plan says of the steps that were run."""
        job = self._job
        return expect(
            job.plan, job.workload, job.cluster, self._lengths, self._config.grad_checkpoint
        )

    def _validate(self, step: int) -> None:
        start = time.monotonic()
        loss = self._evaluate("valid", self._config.val_batches, "validating")
        self._meter.skip(step)
        if loss is None:
            return
        seconds = time.monotonic() - start
        self._reporter.say(f"step {step}: val loss {loss:.4f}, in {seconds:.1f} s")
        self._reporter.event("val", {"step": step, "loss": loss, "seconds": round(seconds, 3)})
        if self._callback is not None:
            self._callback.on_val_loss_report(
                {"iteration": step - 1, "val_loss": loss, "val_time": seconds}
            )

    def _evaluate(self, name: str, num_batches: int, description: str) -> float | None:
        """Mean loss of a token, on rank 0; None elsewhere, and where there is no such data."""
        plan, config = self._job.plan, self._config
        available = self._job.sizes[name] // config.batch_size
        remaining = available if num_batches == -1 else min(num_batches, available)
        if not remaining:
            return None
        # Several batches at once keep all stages busy.
        at_once = -(-4 * plan.mesh.pp // plan.microbatches)
        batches = self._batches(name, loop=False)
        total, tokens = 0.0, 0
        for stage in self._job.stages:
            stage.part.train(False)
        with self._reporter.bar(description, remaining) as bar:
            while remaining:
                group = self._next(batches, min(at_once, remaining))
                losses = self._engine.evaluate(
                    [
                        microbatch
                        for batch in group
                        for microbatch in split(
                            batch, plan.mesh.dp, self._engine.replica, plan.micro_batch_size
                        )
                    ]
                )
                total += sum(losses.values())
                tokens += sum(batch.valid_tokens for batch in group)
                remaining -= len(group)
                bar.advance(len(group))
        for stage in self._job.stages:
            stage.part.train()
        totals = self._transport.gather(total, what=description)
        return None if totals is None else sum(totals) / max(1, tokens)

    def _save(self, copy_as: str | None) -> None:
        """Write what was trained so far, under its final name and, for adapters, as a copy."""
        directory, rank = Path(self._config.adapter_path), self._transport.rank
        # A rank waits until rank 0 has written what comes before.
        with self._transport.patient(SETUP_SECONDS):
            if self._config.fine_tune_type == "full":
                save_model(self._collector, self._job.model_path, directory, rank)
            else:
                save_adapters(self._collector, directory, copy_as, rank)


def _describe(rank: RankReport) -> str:
    memory = gigabytes(rank.peak_memory_bytes)
    return f"rank {rank.rank} {memory}, {100 * rank.times.bubble:.0f}% bubble"
