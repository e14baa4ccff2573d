"""Train as an island: report to a hub what was trained, and take what it makes of all reports.

Rank 0 decides what is due, talks to the hub by its ``HubLink``, and lets all ranks do their part by
their ``SharedWeights``. A run that trains alone exchanges nothing: ``NoExchange``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any, Protocol

from shardmlx.common.reporter import Reporter
from shardmlx.config.specs import BatchOptions
from shardmlx.distributed.crew import Crew, Pending
from shardmlx.errors import UserError
from shardmlx.islands.client import Came
from shardmlx.islands.hub_link import HubLink
from shardmlx.islands.protocol import Progress, report_path
from shardmlx.islands.shared_weights import SharedWeights, TakenVersion


class WeightExchange(Protocol):
    """The exchange of a run with others, as its trainer knows it, on rank 0."""

    @property
    def ended(self) -> bool:
        """True once no more is to be trained."""

    @property
    def evaluates(self) -> bool:
        """True if this run is to validate."""

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on from the ``state`` of a checkpoint. Raises ``UserError`` for another exchange's."""

    def begin(self, step: int) -> None:
        """Begin after ``step``, before the first one of this run. Raises ``UserError``."""

    def after_update(self, step: int, tokens: int) -> str | None:
        """Exchange what is due after the update that ended with ``step``, which has taken so many
        tokens; return why the run cannot go on, if it cannot."""

    def state(self) -> dict[str, Any] | None:
        """Return what ``restore`` takes, for a checkpoint; None if that is nothing."""

    def leave(self) -> None:
        """End the exchange. It may be called before ``begin``."""


class NoExchange:
    """The exchange of a run that trains alone."""

    ended = False
    evaluates = True

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Do nothing."""

    def begin(self, step: int) -> None:
        """Do nothing."""

    def after_update(self, step: int, tokens: int) -> str | None:
        """Return None: the run goes on."""
        return None

    def state(self) -> dict[str, Any] | None:
        """Return None: there is nothing to restore."""
        return None

    def leave(self) -> None:
        """Do nothing."""


@dataclass(slots=True)
class Fragment:
    """A fragment as this island and the hub know it."""

    life: int
    """The life that the hub gave; that of a checkpoint until the next version is taken."""
    version: int | None = None
    """The base; None before any weights have come."""
    counted: tuple[int, int] = (0, 0)
    """Updates and tokens that its reports have counted."""
    sent: tuple[int, int] | None = None
    """Updates and tokens at the report that is under way."""


class Island:
    """The exchange of an island with its hub, in a run of so many ``updates`` by ``batch``."""

    def __init__(
        self,
        link: HubLink,
        crew: Crew[SharedWeights],
        batch: BatchOptions,
        updates: int,
        reporter: Reporter,
    ) -> None:
        self._link = link
        self._crew = crew
        self._batch = batch
        self._updates = updates
        self._reporter = reporter
        self._joined = link.joined
        self._terms = link.joined.terms
        self._fragments = [Fragment(link.joined.life) for _ in link.joined.versions]
        self._tokens = 0
        self._losses: dict[str, float] = {}
        self.ended = False
        self.evaluates = True
        reporter.listen(self._listen)
        crew.all(SharedWeights.share, crew.all(SharedWeights.held))

    def state(self) -> dict[str, Any] | None:
        """Return what ``restore`` needs beside the arrays of all ranks."""
        kept = [(each.life, each.version, each.counted) for each in self._fragments]
        return {"run": self._joined.run, "tokens": self._tokens, "fragments": kept}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint of this run of the hub. Raises ``UserError`` for one of another
        run."""
        if state is None:
            return
        if state.get("run") != self._joined.run:
            raise UserError(
                f"the checkpoint is of a hub's run {state.get('run')}, and this is "
                f"{self._joined.run}",
                "give another --checkpoint-dir, or --resume never",
            )
        self._tokens = state["tokens"]
        for fragment, kept in zip(self._fragments, state["fragments"], strict=True):
            fragment.life, fragment.version, counted = kept
            fragment.counted = tuple(counted)

    def begin(self, step: int) -> None:
        """Give the hub the weights that it lacks, and take its others, unless the checkpoint of
        this ``step`` had them; be present at the hub until ``leave``. Raises ``UserError``."""
        self._link.enter()
        update = step // self._batch.grad_accumulation_steps
        for k, newest in enumerate(self._joined.versions):
            fragment = self._fragments[k]
            if fragment.version is None:
                self._begin_fragment(k, newest, update)
            elif newest is None or fragment.version > newest:
                raise UserError(
                    f"the hub has version {newest} of fragment {k}, and the checkpoint "
                    f"{fragment.version}",
                    "start the hub from its newest directory, or give another --checkpoint-dir",
                )
        if self.ended and update == 0:
            raise UserError("the hub has ended its run", "start the hub again with more --rounds")
        self.evaluates = True  # once, whatever the hub said: the loss before the first step

    def leave(self) -> None:
        """Leave the hub, if it was entered."""
        self._link.leave()

    def after_update(self, step: int, tokens: int) -> str | None:
        """Exchange what is due; after the last update, wait for what is under way."""
        self._tokens += tokens
        loss, val_loss = map(self._losses.get, ("train", "val"))
        self._link.tell(Progress(step=step, tokens=self._tokens, loss=loss, val_loss=val_loss))
        update = step // self._batch.grad_accumulation_steps
        is_last = update == self._updates
        due = self._terms.due(update)
        awaited = self._awaited(update, is_last=is_last)
        if awaited or due:
            problem = self._hear(update, awaited, is_last=is_last)
            if problem is not None:
                return problem
        for k in due:
            if self._fragments[k].sent is None:
                self._report(k, update)
        if is_last or (due and not self._terms.overlap):
            awaited = self._awaited(update, is_last=is_last)
            problem = self._hear(update, awaited, is_last=is_last)
            if problem is not None:
                return problem
        if is_last:
            self._say_unreported(update)
        return None

    def _begin_fragment(self, k: int, newest: int | None, update: int) -> None:
        """Take a fragment's newest weights, or give the hub its first."""
        fragment = self._fragments[k]
        fragment.sent = update, self._tokens
        body = self._link.new_body()
        path = None
        if newest is None:
            self._all(SharedWeights.seed, k, body)
            path = f"/fragments/{k}/seed"
        self._link.ask(k, fragment.version, path, body)
        problem = self._hear(update, {k: True}, is_last=False)
        if fragment.version is None:
            raise UserError(problem or "the hub gave no weights", "start it again")

    def _say_unreported(self, update: int) -> None:
        """Say which updates of a run that has made its last one the hub does not have."""
        reported = min(
            each.counted[0] if each.sent is None else each.sent[0] for each in self._fragments
        )
        if reported < update:
            self._reporter.say(
                f"Updates {reported + 1} to {update} were not due to be reported: all or some of "
                "their weights are in this island's output alone"
            )

    def _awaited(self, update: int, *, is_last: bool) -> dict[int, bool]:
        """Return the fragments that were reported long enough ago, and whether the run waits for
        each: it does so once, and then takes late ones when they are there."""
        ends = {
            k: each.sent[0] + self._terms.overlap
            for k, each in enumerate(self._fragments)
            if each.sent is not None
        }
        return {k: is_last or update == end for k, end in ends.items() if is_last or update >= end}

    def _goes_on(self) -> bool:
        """Return whether nobody asks the run to stop; raise if the job cannot go on."""
        transport = self._crew.transport
        transport.activity.check(transport.activity.where)
        return transport.stop_requested() is None

    def _listen(self, event: str, values: Mapping[str, Any]) -> None:
        if event in ("train", "val") and math.isfinite(values["loss"]):
            self._losses[event] = values["loss"]

    def _report(self, k: int, update: int) -> None:
        """Send the hub the difference of a fragment."""
        fragment = self._fragments[k]
        base = self._fragments[k].version
        assert base is not None, "it was taken or given at the start"
        updates, tokens = fragment.counted
        fragment.sent = update, self._tokens
        body = self._link.new_body()
        self._all(SharedWeights.report, k, body)
        rows_of_update = self._batch.batch_size * self._batch.grad_accumulation_steps
        counts = {"rows": (update - updates) * rows_of_update, "tokens": self._tokens - tokens}
        path = report_path(k, life=fragment.life, base=base, **counts)
        self._link.ask(k, base, path, body, counts["rows"])

    def _hear(self, update: int, awaited: Mapping[int, bool], *, is_last: bool) -> str | None:
        """Take new versions of the fragments in ``awaited``, after a wait for those that have True,
        and hear what the hub wants of this island; return why the run cannot go on, if it cannot.
        """
        if any(awaited.values()):
            link = self._link
            waits = [k for k, is_awaited in awaited.items() if is_awaited]
            what = f"update {update}, waiting for the hub at {link.url}"
            self._crew.all(SharedWeights.wait, what)
            if not link.wait(waits, self._goes_on):
                self._reporter.warn(
                    f"update {update}: {link.url} gave no new weights in {link.patience:g} s: the "
                    "run goes on, and takes them when they come"
                )
        came, problem = self._link.hear(awaited)
        self.ended = self._link.ended
        self.evaluates = self._link.evaluates
        for k, each in came.items():
            self._take(update, k, each, is_last=is_last)
        return problem

    def _take(self, update: int, k: int, came: Came, *, is_last: bool) -> None:
        """Let all ranks take a version of a fragment that has come."""
        fragment = self._fragments[k]
        if came.refusal:
            self._reporter.warn(
                f"update {update}: the hub refused what was trained: {came.refusal}; this island "
                "goes on with the hub's weights"
            )
        is_end = is_last and fragment.sent is not None and fragment.sent[0] == update
        taken = TakenVersion(
            fragment=k,
            version=came.version,
            form=came.form,
            is_refused=bool(came.refusal),
            keeps_rest=not is_end,
        )
        self._all(SharedWeights.take, taken, self._link.body(k))
        fragment.life = self._joined.life
        fragment.version = came.version
        fragment.counted = fragment.sent or fragment.counted
        fragment.sent = None
        self._link.forget(k)

    def _all(
        self, method: Callable[[SharedWeights, Any, IO[bytes] | None], None], what: Any, body: Any
    ) -> Pending[None]:
        """Begin to let all ranks do their part in something; rank 0 alone has the file."""
        others = (what, None)
        args = [(what, body), *[others] * (self._crew.size - 1)]
        return self._crew.begin_each(method, args)
