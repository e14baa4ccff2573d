"""The part of one rank in a run that trains: it makes steps, evaluates, saves, as rank 0 says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from shardmlx.checkpoint.export import (
    Collection,
    Collector,
    HeldWeights,
    TensorSpec,
    save_adapters,
    save_model,
)
from shardmlx.checkpoint.reader import Lacking
from shardmlx.checkpoint.store import Manifest
from shardmlx.distributed.crew import takes_long, together
from shardmlx.engine.batches import SWAPPED
from shardmlx.engine.engine import Results, Step
from shardmlx.engine.optimizer import Updater
from shardmlx.engine.trace import Meter, Span, Traced, Window
from shardmlx.islands.hub_link import HubLink
from shardmlx.islands.shared_weights import SharedWeights
from shardmlx.loading.adapters import read_tensors
from shardmlx.modelfiles.safetensors_header import Header
from shardmlx.training.datasets import DataSets
from shardmlx.training.losses import Gradients, answers_of, evaluating, set_baselines
from shardmlx.training.nonfinite import nonfinite_weight
from shardmlx.training.rows import Rows, Share, share_of
from shardmlx.training.scores import scores_of
from shardmlx.training.setup import TrainingRun
from shardmlx.training.snapshots import MissingTensors, Snapshots


@dataclass(frozen=True, slots=True)
class StepOrder:
    """A training step: its number, its ``rows`` unless they were sent ahead, the rows of the step
    after it, if there is one, and the factor of the loss."""

    step: int
    rows: Rows | None
    following: Rows | None
    loss_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """The answer of a rank to a step.

    ``sums`` are those of its losses. After the last step of an update, ``norm`` is that of its
    gradients, the same on all ranks; ``cause`` says why it is not finite, as far as this rank
    knows, and ``is_loss`` whether a loss shows it. ``waited`` are the seconds in which the update
    waited for a checkpoint.
    """

    sums: list[float]
    valid_tokens: int
    count: int
    norm: float | None = None
    is_made: bool = False
    cause: str | None = None
    is_loss: bool = False
    waited: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """The log-probabilities of answers that a rank has computed: of which batch, in which column of
    what is known of samples, from which of its rows on."""

    batch: int
    column: int
    rows: np.ndarray
    logps: np.ndarray


class RunWorker:
    """The part of one rank in a run. Rank 0's trainer calls its methods on all ranks at once."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        engine = run.engine
        self._options = options = run.config
        self._transport = run.transport
        trace = Path(options.trace) if options.trace else None
        self.meter = Meter(run.transport, engine.recorder, trace)
        shards = engine.shards
        parts = [stage.part for stage in run.stages]
        self._updater = Updater(
            run.optimizer, run.stages, shards, masters=options.tune.master_weights
        )
        self.shared: SharedWeights | None = None
        if run.sharing is not None:
            self.shared = SharedWeights(run.sharing, engine, self._updater)
        self.snapshots = Snapshots(run, self._updater, self.shared)
        holds = None if shards.weights is None else shards.holds
        self._collector = Collector(run.training.plan, run.transport, parts, holds)
        self._gradients = Gradients(run)
        self._ahead: Rows | None = None
        self._last_share: Share | None = None
        self._step = 0
        self._shapes: set[tuple[int, int]] = set()
        """Shapes of the padded micro-batches so far."""

    def lead_with(
        self, data: DataSets, identity: Mapping[str, Any] | None, link: HubLink | None
    ) -> None:
        """Take what rank 0 alone has of the run."""
        self.run = replace(self.run, data=data, identity=identity, link=link)

    # Training.

    def spending(self, what: str) -> AbstractContextManager[None]:
        """Count the time of a block as a step's."""
        return self.run.engine.recorder.span(Span.STEP, what)

    @property
    def widths(self) -> list[int]:
        """The widths of the last step's micro-batches, in tokens."""
        share = self._last_share
        return [] if share is None else [each.shape[1] for each in share.microbatches]

    def begin_step(self, order: StepOrder) -> Step:
        """Take a step's rows, and return the engine's part of it."""
        self._transport.activity.begin(f"step {order.step}")
        self._step = order.step
        rows = order.rows or self._ahead
        assert rows is not None, "they were sent with this step, or with the one before"
        self._ahead = order.following
        share = share_of(self.run.training.plan, self._transport.rank, rows)
        self._last_share = share
        self._shapes.update(each.shape for each in share.microbatches if each.places is None)
        return self._gradients.begin(order.step, share, order.loss_scale)

    def end_step(self, results: Results) -> StepAnswer:
        """Take in what the engine made of the step that was begun, and make the update if it is
        due: without gradients that are not finite."""
        assert self._last_share is not None, "a step was begun"
        share = self._last_share
        sums = self._gradients.add(results)
        answer = StepAnswer(sums, share.valid_tokens, share.count)
        if self._step % self._options.batch.grad_accumulation_steps == 0:
            answer = self._update(answer)
            self.snapshots.mark()
        if mx.get_cache_memory() > self._options.clear_cache_threshold:
            mx.clear_cache()
        return answer

    def _update(self, answer: StepAnswer) -> StepAnswer:
        gradients = self._gradients
        norm = gradients.finish()
        result: dict[str, Any] = {"norm": norm}
        if not np.isfinite(norm):
            result["cause"], result["is_loss"] = gradients.cause()
            gradients.forget()
        elif not gradients.counted_steps:
            gradients.forget()  # the optimizer would go on by its momentum
        else:
            scale = gradients.scale
            limit = self._options.max_grad_norm
            if limit is not None and norm > limit:
                scale *= limit / (norm + 1e-6)
            result["waited"] = self.snapshots.release()
            self._updater.apply(scale)
            gradients.used()
            result["is_made"] = True
        return StepAnswer(answer.sums, answer.valid_tokens, answer.count, **result)

    # Losses.

    @together
    def evaluate(self, rows: Sequence[Rows], what: str) -> tuple[list[float], int]:
        """Return this rank's sums of the losses of batches, computed without dropout, and the count
        of what they are means of."""
        with self._aside(what):
            shares = self._shares(rows)
            set_baselines(self.run, shares)
            parts = [each for share in shares for each in share.microbatches]
            results = self.run.engine.evaluate(parts)
            dtype = self.run.training.workload.dtype
            _, sums = scores_of(results, parts, self.run.objective, dtype)
        return sums, sum(share.count for share in shares)

    @together
    def judge(self, rows: Sequence[Rows], columns: Sequence[int], what: str) -> list[Judged]:
        """Return what the model says of the answers of batches, for ``columns`` of what is known of
        samples, where this rank has the last stage."""
        found: list[Judged] = []
        with self._aside(what):
            shares = self._shares(rows)
            for column in columns:
                parts = [
                    each.swapped if column == SWAPPED else each.microbatches for each in shares
                ]
                for i, part, logps in answers_of(self.run, parts):
                    found.append(Judged(i, column, part.first_row + part.row_numbers, logps))
        return found

    @together
    def finds_finite(self) -> bool:
        """Return whether the last batch has a finite loss with the present weights."""
        if self._last_share is None:
            return True
        with self._aside("trying the weights"):
            results = self.run.engine.evaluate(self._last_share.microbatches)
        return all(np.isfinite(each).all() for each in results.values())

    def _shares(self, rows: Sequence[Rows]) -> list[Share]:
        plan = self.run.training.plan
        rank = self._transport.rank
        shares_prompts = self.run.shares_prompts
        return [share_of(plan, rank, each, shares_prompts=shares_prompts) for each in rows]

    @contextmanager
    def _aside(self, what: str) -> Iterator[None]:
        """Compute without dropout, and count the time as no step's."""
        self.meter.count(self._step)
        self._transport.activity.begin(what)
        with evaluating(self.run):
            yield
        self.meter.count(self._step, is_training=False)

    # Reports.

    def window(self) -> tuple[Window, int]:
        """Return what was measured since the last call, and the number of shapes so far."""
        self.meter.count(self._step)
        return self.meter.window(), len(self._shapes)

    def traced(self) -> Traced:
        """Return what the trace of this rank has."""
        self.meter.count(self._step)
        return self.meter.traced()

    # Weights.

    def nonfinite_weight(self) -> str | None:
        """Name a weight of this rank that is not finite, if there is one."""
        where = self._transport.name(self._transport.rank)
        return nonfinite_weight(self.run.stages, self.run.engine.shards.holds, where)

    def has_moved(self) -> bool:
        """Tell whether a weight of this rank has moved: by an update, or by what the hub gave."""
        return self._updater.has_moved or (self.shared is not None and self.shared.has_taken)

    def held_weights(self) -> HeldWeights:
        """Return what this rank has of what the run leaves."""
        return self._collector.held(trained_only=not self._options.tune.is_full)

    @together
    @takes_long
    def save(self, collection: Collection, directory: Path, copy_as: str | None) -> None:
        """Write the weights, on rank 0, with a copy of adapters. Raises ``SaveError``."""
        rank = self._transport.rank
        if rank != 0:
            self._collector.send(collection.sent_by(rank))
        elif self._options.tune.is_full:
            save_model(self._collector, collection, self.run.model_path, directory)
        else:
            config = self._options.to_adapter_config()
            save_adapters(self._collector, collection, directory, config, copy_as)

    def wanted_weights(self) -> set[str]:
        """Return the names of the trained weights that this rank keeps."""
        return self._collector.wanted()

    @together
    @takes_long
    def take_weights(
        self, files: Sequence[Path], specs: Sequence[TensorSpec], wanted: Sequence[Set[str]]
    ) -> None:
        """Put the weights in files of rank 0 into the stages, of which rank r keeps ``wanted[r]``.
        Raises ``UserError``."""
        if self._transport.rank == 0:
            self._collector.give(read_tensors(files), wanted)
        else:
            self._collector.take(specs)
        shards = self.run.engine.shards
        names = [name for stage in self.run.stages for name in stage.names]
        shards.start_gather(list(dict.fromkeys(names)))
        shards.finish_gather()

    # Checkpoints.

    @takes_long
    def headers(self) -> dict[str, Header]:
        """Return what this rank, for those that do not see them, knows of the files of the
        checkpoint to resume. Raises ``UserError``."""
        return self.snapshots.headers()

    def missing(self, headers: Sequence[Mapping[str, Header]]) -> MissingTensors:
        """Open the checkpoint to resume, with the headers of all ranks; return what this rank
        misses of it."""
        return self.snapshots.open(headers)

    @together
    @takes_long
    def restore(self, lacking: Sequence[Lacking]) -> None:
        """Take this rank's part of the checkpoint to resume, and send the others what they lack.
        Raises ``UserError``."""
        found = self.run.resumption.found
        assert found is not None, "there is one to resume"
        self.snapshots.restore(lacking)
        self.snapshots.mark()
        self._step = found.manifest.step
        self.meter.start_after(found.manifest.step)

    @takes_long
    def begin_checkpoint(self, manifest: Manifest, step: int) -> float:
        """Begin to write this rank's part of a checkpoint; return the seconds that it took."""
        return self.snapshots.begin(manifest, step)

    @takes_long
    def finish_checkpoint(self) -> float:
        """Wait until this rank's part is written; return the seconds of the wait."""
        return self.snapshots.finish()
