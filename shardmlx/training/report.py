"""Report a training run to its user: a line every few steps, and a table at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardmlx.common.formatting import gibibytes, percent
from shardmlx.common.reporter import Bar
from shardmlx.distributed.crew import Crew, Pending
from shardmlx.engine.trace import RankReport, Totals
from shardmlx.planning.memory.limits import exceeded
from shardmlx.planning.stragglers import Watch, Work
from shardmlx.training.evaluation import Evaluated
from shardmlx.training.growth import Growth
from shardmlx.training.loss_scale import LOSS_SCALE, LossScale
from shardmlx.training.run_worker import RunWorker, StepAnswer
from shardmlx.training.scores import in_words, means_of
from shardmlx.training.start_event import facts_of


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step of a run: what ranks answer, of several runs in one command, and the run's place in
    these answers."""

    pending: Pending[list[StepAnswer]]
    place: int

    @property
    def own(self) -> StepAnswer:
        """Rank 0's answer to the step."""
        return self.pending.own[self.place]

    def of_ranks(self) -> list[StepAnswer]:
        """Wait for what all ranks say of the step; return it by rank."""
        return [answers[self.place] for answers in self.pending.values()]


class TrainingReport:
    """The report of a run to its user, on rank 0."""

    def __init__(self, crew: Crew[RunWorker]) -> None:
        self._crew = crew
        self._run = run = crew.worker.run
        training = run.training
        self._hosts = run.transport.hosts
        self._totals = Totals()
        self._reporter = run.reporter
        self._steps: list[StepResult] = []
        """Steps since the last report."""
        self._total_tokens = 0
        self._skipped = 0
        self._lengths: Counter[int] = Counter()  # micro-batches of rank 0 by length
        self._growth = Growth(self._hosts, run.job.limits)
        length = training.mean_length
        work = Work.of(training.plan, training.workload, run.job.cluster, length)
        self._watch = Watch(self._hosts, work)

    def start(self, step: int) -> None:
        """Write the facts of the run to the metrics, before the next step."""
        self._totals.start_after(step)
        self._reporter.event("start", facts_of(self._run, step))

    def count(self, result: StepResult) -> None:
        """Take in a step that was made."""
        plan = self._run.training.plan
        sequences = plan.micro_batch_rows if plan.pack else 1
        widths = self._crew.worker.widths
        self._lengths.update(-(-width // sequences) for width in widths)
        self._steps.append(result)

    def pass_over(self, steps: int) -> None:
        """Leave out the losses of the last steps, which led to no update."""
        self._skipped += 1
        del self._steps[-steps:]

    def state(self) -> dict[str, Any]:
        """Return the report's state for a checkpoint."""
        return {"total_tokens": self._total_tokens + self._tokens, "skipped": self._skipped}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``: the next report is of the steps from here on."""
        self._total_tokens = state["total_tokens"]
        self._skipped = state["skipped"]

    def step(
        self, step: int, grad_norm: float | None, loss_scale: LossScale | None, bar: Bar
    ) -> None:
        """Report the mean of the steps since the last report, and each rank's work; the factor of
        the loss, if there is one, is that of the next step."""
        tokens = self._tokens
        answers = [result.of_ranks() for result in self._steps]
        self._steps = []
        windows, shapes = zip(*self._crew.all(RunWorker.window), strict=True)
        ranks = self._totals.add(step, windows)
        self._total_tokens += tokens
        if not answers:
            self._reporter.warn(f"step {step}: every step since the last report was skipped")
            return
        if not tokens:
            return
        losses = [
            sum(each.sums[0] for each in of_ranks) / of_ranks[0].count
            for of_ranks in answers
            if of_ranks[0].count
        ]
        # Sums of floats depend on their order: it is that of the ranks.
        sums = [each.sums for of_rank in zip(*answers, strict=True) for each in of_rank]
        means = means_of(sums, self._run.objective)
        seconds = ranks[0].times.step_seconds
        values: dict[str, Any] = {
            "step": step,
            "loss": sum(losses) / len(losses),
            **means,
            "tokens": tokens,
            "trained_tokens": self._total_tokens,
            "tokens_per_second": tokens / len(answers) / seconds,
            "learning_rate": float(self._run.optimizer.learning_rate.item()),
            "grad_norm": grad_norm,
            **({} if loss_scale is None else {LOSS_SCALE: loss_scale.factor}),
            "skipped": self._skipped,
            "step_seconds": seconds,
            "bubble": sum(rank.times.bubble for rank in ranks) / len(ranks),
            "shapes": max(shapes),
        }
        bar.note(f"loss {values['loss']:.3f}  {values['tokens_per_second']:.0f} tok/s")
        self._reporter.say(_line(values, in_words(means), ranks))
        self._reporter.event("train", {**values, "ranks": [each.as_json() for each in ranks]})
        self._warn(step, ranks, values["shapes"])

    def _warn(self, step: int, ranks: Sequence[RankReport], shapes: int) -> None:
        """Name ranks that are slow, and memory that grows without new ``shapes``."""
        for straggler in self._watch.observe(step, [each.times.compute_seconds for each in ranks]):
            self._reporter.warn(str(straggler))
            self._reporter.event("straggler", asdict(straggler))
        active = [rank.active_memory_bytes for rank in ranks]
        for warning in self._growth.observe(step, shapes, active):
            self._reporter.warn(warning)

    @property
    def _tokens(self) -> int:
        """Tokens that count in the steps since the last report."""
        return sum(result.own.valid_tokens for result in self._steps)

    @property
    def _mean_length(self) -> int:
        """Mean length of the run's micro-batches; times are nearly proportional to it."""
        total = sum(length * count for length, count in self._lengths.items())
        return round(total / self._lengths.total())

    def validation(self, step: int, found: Evaluated, seconds: float) -> None:
        """Report the loss of a validation."""
        loss, means = found
        self._reporter.say(f"step {step}: val loss {loss:.4f}{in_words(means)}, in {seconds:.1f} s")
        self._reporter.event(
            "val", {"step": step, "loss": loss, **means, "seconds": round(seconds, 3)}
        )

    def summary(self, steps: int, seconds: float) -> None:
        """Report the use of time and memory, beside the predictions, of a run that has ended after
        so many ``steps``."""
        ranks = self._totals.summary()
        if not ranks:
            return
        planned = self._run.job
        mean_length = self._mean_length
        memory = self._run.training.memory(planned.cluster, (max(self._lengths), 0))
        peaks = [each.peak for each in memory]
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
                    "num_layers": list(planned.stage_map.partition.sizes),
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
            process = self._run.job.limits[each.rank].process_peak(predicted)
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
