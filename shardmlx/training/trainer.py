"""Train with the loss curve of ``mlx_lm.lora``: the same order of batches, padding, draws of
validation, and mean of gradients over several steps. Rank 0's part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from shardmlx.common.environment import signal_name
from shardmlx.common.formatting import plural
from shardmlx.common.reporter import Bar
from shardmlx.config.train import BEST
from shardmlx.distributed.crew import Crew
from shardmlx.engine.batches import random_state
from shardmlx.engine.trace import write_chrome_trace
from shardmlx.errors import AgreedFailure, Stopped, file_access, one_line
from shardmlx.islands.island import Island, NoExchange, WeightExchange
from shardmlx.islands.shared_weights import SharedWeights
from shardmlx.training.checkpointing import Checkpoints, Point
from shardmlx.training.evaluation import Evaluation, StopRequested
from shardmlx.training.loss_scale import LOSS_SCALE, LossScale
from shardmlx.training.outputs import Outputs
from shardmlx.training.references import References
from shardmlx.training.report import StepResult, TrainingReport
from shardmlx.training.rows import Rows, rows_of_ranks
from shardmlx.training.run_worker import RunWorker, StepOrder
from shardmlx.training.sample_set import RowError
from shardmlx.training.scores import in_words
from shardmlx.training.snapshots import ISLAND
from shardmlx.training.soundness import TAMER, Best, Fault, Soundness


class Trainer:
    """A run, as rank 0 leads it: ``start``, then ``next_order`` and ``take`` for each step, and
    ``finish``, or ``stop``; ``close`` at last."""

    def __init__(self, crew: Crew[RunWorker]) -> None:
        self._crew = crew
        self._run = run = crew.worker.run
        self._plan = run.training.plan
        self._options = options = run.config
        self._reporter = run.reporter
        self.place = Path(options.adapter_path)
        self.best = Best()
        self._report = TrainingReport(crew)
        self._checkpoints = Checkpoints(crew)
        self._soundness = Soundness(crew)
        self.outputs = Outputs(crew, self._soundness)
        # Replaces mlx-lm's np.random: training and validation draw from the same state.
        self._random = np.random.RandomState(options.seed)
        self._evaluation = Evaluation(crew, self._random)
        self._batches = self._evaluation.batches("train", loop=True)
        self._drawn = self._evaluation.draw("train", self._batches)
        self._position: dict[str, Any] = {}
        """The position of the batches that follow the step that is under way."""
        self._done = 0
        self._is_validated = True
        """True until an update comes after the last validation that counts."""
        self._is_sent_ahead = False
        self._exchange = exchange_of(crew)
        self._loss_scale = LossScale.of(options.loss_scale)
        self._tokens = 0
        """Tokens that count in the steps since the last update."""
        self._grad_norm: float | None = None
        self._stack = ExitStack()
        self._bar: Bar | None = None
        self._began = 0.0

    @property
    def tests(self) -> bool:
        """True if the options ask for a test."""
        return self._options.sets.test

    def start(self) -> None:
        """Get ready for the first step. Raises ``UserError``, and ``Stopped``."""
        self._add_references()
        self._resume()
        how = self._crew.transport.stop_command()
        if how is not None and self._run.resumption.place is not None:
            # After Ctrl-C mpirun leaves its ranks half a second.
            self._reporter.say(f"To stop with a checkpoint: {how}")
        self._began = time.monotonic()
        self._stack.callback(self._exchange.leave)
        self._exchange.begin(self._done)
        bar = self._reporter.bar("training", self._options.iters, self._done)
        self._bar = self._stack.enter_context(bar)

    def next_order(self) -> list[StepOrder] | None:
        """Return the next step for each rank, after the validation before it, if one is due; None
        if training is over. Raises ``StopRequested``; for a row that cannot be used
        ``AgreedFailure``, or before any step ``RowError``."""
        try:
            return self._next_order()
        except RowError as error:
            if not self._done:
                raise
            problem = f"step {self._done + 1}: {error.problem}: {self._keep()}"
            remedy = error.remedy
            if self._run.resumption.place is not None:
                remedy = (
                    f"{remedy}; a checkpoint is resumed with the same rows only: with others, "
                    f"start from what is in {self.outputs.last}"
                )
            raise AgreedFailure(f"{problem}; {remedy}") from None

    def _next_order(self) -> list[StepOrder] | None:
        step = self._done + 1
        options = self._options
        if step > options.iters:
            return None
        number = self._crew.transport.stop_requested()
        if number is not None:
            raise StopRequested(number)
        nobody = [None] * self._crew.size
        rows: list[Rows | None] = [*nobody]
        if not self._is_sent_ahead:
            rows = self._draw(step)
        is_due = step in (1, options.iters) or step % options.steps_per_eval == 0
        if is_due and not self._validate(step):
            return None
        if self._exchange.ended:
            self._reporter.say(f"step {step}: the hub has ended the run")
            return None
        # The next batch is drawn after the validation's, as in mlx-lm, and travels with this step,
        # to be there when the next one begins. A checkpoint of this step resumes with it.
        if self._checkpoints.have_place:
            self._position = self._present_position()
        following: list[Rows | None] = [*nobody]
        self._is_sent_ahead = step < options.iters
        if self._is_sent_ahead:
            following = self._draw(step + 1)
        orders: dict[tuple[int, int], StepOrder] = {}
        factor = self._loss_scale.factor
        return [
            orders.setdefault((id(own), id(after)), StepOrder(step, own, after, factor))
            for own, after in zip(rows, following, strict=True)
        ]

    def _draw(self, step: int) -> list[Rows | None]:
        """Return the rows of a step for each rank."""
        with self._crew.worker.spending(f"batch {step}"):
            return [*rows_of_ranks(self._plan, next(self._drawn))]

    def take(self, result: StepResult) -> None:
        """Take in the step that was made: report it, and save what is due. Raises
        ``AgreedFailure`` if the run cannot go on."""
        step = self._done + 1
        options = self._options
        ends_update = step % options.batch.grad_accumulation_steps == 0
        self._report.count(result)
        if ends_update:
            self._count_update(step, result)
        self._tokens += result.own.valid_tokens
        if ends_update:
            problem = self._exchange.after_update(step, self._tokens)
            self._tokens = 0
            if problem is not None:
                raise AgreedFailure(f"step {step}: {problem}: {self._keep()}")
        if self._bar is not None:
            self._bar.advance()
            if step % options.steps_per_report == 0 or step == options.iters:
                scale = self._loss_scale if self._options.loss_scale is not None else None
                self._report.step(step, self._grad_norm, scale, self._bar)
        if ends_update and self._checkpoints.have_place:
            self._checkpoints.mark(self._point(step, self._position))
        self._save_if_due(step)
        self._checkpoints.report()
        self._done = step

    def finish(self) -> None:
        """Save what was trained, and sum the run up. Raises ``AgreedFailure`` if it is not worth
        it."""
        self._close_bar()
        is_saved = self._save_last()
        self._write_trace()
        self._report.summary(self._done, time.monotonic() - self._began)
        if is_saved:
            self._reporter.say(f"Saved to {self.outputs.last}")
        self.outputs.say_best()

    def stop(self, number: int) -> Stopped:
        """Save what there is after the signal ``number``; return what is to be raised."""
        name = signal_name(number)
        self._reporter.say(f"{name}: saving, then leaving")
        self._close_bar()
        stopped = Stopped(number, f"stopped by {name}: {self._keep()}")
        self._write_trace()
        self._tell_stop(str(stopped), name)
        return stopped

    def fail(self, failure: AgreedFailure) -> None:
        """Tell of the failure that ends the run, but no other."""
        self._tell_stop(one_line(failure), None)

    def _tell_stop(self, reason: str, name: str | None) -> None:
        """Write to the metrics that the run came to no end: a signal of this name stopped it, or
        it failed."""
        self._reporter.event("stop", {"step": self._done, "signal": name, "reason": reason})

    def close(self) -> None:
        """Let go of all that the run holds on rank 0. May be called again."""
        self._stack.close()

    def test(self) -> None:
        """Test the weights that the run is for: the best of a run that keeps these."""
        if self._options.tune.train and self._options.keep == BEST and not self.outputs.take_best():
            self._reporter.warn("there are no best weights to be tested: these are the last")
        try:
            found = self._evaluation.loss("test", self._options.test_batches, "testing")
        except StopRequested as request:
            raise Stopped(request.number, "testing was interrupted") from None
        if found is None:
            return
        loss, means = found
        said = in_words(means)
        if self._run.objective is None:
            means = {"perplexity": math.exp(min(loss, 700.0))}
            said = f", Test ppl {means['perplexity']:.3f}"
        self._reporter.say(f"Test loss {loss:.3f}{said}.")
        self._reporter.event("test", {"loss": loss, **means})

    def _close_bar(self) -> None:
        self._bar = None
        self._stack.close()

    def _add_references(self) -> None:
        """Find out what the model says of the answers before its first update, where it matters."""
        objective = self._run.objective
        if objective is None or not objective.facts.has_reference:
            return
        references = References(self._evaluation, swaps=objective.swaps)
        try:
            assert self._run.data is not None, "rank 0 has the data"
            for name, size in self._run.data.sizes().items():
                references.complete(name, self._options.iters if name == "train" else size)
        except StopRequested as request:
            raise Stopped(request.number, "no step was made yet") from None

    def _resume(self) -> None:
        found = self._run.resumption.found
        if found is None:
            self._report.start(0)
            return
        manifest = found.manifest
        state = manifest.state
        self._exchange.restore(state.get(ISLAND))
        self._checkpoints.restore()
        self._done = manifest.step
        self.best = Best(**state.get("best", {}))
        self._loss_scale = self._loss_scale.restored(state.get(LOSS_SCALE))
        if "kept" in state or self.best.step is not None:
            self.outputs.restore(state.get("kept"), Best() if "kept" in state else self.best)
        self._is_validated = False
        self._report.restore(state["report"])
        self._random.set_state(state["random"])
        self._batches.go_to(state["batches"])
        self._checkpoints.go_on_from(self._point(manifest.step, self._present_position()))
        where = found.store.path(manifest.step)
        left = self._options.iters - manifest.step
        self._reporter.go_on()
        self._report.start(manifest.step)
        self._reporter.say(f"Resumed from {where}: {left} of {self._options.iters} steps are left")
        self._reporter.event("resume", {"step": manifest.step, "checkpoint": str(where)})

    def _count_update(self, step: int, result: StepResult) -> None:
        """Take in the update that ended the step, or why there was none."""
        own = result.own
        self._grad_norm = own.norm
        if own.norm is not None and not math.isfinite(own.norm):
            is_loss, what = _cause(result)
            if self._loss_scale.can_fall and not is_loss:
                self._skip_overflow(step, what)
            else:
                self._pass_over(step, what)
            return
        if not own.is_made:
            return
        if self._checkpoints.is_writing:
            self._checkpoints.waited(max(each.waited for each in result.of_ranks()))
        self._loss_scale = self._loss_scale.after_update()
        self._soundness.count(made=True)
        self._is_validated = False

    def _skip_overflow(self, step: int, what: str) -> None:
        """Leave out the steps since the last update, whose loss had too large a factor."""
        self._loss_scale = self._loss_scale.after_overflow()
        self._reporter.say(
            f"step {step}: {what}: the update is skipped, and the loss scaled by "
            f"{self._loss_scale.factor:g}"
        )
        self._report.pass_over(self._options.batch.grad_accumulation_steps)

    def _pass_over(self, step: int, what: str) -> None:
        """Leave out the steps since the last update, or end the run: ``what`` is not finite."""
        if self._options.on_nan == "stop":
            kept = self._keep()
            is_short = self._run.training.workload.dtype == "float16"
            advice = self._anew("give --dtype bfloat16" if is_short else "lower --learning-rate")
            if self._loss_scale.factor > 1 and not self._loss_scale.is_dynamic:
                advice = "give loss_scale: dynamic in the YAML file"
            advice += ", or pass over such steps with on_nan: skip"
            raise AgreedFailure(f"step {step}: {what}: {kept}; {advice}")
        self._soundness.count(made=False)
        if self._soundness.is_lost:
            raise AgreedFailure(f"step {step}: {what}: {self._keep()}; {self._anew(TAMER)}")
        self._reporter.warn(f"step {step}: {what}: the update is skipped")
        self._report.pass_over(self._options.batch.grad_accumulation_steps)

    def _anew(self, remedy: str) -> str:
        """Return a remedy that makes another run, which resumes no checkpoint of this one."""
        place = self._run.resumption.place
        if place is None or not place.store.steps():
            return remedy
        return f"{remedy} and give another --checkpoint-dir"

    def _present_position(self) -> dict[str, Any]:
        """Return the position of the next batches."""
        return {"random": random_state(self._random), "batches": self._batches.position()}

    def _point(self, step: int, position: Mapping[str, Any]) -> Point:
        """Return the run after the update of ``step``; batches from ``position`` are to come."""
        shared = self._exchange.state()
        state = {
            "report": self._report.state(),
            "best": asdict(self.best),
            "kept": self.outputs.state(),
            **({} if self._options.loss_scale is None else {LOSS_SCALE: self._loss_scale.state()}),
            **({} if shared is None else {ISLAND: shared}),
            **position,
        }
        return Point(step, state)

    def _fault(self) -> Fault | None:
        """Return why the present weights should replace nothing; None if they may.

        If steps may be skipped, the last batch is tried with the weights: a run whose weights give
        no finite loss any more would otherwise save them until it has skipped most of its steps.
        """
        fault = self._soundness.fault()
        if fault is None and self._run.resumption.found is None:
            fault = self._soundness.unmoved()
        if fault is not None or self._options.on_nan == "stop":
            return fault
        if all(self._crew.all(RunWorker.finds_finite)):
            return None
        return Fault("with its weights the loss of the last batch is not finite", TAMER)

    def _save_if_due(self, step: int) -> None:
        saves = step % self._options.save_every == 0
        checkpoints = step % self._options.checkpoints.checkpoint_every == 0
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
        fault = self._fault()
        if fault is not None:
            raise AgreedFailure(f"step {self._done}: {self._keep()}; {self._anew(fault.remedy)}")
        is_saved = self._done % self._options.save_every == 0 and self._soundness.unmoved() is None
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
        place = self._run.resumption.place
        assert place is not None, "it was saved there"
        return f"the run up to step {step} is in {place.store.path(step)}"

    def _validate(self, step: int) -> bool:
        """Return False where training is over, since no validation got better any more."""
        if not self._exchange.evaluates:
            return True
        start = time.monotonic()
        options = self._options
        found = self._evaluation.loss("valid", options.val_batches, "validating")
        if found is not None:
            self._report.validation(step, found, time.monotonic() - start)
        loss = found and found[0]
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
        return self._run.resumption.found is not None or self._soundness.unmoved() is None

    def _write_trace(self) -> None:
        """Write the trace of all ranks, if one was asked for."""
        if self._options.trace is None:
            return
        transport = self._crew.transport
        path = Path(self._options.trace)
        names = [transport.name(rank) for rank in range(transport.size)]
        of_ranks = self._crew.all(RunWorker.traced)
        with file_access("write", path):
            write_chrome_trace(path, of_ranks, names)


def _cause(result: StepResult) -> tuple[bool, str]:
    """Return why the norm of a step's gradients is not finite, and first whether a loss is not: it
    is the closer cause."""
    answers = sorted(result.of_ranks(), key=lambda each: not each.is_loss)
    causes = [(each.is_loss, each.cause) for each in answers if each.cause]
    return causes[0] if causes else (False, "the norm of the gradient is not finite")


def exchange_of(crew: Crew[RunWorker]) -> WeightExchange:
    """Return what a run exchanges with others: nothing, unless it is an island."""
    run = crew.worker.run
    if run.link is None:
        return NoExchange()
    shared = crew.part(SharedWeights, "shared")
    config = run.config
    batch = run.training.way.batch
    return Island(run.link, shared, batch, config.updates, run.reporter)
