"""Train as an island: report to a hub what was trained, and take what it makes of all reports.

All ranks of the island take part, tensor by tensor; only rank 0 talks to the hub, on a thread for
each fragment that is under way::

    ranks    update 98, 99, 100   differences to rank 0   101, 102, ...   new weights from rank 0
    thread                                  upload, wait for the next version, download

The ranks keep what they train between the two, on top of the new weights.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from tempfile import NamedTemporaryFile
from typing import IO, Any

import mlx.core as mx
import numpy as np

from shardmlx.common.formatting import plural
from shardmlx.common.reporter import Reporter
from shardmlx.config.specs import BatchOptions
from shardmlx.distributed.agreement import AgreedError
from shardmlx.engine.engine import Engine
from shardmlx.engine.optimizer import Updater
from shardmlx.errors import file_access, one_line
from shardmlx.islands.client import CHANGE, OWN, PATIENCE, Came, Heartbeat, Hub, begun, exchange
from shardmlx.islands.encodings import Data, Encoding, encoding_named
from shardmlx.islands.protocol import (
    Join,
    Joined,
    Progress,
    SharedTensor,
    fragments_of,
    report_path,
)
from shardmlx.loading.rank_setup import SETUP_SECONDS
from shardmlx.training.planned_run import PlannedRun

BASE, BEFORE = "base", "before"
"""Kinds of arrays in a checkpoint: weights of the hub, and the bytes of the last difference."""


@dataclass(frozen=True, slots=True)
class Membership:
    """An island's place at the hub, which only rank 0 has."""

    joined: Joined
    tensors: tuple[SharedTensor, ...]
    hub: Hub | None


def join(
    planned: PlannedRun, shapes: Mapping[str, tuple[int, ...]], reporter: Reporter
) -> Membership | None:
    """Join the hub that the options name, with trained weights of these ``shapes``. On rank 0.
    Raises ``UserError``."""
    url, name = planned.config.island, planned.config.name
    if url is None or name is None:
        return None
    # All islands have them in one order, whatever their stages are.
    tensors = tuple(SharedTensor(each, shapes[each]) for each in sorted(shapes, key=_place))
    options = planned.config.to_adapter_config()
    kept = ("model", "fine_tune_type", "num_layers", "lora_parameters")
    message = Join(
        name=name,
        model={"config": planned.plan.model, **{each: options[each] for each in kept[1::2]}},
        tensors=tensors,
        adapter_config={each: options[each] for each in kept},
    )

    hub = Hub.of(url, name, reporter.say)
    joined = hub.persist(partial(hub.join, message))
    updates = planned.config.updates
    every = joined.terms.inner_steps
    if left := updates % every:
        enough = (updates - left + every) * planned.config.batch.grad_accumulation_steps
        reporter.warn(
            f"--iters {planned.config.iters} makes {plural(updates, 'update')}, and the hub takes "
            f"reports every {every}: the last {left} will stay on this island; --iters {enough} "
            "has them all reported"
        )
    return Membership(joined, tensors, hub)


def _place(name: str) -> list[Any]:
    return [int(each) if each.isdecimal() else each for each in re.split(r"(\d+)", name)]


@dataclass(slots=True)
class Fragment:
    """Facts of a fragment, the same on all ranks of the island."""

    tensors: tuple[SharedTensor, ...]
    life: int
    """The life that the hub gave; that of a checkpoint until the next version is taken."""
    version: int | None = None
    """The base; None before any weights have come."""
    counted: tuple[int, int] = (0, 0)
    """Updates and tokens that its reports have counted."""
    sent: tuple[int, int] | None = None
    """Updates and tokens at the report that is under way."""
    body: IO[bytes] | None = None
    """File, on rank 0, of the report that is under way, and of the version that follows."""
    coming: Future[Came | None] | None = None
    """The version that follows, on rank 0."""


class IslandRank:
    """The part of one rank in an island. Methods are collective unless they say not."""

    def __init__(
        self,
        membership: Membership,
        engine: Engine,
        updater: Updater,
        reporter: Reporter,
        batch: BatchOptions,
    ) -> None:
        self._transport, self._reporter = engine.transport, reporter
        self._engine = engine
        self._updater = updater
        self._hub: Hub | None = None
        self._batch = batch
        self._joined, self._terms = membership.joined, membership.joined.terms
        self._fragments = [
            Fragment(each, self._joined.life)
            for each in fragments_of(membership.tensors, self._terms.fragments)
        ]
        self._encoding = encoding_named(self._terms.encoding)
        self._before: dict[str, Data] = {}
        """Bytes of the last difference of each tensor, where they help to encode the next."""
        rank = self._transport.rank
        mine = {name for stage in engine.stages.values() for name in stage.names}
        held = {name for name in mine if engine.shards.holds(name)}
        updated = {name for name in held if updater.updates(name)}
        everyone = self._transport.all_gather((held, updated), "sharing the weights of the hub")
        self._holders = {
            each.name: [peer for peer, (theirs, _) in enumerate(everyone) if each.name in theirs]
            for each in membership.tensors
        }
        self._owners = {
            each.name: next(peer for peer, (_, own) in enumerate(everyone) if each.name in own)
            for each in membership.tensors
        }
        self._mine, self._held = mine, held
        self._owned = {name for name in held if self._owners[name] == rank}
        self._base: dict[str, mx.array] = {}
        self._reported: dict[str, mx.array] = {}
        """Local weights as the reports that are under way tell them."""
        self._tokens = 0
        self._losses: dict[str, float] = {}
        self.ended, self.evaluates = False, True
        self.has_taken = False
        """True once trained weights of the hub have come to this run."""
        self._heartbeat: Heartbeat | None = None

    def talk_to(self, hub: Hub) -> None:
        """Talk to the hub for all ranks of the island. On rank 0."""
        self._hub = hub
        self._reporter.listen(self._listen)

    def state(self) -> dict[str, Any]:
        """Return what ``restore`` needs beside ``arrays``. Not collective."""
        kept = [(each.life, each.version, each.counted) for each in self._fragments]
        return {"run": self._joined.run, "tokens": self._tokens, "fragments": kept}

    def arrays(self) -> dict[str, mx.array]:
        """Return the arrays that a checkpoint needs of this rank. Not collective."""
        return {f"{BASE}.{name}": self._base[name] for name in self._owned} | {
            f"{BEFORE}.{name}": mx.array(data) for name, data in self._before.items()
        }

    def takes(self, key: str) -> bool:
        """Tell whether this rank needs an array of a checkpoint. Not collective."""
        kind, _, name = key.partition(".")
        return name in {BASE: self._held, BEFORE: self._owned}.get(kind, ())

    def restore(self, state: Mapping[str, Any], arrays: Iterable[tuple[str, mx.array]]) -> None:
        """Go on from a checkpoint of this run of the hub. Not collective. Raises ``AgreedError``
        for one of another run."""
        if state.get("run") != self._joined.run:
            raise AgreedError(
                f"the checkpoint is of a hub's run {state.get('run')}, and this is "
                f"{self._joined.run}",
                "give another --checkpoint-dir, or --resume never",
            )
        for key, array in arrays:
            kind, _, name = key.partition(".")
            if kind == BASE:
                self._base[name] = array
            else:
                self._before[name] = np.array(array)
        self._tokens = state["tokens"]
        for fragment, kept_of in zip(self._fragments, state["fragments"], strict=True):
            fragment.life, fragment.version, counted = kept_of
            fragment.counted = tuple(counted)

    def enter(self, step: int) -> None:
        """Give the hub the weights that it lacks, and take its others, unless the checkpoint of
        this ``step`` had them; be present at the hub until ``leave``. Raises ``AgreedError``."""
        if self._hub is not None:
            self._heartbeat = Heartbeat(self._hub)
        self._start(step // self._batch.grad_accumulation_steps)

    def leave(self) -> None:
        """Leave the hub, which only rank 0 talks to, if it was entered. Not collective."""
        if self._hub is not None and self._heartbeat is not None:
            self._heartbeat.leave()
            self._hub.closed.set()
            for body in filter(None, (each.body for each in self._fragments)):
                body.close()

    def _start(self, update: int) -> None:
        for k, (fragment, newest) in enumerate(
            zip(self._fragments, self._joined.versions, strict=True)
        ):
            if fragment.version is None:
                fragment.sent = update, self._tokens
                self._ask_first(k, newest)
                problem = self._hear(update, {k: True})
                if fragment.version is None:
                    raise AgreedError(problem or "the hub gave no weights", "start it again")
            elif newest is None or fragment.version > newest:
                raise AgreedError(
                    f"the hub has version {newest} of fragment {k}, and the checkpoint "
                    f"{fragment.version}",
                    "start the hub from its newest directory, or give another --checkpoint-dir",
                )
        if self.ended and update == 0:
            raise AgreedError("the hub has ended its run", "start the hub again with more --rounds")
        self.evaluates = True  # once, whatever the hub said: the loss before the first step

    def _ask_first(self, k: int, newest: int | None) -> None:
        """Ask for a fragment's newest weights, or give the hub its first."""
        if newest is not None:
            self._ask(k, None, self._new_file())
            return
        for name in self._names(k):
            self._base[name] = self._local(name)
            mx.eval(self._base[name])
        whole = Encoding()
        body = self._collect(k, lambda name: whole.encode(np.array(self._base[name])))
        self._ask(k, f"/fragments/{k}/seed", body)

    def after(self, step: int, tokens: int, *, is_last: bool) -> str | None:
        """Exchange what is due after a step, where ``is_last`` is true of the last update's;
        return why the run cannot go on, if it cannot."""
        self._tokens += tokens
        if self._heartbeat is not None:
            loss, val_loss = map(self._losses.get, ("train", "val"))
            self._heartbeat.tell(
                Progress(step=step, tokens=self._tokens, loss=loss, val_loss=val_loss)
            )
        update, left = divmod(step, self._batch.grad_accumulation_steps)
        if left:
            return None
        due = self._terms.due(update)
        awaited = self._awaited(update, is_last=is_last)
        problem = self._hear(update, awaited, is_last=is_last) if awaited or due else None
        for k in due:
            if problem is None and self._fragments[k].sent is None:
                self._report(k, update)
        if problem is None and (is_last or (due and not self._terms.overlap)):
            problem = self._hear(update, self._awaited(update, is_last=is_last), is_last=is_last)
        if problem is None and is_last:
            self._say_unreported(update)
        return problem

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

    def _listen(self, event: str, values: Mapping[str, Any]) -> None:
        if event in ("train", "val") and math.isfinite(values["loss"]):
            self._losses[event] = values["loss"]

    def _report(self, k: int, update: int) -> None:
        """Send the hub the difference of a fragment."""
        fragment = self._fragments[k]
        (updates, tokens), fragment.sent = fragment.counted, (update, self._tokens)
        body = self._collect(k, self._encoded)
        self._reported |= {name: self._updater.trained(name) for name in self._names(k)}
        if self._encoding.is_lossy:
            # Whatever the hub was not told stays in the local weights, and so in the next
            # difference: step-ahead error feedback (Xu et al., arXiv:2008.05823).
            for name, told in self._handed_out(fragment, self._encoding, body):
                self._reported[name] = self._comparable_base(name) - told
                mx.eval(self._reported[name])
        rows = (update - updates) * self._batch.batch_size * self._batch.grad_accumulation_steps
        base = fragment.version
        assert base is not None, "it was taken or given at the start"
        counts = {"rows": rows, "tokens": self._tokens - tokens}
        self._ask(k, report_path(k, life=fragment.life, base=base, **counts), body)

    def _ask(self, k: int, path: str | None, body: IO[bytes] | None) -> None:
        """Let rank 0 begin an exchange."""
        fragment = self._fragments[k]
        if self._hub is not None and body is not None:
            fragment.body = body
            fragment.coming = begun(partial(exchange, self._hub, k, fragment.version, path, body))

    def _encoded(self, name: str) -> Data:
        change = np.array(self._comparable_base(name) - self._local(name))
        data = self._encoding.encode(change, self._before.get(name))
        if self._encoding.warm_starts:
            self._before[name] = data
        return data

    def _comparable_base(self, name: str) -> mx.array:
        # A base that local weights cannot be is no difference.
        return self._base[name].astype(self._updater.trained(name).dtype).astype(mx.float32)

    def _local(self, name: str) -> mx.array:
        return self._updater.trained(name).astype(mx.float32)

    def _names(self, k: int) -> list[str]:
        """Return the names of a fragment's tensors that this rank holds."""
        return [each.name for each in self._fragments[k].tensors if each.name in self._held]

    def _hear(
        self, update: int, awaited: Mapping[int, bool], *, is_last: bool = False
    ) -> str | None:
        """Take new versions of the fragments in ``awaited``, after a wait for those that have True,
        and hear what the hub wants of this island; return why the run cannot go on, if it cannot.
        """
        with self._transport.longer_timeout(SETUP_SECONDS):
            came, problem, self.ended, self.evaluates = self._transport.broadcast(
                self._what_came(update, awaited), what="waiting for the hub"
            )
        for k, each in came.items():
            self._take(update, self._fragments[k], each, is_last=is_last)
        return None if problem is None else str(problem)

    def _what_came(
        self, update: int, awaited: Mapping[int, bool]
    ) -> tuple[dict[int, Came], str | None, bool, bool] | None:
        """Return, on rank 0, the versions that have come, why the run cannot go on, and what the
        hub wants."""
        hub, heartbeat = self._hub, self._heartbeat
        if hub is None or heartbeat is None:
            return None
        coming = {k: each for k in awaited if (each := self._fragments[k].coming) is not None}
        self._wait(hub, [each for k, each in coming.items() if awaited[k]], update)
        found, problem, ended = dict[int, Came](), None, heartbeat.ended
        for k, each in coming.items():
            if not each.done():
                continue
            if (error := each.exception()) is not None:
                problem = one_line(error)
            elif (came := each.result()) is None:
                ended = True
            else:
                found[k] = came
        return found, problem, ended, heartbeat.evaluates

    def _wait(self, hub: Hub, coming: Sequence[Future[Came | None]], update: int) -> None:
        """Wait, on rank 0, as long as bytes come or go, and ``PATIENCE`` seconds more."""
        start = time.monotonic()
        self._transport.activity.begin(f"update {update}, waiting for the hub at {hub.url}")
        while wait(coming, 0.02).not_done:
            self._transport.activity.check(self._transport.activity.where)
            if self._transport.stop_requested() is not None:
                return
            if time.monotonic() > max(start, hub.heard) + PATIENCE:
                self._reporter.warn(
                    f"update {update}: {hub.url} gave no new weights in {PATIENCE:g} s: the run "
                    "goes on, and takes them when they come"
                )
                return

    def _take(self, update: int, fragment: Fragment, came: Came, *, is_last: bool) -> None:
        """Take a version of a fragment, whose bytes rank 0 has in a file: set bases, and local
        weights by them, which after the last step are the hub's."""
        names, body = [each.name for each in fragment.tensors], fragment.body
        if came.refusal:
            self._reporter.warn(
                f"update {update}: the hub refused what was trained: {came.refusal}; this island "
                "goes on with the hub's weights"
            )
            for name in names:
                self._reported.pop(name, None)
        is_change = came.form == CHANGE
        is_end = is_last and fragment.sent is not None and fragment.sent[0] == update
        encoding = self._encoding if is_change else Encoding()
        if came.form != OWN:
            for name, new in self._handed_out(fragment, encoding, body):
                base = self._base[name] + new if is_change else new
                self._merge(name, base, keeps_rest=not is_end)
            self.has_taken |= came.version > 0
        mine = [name for name in names if name in self._mine]
        self._engine.shards.start_gather(mine)
        self._engine.shards.finish_gather()
        fragment.life, fragment.version = self._joined.life, came.version
        fragment.counted, fragment.sent = fragment.sent or fragment.counted, None
        fragment.body = fragment.coming = None
        if body is not None:
            body.close()

    def _merge(self, name: str, base: mx.array, *, keeps_rest: bool) -> None:
        """Set a base, and local weights to it, on top with the rest that the report did not tell:
        trained since, or left out by the encoding."""
        now, reported = self._updater.trained(name), self._reported.pop(name, None)
        weight = base
        if reported is not None:
            then = reported.astype(mx.float32)
            if (share := self._terms.optimizer.elastic) != 1:
                weight = then + share * (base - then)
            if keeps_rest and now is not reported:
                weight = weight + (now.astype(mx.float32) - then)
        self._updater.replace(name, weight)
        self._base[name] = base

    def _collect(self, k: int, encoded: Callable[[str], np.ndarray]) -> IO[bytes] | None:
        """Return, on rank 0, a file of the encoded tensors of a fragment."""
        rank, body = self._transport.rank, self._new_file()
        for name in (each.name for each in self._fragments[k].tensors):
            owner, what = self._owners[name], f"reporting {name}"
            data = encoded(name) if rank == owner else None
            if rank == 0 and owner != 0:
                data = self._transport.receive_object(owner, what)
            elif rank == owner != 0:
                self._transport.send_object(data, 0, what)
            if body is not None and data is not None:
                with file_access("write", body.name):
                    body.write(data.data)
        return body

    def _handed_out(
        self, fragment: Fragment, encoding: Encoding, body: IO[bytes] | None
    ) -> Iterator[tuple[str, mx.array]]:
        """Yield the tensors of a fragment that this rank holds; rank 0 has all bytes in a file."""
        if body is not None:
            body.seek(0)
        for tensor in fragment.tensors:
            holders, what = self._holders[tensor.name], f"taking {tensor.name}"
            data = None
            if body is not None:
                data = body.read(encoding.nbytes(tensor.shape))
                for peer in filter(None, holders):
                    self._transport.send_object(data, peer, what)
            elif self._transport.rank in holders:
                data = self._transport.receive_object(0, what)
            if tensor.name in self._held and data is not None:
                array = encoding.decode(np.frombuffer(data, np.uint8), tensor.shape)
                yield tensor.name, mx.array(array)

    def _new_file(self) -> IO[bytes] | None:
        """Return, on rank 0, a file that goes away as it is closed: fragments may be large."""
        return None if self._hub is None else NamedTemporaryFile()
