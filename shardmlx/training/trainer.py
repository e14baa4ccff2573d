"""Train on every rank with the loss curve of ``mlx_lm.lora``: the same order of batches, padding,
draws of validation, and mean of gradients over several steps.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Generator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from shardmlx.checkpoint.export import Collector
from shardmlx.common.formatting import plural
from shardmlx.common.reporter import Bar
from shardmlx.config.train import BEST
from shardmlx.distributed.agreement import on_rank_0
from shardmlx.engine.batches import random_state
from shardmlx.engine.engine import Results, Step
from shardmlx.engine.optimizer import Updater
from shardmlx.engine.trace import Meter, Span
from shardmlx.errors import AgreedFailure, Stopped
from shardmlx.loading.rank_setup import SETUP_SECONDS
from shardmlx.training.batch_feed import BatchFeed, Share, StopRequested
from shardmlx.training.checkpointing import ISLAND, Checkpoints, Point
from shardmlx.training.island import Island
from shardmlx.training.losses import Evaluation, Gradients
from shardmlx.training.outputs import Outputs
from shardmlx.training.references import References
from shardmlx.training.report import TrainingReport
from shardmlx.training.scores import in_words
from shardmlx.training.setup import TrainingRun
from shardmlx.training.soundness import TAMER, Best, Fault, Soundness
from shardmlx.training.together import Run, train_together


class Trainer:
    """The part of one rank in the run. All public methods are collective."""

    def __init__(self, job: TrainingRun) -> None:
        planned = job.planned
        self._job = job
        self._plan = planned.plan
        self._options = options = planned.config
        self.place = Path(options.adapter_path)
        self.best = Best()
        self._transport = job.transport
        self._reporter = job.reporter
        self._engine = job.engine
        trace = Path(options.trace) if options.trace else None
        self._meter = Meter(job.transport, job.engine.recorder, trace)
        self._report = TrainingReport(job, self._meter)
        shards, parts = job.engine.shards, [stage.part for stage in job.stages]
        holds = None if shards.weights is None else shards.holds
        collector = Collector(planned.plan, job.transport, parts, holds)
        updater = Updater(job.optimizer, job.stages, shards, masters=options.master_weights)
        self._island: Island | None = None
        if job.membership is not None:
            batch = planned.way.batch
            self._island = Island(job.membership, job.engine, updater, job.reporter, batch)
        self._checkpoints = Checkpoints(job, updater, self._island)
        self._gradients = Gradients(job)
        self._updater = updater
        self._soundness = Soundness(job.transport, job.stages, shards.holds, self._has_moved)
        self.outputs = Outputs(job, collector, self._soundness)
        # Replaces mlx-lm's np.random: training and validation draw from the same state.
        self._random = np.random.RandomState(options.seed)
        self._evaluation = Evaluation(job, self._random)
        self._batches = self._evaluation.batches("train", loop=True)
        self._start = self._done = 0
        self._is_validated = True
        """True until an update comes after the last validation that counts."""
        self._grad_norm: float | None = None
        self._last_share: Share | None = None

    @property
    def tests(self) -> bool:
        """True if the options ask for a test."""
        return self._options.test

    def train(self) -> None:
        """Run all remaining iterations, with validation, reports and saving in between."""
        try:
            train_together([self.steps()])
        finally:
            self._job.release()

    def steps(self) -> Run:
        """Do what ``train`` does, but for the engine's part of each step, which is yielded."""
        options = self._options
        on_rank_0(self._transport, "opening the output", self._open_output)
        self._add_references()
        self._resume()
        how = self._transport.stop_command()
        if how is not None and self._job.resumption.place is not None:
            # After Ctrl-C mpirun leaves its ranks half a second.
            self._reporter.say(f"To stop with a checkpoint: {how}")
        start = time.monotonic()
        try:
            left = options.iters - self._start
            with (
                nullcontext() if self._island is None else self._island.running(self._start),
                self._reporter.bar("training", options.iters, self._start) as bar,
                BatchFeed(
                    self._plan, self._transport, self._batches, left, self._job.number
                ) as feed,
            ):
                for step in range(self._start + 1, options.iters + 1):
                    if not (yield from self._iterate(step, feed, bar)):
                        break
                    self._done = step
        except StopRequested as request:
            name = signal.Signals(request.number).name
            self._reporter.say(f"{name}: saving, then leaving")
            kept = self._keep()
            self._meter.write_trace()
            raise Stopped(request.number, f"stopped by {name}: {kept}") from None
        is_saved = self._save_last()
        self._meter.write_trace()
        self._report.summary(self._done, time.monotonic() - start)
        if is_saved:
            self._reporter.say(f"Saved to {self.outputs.last}")
        self.outputs.say_best()

    def test(self) -> None:
        """Test the weights that the run is for: the best of a run that keeps these."""
        if self._options.train and self._options.keep == BEST and not self.outputs.take_best():
            self._reporter.warn("there are no best weights to be tested: these are the last")
        try:
            found = self._evaluation.loss("test", self._options.test_batches, "testing")
        except StopRequested as request:
            raise Stopped(request.number, "testing was interrupted") from None
        if found is None:
            return
        loss, means = found
        said = in_words(means)
        if self._job.planned.objective is None:
            means = {"perplexity": math.exp(min(loss, 700.0))}
            said = f", Test ppl {means['perplexity']:.3f}"
        self._reporter.say(f"Test loss {loss:.3f}{said}.")
        self._reporter.event("test", {"loss": loss, **means})

    def _open_output(self) -> None:
        self.outputs.make()
        self._report.open_services()

    def _has_moved(self) -> bool:
        """Tell whether a weight of this rank has moved: by an update, or by what the hub gave."""
        return self._updater.has_moved or (self._island is not None and self._island.has_taken)

    def _add_references(self) -> None:
        """Find out what the model says of the answers before its first update, where it matters."""
        objective = self._job.planned.objective
        if objective is None or not objective.facts.has_reference:
            return
        references = References(self._job, swaps=objective.swaps)
        try:
            for name, size in self._job.planned.sizes.items():
                most = self._options.iters if name == "train" else size
                references.complete(name, self._evaluation.batches(name, loop=False), most)
        except StopRequested as request:
            raise Stopped(request.number, "no step was made yet") from None
        self._meter.count(0, is_training=False)

    def _resume(self) -> None:
        found = self._job.resumption.found
        if found is None:
            self._report.start(0)
            return
        manifest = found.manifest
        state = manifest.state
        with self._transport.longer_timeout(SETUP_SECONDS):
            self._checkpoints.restore(found)
        self._start = self._done = manifest.step
        self.best = Best(**state.get("best", {}))
        if "kept" in state or self.best.step is not None:
            self.outputs.restore(state.get("kept"), Best() if "kept" in state else self.best)
        self._is_validated = False
        self._meter.start_after(manifest.step)
        self._report.restore(state["report"])
        if self._batches is not None:
            self._random.set_state(state["random"])
            self._batches.go_to(state["batches"])
        self._checkpoints.go_on_from(found, self._point(manifest.step, self._position()))
        where = found.store.path(manifest.step)
        left = self._options.iters - manifest.step
        self._reporter.go_on()
        self._report.start(manifest.step)
        self._reporter.say(f"Resumed from {where}: {left} of {self._options.iters} steps are left")
        self._reporter.event("resume", {"step": manifest.step, "checkpoint": str(where)})

    def _iterate(
        self, step: int, feed: BatchFeed, bar: Bar
    ) -> Generator[Step, Results | None, bool]:
        """Make a step; return False in its place where validation says that training is over."""
        options = self._options
        self._transport.activity.begin(f"step {step}")
        with self._engine.recorder.span(Span.STEP, f"batch {step}"):
            (share,) = feed.take()
        self._meter.count(step)
        if step in (1, options.iters) or step % options.steps_per_eval == 0:
            if not self._validate(step):
                return False  # nothing is under way yet
            self._transport.activity.begin(f"step {step}")
        if self._island is not None and self._island.ended:
            self._reporter.say(f"step {step}: the hub has ended the run")
            return False
        with self._engine.recorder.span(Span.STEP, f"batch {step}"):
            # The next batch is drawn after the validation's, as in mlx-lm, and travels while this
            # step computes. A checkpoint of this step resumes with it, not with the one after.
            position = self._position()
            feed.send_ahead()
            of_engine = self._gradients.begin(step, share)
        results = yield of_engine
        assert results is not None, "it was yielded to be made"
        self._transport.activity.begin(f"step {step}")
        with self._engine.recorder.span(Span.STEP, f"update {step}"):
            self._last_share = share
            self._report.count(share, self._gradients.add(results))
            if step % options.grad_accumulation_steps == 0:
                self._update(step)
            self._exchange(step, share)
            if mx.get_cache_memory() > options.clear_cache_threshold:
                mx.clear_cache()
        self._meter.count(step)
        bar.advance()
        if step % options.steps_per_report == 0 or step == options.iters:
            self._report.step(step, self._grad_norm, bar)
        if step % options.grad_accumulation_steps == 0:
            self._checkpoints.mark(self._point(step, position))
        self._save_if_due(step)
        self._checkpoints.report()
        return True

    def _update(self, step: int) -> None:
        fault = self._gradients.finish()
        self._grad_norm = norm = self._gradients.norm
        if fault is not None:
            self._pass_over(step, fault)
            return
        if not self._gradients.counted_steps:
            self._gradients.forget()  # the optimizer would go on by its momentum
            return
        scale, limit = self._gradients.scale, self._options.max_grad_norm
        if limit is not None and norm > limit:
            scale *= limit / (norm + 1e-6)
        with (
            self._checkpoints.updating() as updater,
            self._engine.recorder.span(Span.UPDATE, "optimizer"),
        ):
            updater.apply(scale)
        self._gradients.used()
        self._soundness.count(made=True)
        self._is_validated = False

    def _exchange(self, step: int, share: Share) -> None:
        """Report to the hub, and take what came from it, if the run is an island."""
        if self._island is None:
            return
        updates, every = self._options.updates, self._options.grad_accumulation_steps
        is_last = step == updates * every  # no update follows, though steps may
        problem = self._island.after(step, share.valid_tokens, is_last=is_last)
        if problem is not None:
            raise AgreedFailure(f"step {step}: {problem}: {self._keep()}")

    def _pass_over(self, step: int, what: str) -> None:
        """Leave out the steps since the last update, or end the run: ``what`` is not finite."""
        if self._options.on_nan == "stop":
            is_short = self._job.planned.workload.dtype == "float16"
            advice = "give --dtype bfloat16" if is_short else "lower --learning-rate"
            advice += ", or pass over such steps with on_nan: skip"
            raise AgreedFailure(f"step {step}: {what}: {self._keep()}; {advice}")
        self._soundness.count(made=False)
        if self._soundness.is_lost:
            raise AgreedFailure(f"step {step}: {what}: {self._keep()}; {TAMER}")
        self._reporter.warn(f"step {step}: {what}: the update is skipped")
        self._gradients.forget()
        self._report.pass_over(self._options.grad_accumulation_steps)

    def _position(self) -> dict[str, Any]:
        """Return, on rank 0, the position of the next batches."""
        if self._batches is None:
            return {}
        return {"random": random_state(self._random), "batches": self._batches.position()}

    def _point(self, step: int, position: Mapping[str, Any]) -> Point:
        """Return the run after the update of ``step``; batches from ``position`` are to come."""
        state = {
            "report": self._report.state(),
            "best": asdict(self.best),
            "kept": self.outputs.state(),
            **({} if self._island is None else {ISLAND: self._island.state()}),
            **position,
        }
        return Point(step, state)

    def _fault(self) -> Fault | None:
        """Return why the present weights should replace nothing; None if they may.

        If steps may be skipped, the last batch is tried with the weights: a run whose weights give
        no finite loss any more would otherwise save them until it has skipped most of its steps.
        """
        fault = self._soundness.fault()
        if fault is None and self._job.resumption.found is None:
            fault = self._soundness.unmoved()
        share = self._last_share
        if fault is not None or self._options.on_nan == "stop" or share is None:
            return fault
        if self._evaluation.is_finite(share):
            return None
        return Fault("with its weights the loss of the last batch is not finite", TAMER)

    def _save_if_due(self, step: int) -> None:
        saves, checkpoints = (
            step % every == 0
            for every in (self._options.save_every, self._options.checkpoint_every)
        )
        if not (saves or checkpoints):
            return
        if (fault := self._fault()) is not None:
            what = f"step {step}: {fault.problem}"
            self._reporter.warn(f"{what}: nothing is saved, what was before stays")
            return
        if saves:
            self.outputs.save(f"{step:07d}_adapters.safetensors")
        if checkpoints:
            self._checkpoints.save()

    def _save_last(self) -> bool:
        """Save the last step unless it should replace nothing; tell whether the output has it."""
        options = self._options
        fault = self._fault()
        if fault is not None:
            raise AgreedFailure(f"step {self._done}: {self._keep()}; {fault.remedy}")
        is_saved = self._done % options.save_every == 0 and self._soundness.unmoved() is None
        is_saved = is_saved or self.outputs.save()
        self._checkpoints.save()
        self._checkpoints.finish()
        return is_saved

    def _keep(self) -> str:
        """Save the last update if it is worth it, and return a sentence about its place."""
        fault = self._fault()
        if fault is not None:
            self._checkpoints.finish()
            return f"{fault.problem}: nothing more is saved, what was in {self.outputs.last} stays"
        step = self._checkpoints.save()
        self._checkpoints.finish()
        self.outputs.save()
        if step is None:
            return f"what was trained before is in {self.outputs.last}"
        place = self._job.resumption.place
        assert place is not None, "it was saved there"
        return f"the run up to step {step} is in {place.store.path(step)}"

    def _validate(self, step: int) -> bool:
        """Return False where training is over, since no validation got better any more."""
        if self._island is not None and not self._island.evaluates:
            return True
        start, options = time.monotonic(), self._options
        found = self._evaluation.loss("valid", options.val_batches, "validating")
        self._meter.count(step, is_training=False)
        if found is not None:
            self._report.validation(step, found, time.monotonic() - start)
        loss: float | None = self._transport.broadcast(found and found[0], what="the loss")
        if self._is_validated or not self._is_trained():
            return True  # there is nothing to choose from: the weights are those of before
        self._is_validated = True
        self.best = self.best.after(step, loss)
        if loss is not None and self.outputs.is_best(loss) and self._fault() is None:
            self.outputs.keep_best(step, loss)
        if options.early_stop is None or self.best.misses < options.early_stop:
            return True
        self._reporter.say(
            f"step {step}: the last {plural(self.best.misses, 'validation')} had no better loss "
            f"than {self.best.loss:.4f} before step {self.best.step}: training stops"
        )
        return False

    def _is_trained(self) -> bool:
        """Tell whether the weights are others than those that a new run would begin with."""
        return self._job.resumption.found is not None or self._soundness.unmoved() is None
