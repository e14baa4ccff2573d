"""Report a training run to its user: a line every few steps, and a table at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mlx_lm.tuner.callbacks import get_reporting_callbacks

from shardmlx.common.formatting import gibibytes, percent
from shardmlx.common.reporter import Bar
from shardmlx.costmodel.memory_limits import exceeded
from shardmlx.engine.trace import Meter, RankReport
from shardmlx.planning.stragglers import Watch
from shardmlx.training.batch_feed import Share
from shardmlx.training.growth import Growth
from shardmlx.training.losses import Evaluated
from shardmlx.training.scores import in_words, means_of
from shardmlx.training.setup import TrainingRun
from shardmlx.training.start_event import facts_of


class TrainingReport:
    """The report of a run to its user. Methods are collective unless they say not."""

    def __init__(self, job: TrainingRun, meter: Meter) -> None:
        self._job = job
        self._planned = job.planned
        self._hosts = job.transport.hosts
        self._meter = meter
        self._reporter = job.reporter
        self._steps: list[tuple[list[float], int, int]] = []
        """Steps since the last report: sums of this rank, and tokens and count of all."""
        self._total_tokens = 0
        self._skipped = 0
        self._lengths: Counter[int] = Counter()  # micro-batches by length
        self._shapes: set[tuple[int, int]] = set()
        """Shapes of the padded micro-batches so far."""
        self._growth = Growth(self._hosts, job.planned.limits)
        self._watch = Watch(self._hosts)
        self._callback: Any = None

    def open_services(self) -> None:
        """Start the services of ``--report-to``. On rank 0 only."""
        config = self._planned.config
        self._callback = get_reporting_callbacks(
            ",".join(config.services),
            project_name=config.project_name,
            log_dir=config.adapter_path,
            config=config.to_adapter_config(),
        )

    def start(self, step: int) -> None:
        """Write the facts of the run to the metrics, before the next step. Not collective."""
        if self._job.transport.rank == 0:
            self._reporter.event("start", facts_of(self._planned, self._hosts, step))

    def count(self, share: Share, sums: list[float]) -> None:
        """Take in a step with this rank's ``sums`` of ``scores_of``. Not collective."""
        plan = self._planned.plan
        sequences = plan.micro_batch_size if plan.pack else 1
        self._lengths.update(-(-each.shape[1] // sequences) for each in share.microbatches)
        self._shapes.update(each.shape for each in share.microbatches if each.places is None)
        self._steps.append((sums, share.valid_tokens, share.count))

    def pass_over(self, steps: int) -> None:
        """Leave out the losses of the last steps, which led to no update. Not collective."""
        self._skipped += 1
        del self._steps[-steps:]

    def state(self) -> dict[str, Any]:
        """Return the report's state for a checkpoint. Not collective."""
        return {"total_tokens": self._total_tokens + self._tokens, "skipped": self._skipped}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``: the next report is of the steps from here on. Not collective."""
        self._total_tokens = state["total_tokens"]
        self._skipped = state["skipped"]

    def step(self, step: int, grad_norm: float | None, bar: Bar) -> None:
        """Report the mean of the steps since the last report, and each rank's work."""
        steps, tokens, self._steps = self._steps, self._tokens, []
        report = self._meter.report(([total for total, _, _ in steps], len(self._shapes)))
        self._total_tokens += tokens
        if report is None:
            return
        ranks, extras = report
        totals, shapes = zip(*extras, strict=True)
        if not steps:
            self._reporter.warn(f"step {step}: every step since the last report was skipped")
            return
        if not tokens:
            return
        losses = [
            sum(total[0] for total in of_ranks) / count
            for (_, _, count), *of_ranks in zip(steps, *totals, strict=True)
            if count
        ]
        means = means_of(
            (each for of_rank in totals for each in of_rank), self._job.planned.objective
        )
        seconds = ranks[0].times.step_seconds
        values: dict[str, Any] = {
            "step": step,
            "loss": sum(losses) / len(losses),
            **means,
            "tokens": tokens,
            "tokens_per_second": tokens / len(steps) / seconds,
            "learning_rate": float(self._job.optimizer.learning_rate.item()),
            "grad_norm": grad_norm,
            "skipped": self._skipped,
            "step_seconds": seconds,
            "bubble": sum(rank.times.bubble for rank in ranks) / len(ranks),
            "shapes": max(shapes),
        }
        bar.note(f"loss {values['loss']:.3f}  {values['tokens_per_second']:.0f} tok/s")
        self._reporter.say(_line(values, in_words(means), ranks))
        self._reporter.event("train", {**values, "ranks": [each.as_json() for each in ranks]})
        for straggler in self._watch.observe(step, [each.times.compute_seconds for each in ranks]):
            self._reporter.warn(str(straggler))
            self._reporter.event("straggler", asdict(straggler))
        active = [rank.active_memory_bytes for rank in ranks]
        for warning in self._growth.observe(step, values["shapes"], active):
            self._reporter.warn(warning)
        if self._callback is not None:
            self._callback.on_train_loss_report(
                {
                    "iteration": step,
                    "train_loss": values["loss"],
                    "learning_rate": values["learning_rate"],
                    "iterations_per_second": 1 / seconds,
                    "tokens_per_second": values["tokens_per_second"],
                    "trained_tokens": self._total_tokens,
                    "peak_memory": max(rank.peak_memory_bytes for rank in ranks) / 1e9,
                    **means,
                }
            )

    @property
    def _tokens(self) -> int:
        """Tokens that count in the steps since the last report."""
        return sum(tokens for _, tokens, _ in self._steps)

    @property
    def _mean_length(self) -> int:
        """Mean length of the run's micro-batches; times are nearly proportional to it."""
        total = sum(length * count for length, count in self._lengths.items())
        return round(total / self._lengths.total())

    def validation(self, step: int, found: Evaluated, seconds: float) -> None:
        """Report the loss of a validation. On rank 0 only."""
        loss, means = found
        self._reporter.say(f"step {step}: val loss {loss:.4f}{in_words(means)}, in {seconds:.1f} s")
        self._reporter.event(
            "val", {"step": step, "loss": loss, **means, "seconds": round(seconds, 3)}
        )
        if self._callback is not None:
            self._callback.on_val_loss_report(
                {"iteration": step - 1, "val_loss": loss, "val_time": seconds}
                | {f"val_{name}": value for name, value in means.items()}
            )

    def summary(self, steps: int, seconds: float) -> None:
        """Report the use of time and memory, beside the predictions, of a run that has ended after
        so many ``steps``. Not collective."""
        ranks = self._meter.summary()
        if not ranks:
            return
        planned, mean_length = self._planned, self._mean_length
        peaks = planned.peaks(max(self._lengths))
        self._show_ranks(ranks, peaks)
        expected = planned.seconds(mean_length)
        if expected is not None:
            measured = ranks[0].times.step_seconds
            self._reporter.say(
                f"Step: {measured:.3f} s, predicted {expected:.3f} s "
                f"({percent(measured, expected)}) for sequences of {mean_length} tokens, the mean "
                "of this run"
            )
        measured_peaks = [each.peak_memory_bytes for each in ranks]
        for warning in exceeded(planned.limits, self._hosts, measured_peaks):
            self._reporter.warn(warning)
        self._reporter.event(
            "summary",
            {
                "steps": steps,
                "tokens": self._total_tokens,
                "skipped": self._skipped,
                "seconds": round(seconds, 3),
                "ranks": [each.as_json() for each in ranks],
                "predicted": {
                    "num_layers": list(planned.plan.stage_map.partition.sizes),
                    "sequence_length": mean_length,
                    "step_seconds": expected,
                    "peak_memory_bytes": peaks,
                },
                "memory_limits": [each.as_json() for each in planned.limits],
            },
        )

    def _show_ranks(self, ranks: Sequence[RankReport], peaks: Sequence[int]) -> None:
        rows = []
        for each, predicted in zip(ranks, peaks, strict=True):
            process = self._planned.limits[each.rank].process_peak(predicted)
            rows.append(
                (
                    str(each.rank),
                    self._hosts[each.rank],
                    f"{each.times.step_seconds:.3f} s",
                    f"{each.times.compute_seconds:.3f} s",
                    f"{each.times.exposed_comm_seconds:.3f} s",
                    f"{100 * each.times.bubble:.1f}%",
                    gibibytes(each.peak_memory_bytes),
                    gibibytes(predicted),
                    percent(each.peak_memory_bytes, predicted),
                    gibibytes(each.process_peak_bytes),
                    gibibytes(process),
                    percent(each.process_peak_bytes, process),
                )
            )
        times = ("step", "compute", "exposed communication", "bubble")
        memory = ("peak memory", "predicted", "", "of the process", "predicted", "")
        self._reporter.table(("rank", "host", *times, *memory), rows)


def _line(values: Mapping[str, Any], means: str, ranks: Sequence[RankReport]) -> str:
    skipped = f", {values['skipped']} skipped" if values["skipped"] else ""
    of_ranks = [
        f"rank {each.rank} {gibibytes(each.peak_memory_bytes)}, "
        f"{100 * each.times.bubble:.0f}% bubble"
        for each in ranks
    ]
    line = (
        f"step {values['step']}: loss {values['loss']:.4f}{means}, learning rate "
        f"{values['learning_rate']:.2e}, {values['tokens_per_second']:.1f} tokens/s, "
        f"{values['step_seconds']:.2f} s a step{skipped}"
    )
    return " | ".join([line, *of_ranks])
