"""The models, snapshots and saved states of a service, as rank 0 knows them, and their commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardmlx.api.exports import archive
from shardmlx.api.requests import (
    CreateModel,
    LoadState,
    LoraOptions,
    NoRoom,
    OptimStep,
    SavedState,
    SaveState,
    TakeSnapshot,
)
from shardmlx.api.states import StateFile, StateStore
from shardmlx.api.worker import LoopWorker
from shardmlx.checkpoint.export import Collection, HeldWeights
from shardmlx.distributed.crew import Crew, Pending
from shardmlx.errors import UserError
from shardmlx.inference.commands import NO_ADAPTER
from shardmlx.modelfiles.safetensors_header import read_header
from shardmlx.planning.loop import no_prompts_come_in

_FOR_SNAPSHOT = "/snapshot"
"""Name of a model that is there while a state becomes a snapshot; no client's has a slash first."""


@dataclass(slots=True)
class _Facts:
    """The LoRA of a model, and whether it has gradients."""

    lora: LoraOptions
    has_gradients: bool = False


@dataclass(slots=True)
class _Snapshot:
    """A snapshot: its number among adapters, and the samples that use it. It ``is_leaving`` once it
    was dropped."""

    number: int
    users: int = 0
    is_leaving: bool = False


@dataclass(eq=False)
class Models:
    """The models of a crew on the model ``base``. Methods that give commands are called on the
    thread of the crew; they raise ``UserError`` before any rank is told."""

    crew: Crew[LoopWorker]
    base: str
    store: StateStore | None = None
    most_snapshots: int = 1
    _facts: dict[str, _Facts] = field(default_factory=dict)
    _snapshots: dict[str, _Snapshot] = field(default_factory=dict)
    _count: int = NO_ADAPTER

    def close(self) -> None:
        """Let others have the directory of the saved states."""
        if self.store is not None:
            self.store.close()

    # Models.

    def check(self, model: str) -> _Facts:
        """Return what is known of a model."""
        try:
            return self._facts[model]
        except KeyError:
            raise UserError(f"there is no model {model!r}", "create one first") from None

    def create(self, request: CreateModel) -> str:
        """Make a model, new or of a saved state; return its name."""
        name = request.name
        if not name or name.startswith("/") or name in self._facts:
            raise UserError(f"a model cannot be called {name!r}, or is there", "give another name")
        most = self.crew.worker.plan.most_models
        if len(self._facts) >= most:
            raise NoRoom(
                f"there are {most} models already", "unload one, or start with more --max-adapters"
            )
        saved = None if request.state is None else self._find(request.state)
        lora = request.lora or LoraOptions()
        if saved is not None:
            lora = saved.saved.lora
        self._build(name, lora, saved)
        self.crew.all(LoopWorker.start, name)
        if saved is not None:
            try:
                self._take(name, saved, with_optimizer=request.with_optimizer)
            except UserError:
                self.crew.all(LoopWorker.unload, name)  # it would take room that nobody can free
                raise
        self._facts[name] = _Facts(lora)
        return name

    def unload(self, model: str) -> None:
        """Forget a model."""
        self.check(model)
        del self._facts[model]
        self.crew.all(LoopWorker.unload, model)

    def has_gradients(self, model: str) -> None:
        """Note that gradients are added to a model's."""
        self.check(model).has_gradients = True

    def forget_gradients(self, model: str) -> None:
        """Drop a model's gradients, if it is still there."""
        if model in self._facts:
            self._facts[model].has_gradients = False
            self.crew.all(LoopWorker.forget_gradients, model)

    def begin_update(self, model: str, step: OptimStep) -> Pending[float]:
        """Begin an update, which returns the norm of the gradients."""
        facts = self.check(model)
        if not facts.has_gradients:
            raise UserError(
                f"model {model!r} has no gradients", "call forward_backward before optim_step"
            )
        facts.has_gradients = False
        return self.crew.begin(LoopWorker.update, model, step)

    def _build(self, name: str, lora: LoraOptions, saved: StateFile | None) -> None:
        """Build a LoRA on all ranks; one that fails on any is nowhere."""
        modules = self.crew.worker.keys.chosen(lora)
        if saved is not None and sorted(saved.modules) != sorted(modules):
            raise UserError(
                f"state {saved.saved.state!r} trains other modules than this version would",
                "load it with the version that saved it",
            )
        try:
            self.crew.all(LoopWorker.build, name, lora)
        except UserError:
            self.crew.all(LoopWorker.unload, name)
            raise

    # States.

    def states(self) -> Sequence[SavedState]:
        """Return all saved states, the oldest first."""
        return [] if self.store is None else self.store.all()

    def save(self, request: SaveState) -> SavedState:
        """Save a model as a state."""
        facts = self.check(request.model)
        store = self._store()
        store.check_new(request.state, overwrite=request.overwrite)
        has_optimizer = not request.for_sampler
        worker = self.crew.worker
        held = self.crew.all(LoopWorker.held, request.model, has_optimizer)
        saved = SavedState(request.state, facts.lora, 0, 0.0, has_optimizer, request.note)
        state = store.new(
            saved,
            worker.opened.digest,
            worker.keys.chosen(facts.lora),
            worker.steps_made(request.model),
        )
        why = self.crew.all(
            LoopWorker.save, request.model, Collection.of(held), state.file, state.metadata()
        )[0]
        if why is not None:
            raise UserError(f"state {request.state!r} was not saved: {why}")
        return store.add(state)

    def load(self, request: LoadState) -> None:
        """Put a state into a model."""
        facts = self.check(request.model)
        saved = self._find(request.state)
        if (saved.saved.lora.rank, _parts(saved.saved.lora)) != (
            facts.lora.rank,
            _parts(facts.lora),
        ):
            raise UserError(
                f"state {request.state!r} is of another LoRA: {saved.saved.lora}",
                "create a model from it",
            )
        self._take(request.model, saved, with_optimizer=request.with_optimizer)

    def delete(self, state: str) -> None:
        """Delete a state."""
        self._store().delete(state)

    def export(self, state: str) -> bytes:
        """Return a tar archive of a state's adapter. May be called on any thread."""
        found = self._store().find(state)
        return archive(found, self.base, tied=self.crew.worker.opened.shape.tied)

    def _store(self) -> StateStore:
        if self.store is None:
            raise UserError("there is no directory for saved states", "start with --state-dir")
        return self.store

    def _find(self, state: str) -> StateFile:
        """Return a state of this base."""
        found = self._store().find(state)
        if found.base != self.crew.worker.opened.digest:
            raise UserError(
                f"state {state!r} was saved with another base model", "serve that one to load it"
            )
        return found

    def _take(self, model: str, saved: StateFile, *, with_optimizer: bool) -> None:
        """Put a state's tensors into a model that has its LoRA."""
        if with_optimizer and not saved.saved.has_optimizer:
            raise UserError(
                f"state {saved.saved.state!r} has no optimizer's state: it was saved for a sampler",
                "load it without",
            )
        held = self.crew.all(LoopWorker.held, model, with_optimizer)
        _check_tensors(saved, held)
        wanted = self.crew.all(LoopWorker.wanted, model, with_optimizer)
        specs = [spec for _, of_rank in Collection.of(held).sources for spec in of_rank]
        specs.sort(key=lambda spec: spec.name)  # the order in which rank 0 gives them
        self.crew.all(LoopWorker.take, model, saved.file, specs, wanted)
        steps = saved.steps if with_optimizer else 0
        self.crew.all(LoopWorker.begin_optimizer, model, steps, not with_optimizer)
        if model in self._facts:
            self.forget_gradients(model)

    # Snapshots.

    def take_snapshot(self, request: TakeSnapshot) -> None:
        """Keep a model's weights, or a state's, in memory."""
        name = request.snapshot
        if not name or name in self._snapshots:
            raise UserError(f"a snapshot cannot be called {name!r}, or is there", "give another")
        if len(self._snapshots) >= self.most_snapshots:
            raise NoRoom(
                f"there are {self.most_snapshots} snapshots already", "drop one of them first"
            )
        if self.crew.worker.plan.route is None:
            raise no_prompts_come_in(self.crew.worker.plan.plan.stage_map)
        number = self._count + 1
        if request.model is not None:
            self.check(request.model)
            self.crew.all(LoopWorker.take_snapshot, number, request.model)
        elif request.state is not None:
            saved = self._find(request.state)
            if request.saved_at not in (None, saved.saved.saved_at):
                raise UserError(
                    f"state {request.state!r} was saved anew since this client read it",
                    "create another sampling client",
                )
            self._build(_FOR_SNAPSHOT, saved.saved.lora, saved)
            try:
                self._take(_FOR_SNAPSHOT, saved, with_optimizer=False)
                self.crew.all(LoopWorker.take_snapshot, number, _FOR_SNAPSHOT)
            finally:
                self.crew.all(LoopWorker.unload, _FOR_SNAPSHOT)
        else:
            raise UserError("a snapshot of nothing", "name a model, or a saved state")
        self._count = number
        self._snapshots[name] = _Snapshot(number)

    def drop_snapshot(self, snapshot: str) -> None:
        """Take no more samples of a snapshot, which goes with ``forget_snapshots``."""
        self._snapshot(snapshot).is_leaving = True

    def begin_sample(self, snapshot: str | None) -> int:
        """Note that a sample uses a snapshot, or the base; return the number of its adapter."""
        if snapshot is None:
            return NO_ADAPTER
        found = self._snapshot(snapshot)
        found.users += 1
        return found.number

    def end_sample(self, snapshot: str | None) -> None:
        """Note that a sample has ended."""
        if snapshot is not None:
            self._snapshots[snapshot].users -= 1

    def leaving_snapshots(self) -> list[int]:
        """Return the numbers of the snapshots that were dropped, and that no sample uses."""
        return [
            each.number for each in self._snapshots.values() if each.is_leaving and not each.users
        ]

    def forget_snapshots(self) -> None:
        """Forget these on all ranks."""
        for number in self.leaving_snapshots():
            self.crew.all(LoopWorker.drop_snapshot, number)
        self._snapshots = {
            name: each
            for name, each in self._snapshots.items()
            if not each.is_leaving or each.users
        }

    def _snapshot(self, snapshot: str) -> _Snapshot:
        found = self._snapshots.get(snapshot)
        if found is None or found.is_leaving:
            raise UserError(f"there is no snapshot {snapshot!r}", "take one first")
        return found


def _parts(lora: LoraOptions) -> tuple[bool, bool, bool]:
    return lora.attention, lora.mlp, lora.unembed


def _check_tensors(saved: StateFile, held: Sequence[HeldWeights]) -> None:
    """Raise ``UserError`` unless a state's file has all tensors that ranks hold."""
    there = read_header(saved.file).tensors
    for _, specs in Collection.of(held).sources:
        for spec in specs:
            found = there.get(spec.name)
            if found is None or (found.shape, found.dtype) != (spec.shape, spec.dtype):
                raise UserError(
                    f"state {saved.saved.state!r}: {saved.file} has no {spec.name} of "
                    f"{spec.shape} {spec.dtype}",
                    "load it with the version that saved it",
                )
