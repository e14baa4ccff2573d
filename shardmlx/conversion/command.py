"""The command ``shardmlx export``: look, build lazily, write tensor by tensor, publish.

On several ranks each computes the tensors of its own layers, from its own weights, and writes its
own files, which is enough if all see the same disk. If not, each machine keeps its own, and a line
says how to bring them to rank 0's.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shardmlx.checkpoint.export import TensorSpec, specs_of
from shardmlx.common.environment import Blas
from shardmlx.common.formatting import gibibytes, plural
from shardmlx.common.process_memory import peak_resident_bytes
from shardmlx.common.reporter import Reporter
from shardmlx.config.export import ExportOptions
from shardmlx.config.specs import ModelSource
from shardmlx.conversion.lazy_model import LazyModel, build_lazily
from shardmlx.conversion.output import SMALL_FILES, OutputDirectory, identity_of
from shardmlx.conversion.shards import Shards, plan_shards, texts_of
from shardmlx.conversion.sources import Source, Trained, find_trained, in_directory, open_source
from shardmlx.conversion.writer import write_files
from shardmlx.distributed.agreement import AgreedError, from_rank_0, on_all_ranks, on_rank_0
from shardmlx.distributed.shared_disks import Disks, find_disks
from shardmlx.distributed.transport import Transport
from shardmlx.errors import AgreedFailure
from shardmlx.loading.rank_setup import (
    SETUP_SECONDS,
    OpenedModel,
    open_on_all_ranks,
    use_device,
)
from shardmlx.modelfiles.model_files import read_model
from shardmlx.modelfiles.parts import EMBEDDING, part_of
from shardmlx.modelfiles.sources import SUFFIX, Directory
from shardmlx.modelfiles.verify import verify
from shardmlx.models.shape import ModelShape

_WHAT = "exporting"

Range = tuple[int, int]
"""Layers of a rank: from, up to."""


def run(options: ExportOptions, transport: Transport, blas: Blas) -> None:
    """Export as ``options`` say. All ranks must call it. Raises ``AgreedError`` for the user's
    mistakes, ``AgreedFailure`` if ``--verify`` finds a fault, ``Stopped`` after Ctrl-C."""
    reporter = Reporter(quiet=transport.rank != 0)
    started = time.monotonic()
    is_whole = export(options, transport, reporter)
    if transport.rank == 0:
        _report(options, time.monotonic() - started, is_whole, reporter)


def _report(options: ExportOptions, seconds: float, is_whole: bool, reporter: Reporter) -> None:
    path = Path(options.output_dir)
    weights = [file for file in path.iterdir() if file.suffix == SUFFIX]
    nbytes = sum(file.stat().st_size for file in weights)
    reporter.say(
        f"{path}: {plural(len(weights), 'file')} of weights, {gibibytes(nbytes)}, in "
        f"{seconds:.1f} s; peak memory {gibibytes(peak_resident_bytes())}"
    )
    if options.verify and is_whole:
        verification = verify(read_model(Directory(path)))
        for line in (*verification.checked, *verification.faults):
            reporter.say(line)
        if verification.faults:
            raise AgreedFailure(f"--verify: {plural(len(verification.faults), 'fault')}")


def export(options: ExportOptions, transport: Transport, reporter: Reporter) -> bool:
    """Export; return whether rank 0's disk has all of it. Collective. Raises ``AgreedError``, or
    ``Stopped`` on one rank."""
    output = OutputDirectory(Path(options.output_dir))
    disks = find_disks(transport, output.path.absolute().parent, make=transport.size > 1)
    state = on_all_ranks(transport, _WHAT, lambda: output.state)
    everywhere = transport.all_gather(state, _WHAT)
    is_written = "complete" in everywhere and {*everywhere} <= {"complete", "published"}
    if not is_written:
        on_all_ranks(transport, _WHAT, output.check)
        with transport.longer_timeout(SETUP_SECONDS):
            _Export(options, output, disks, transport, reporter).write()
    if disks.leads(transport.rank) and output.work.is_dir():
        output.publish()
    transport.barrier(_WHAT)
    for group in disks.groups[1:]:
        there = f"{transport.hosts[group[0]]}:{output.path.absolute()}"
        reporter.say(
            f"{transport.name(group[0])} keeps its files in its own {options.output_dir}: bring "
            f"them here with rsync -a {there}/ {options.output_dir}/"
        )
    return len(disks.groups) == 1


@dataclass(frozen=True, slots=True)
class _Export:
    """An export. All ranks must call its methods, which raise ``AgreedError``."""

    options: ExportOptions
    output: OutputDirectory
    disks: Disks
    transport: Transport
    reporter: Reporter

    def write(self) -> None:
        """Compute and write the tensors of all ranks, and the other files."""
        options, output, transport = self.options, self.output, self.transport
        leads = self.disks.leads(transport.rank)
        trained, adapters = self._find_trained()
        with self._open(adapters) as (source, opened):
            if opened is not None and trained is not None and adapters is not None:
                here = tuple(Path(str(opened.adapters)) / file.name for file in trained.files)
                trained = replace(trained, files=here)
            build = partial(_build, source, trained, options)
            model = on_all_ranks(transport, "building the model", build)
            if opened is not None:
                ranges = divide_layers(model, opened.shape, transport.size)
                shards = _plan(model, opened.shape, ranges, options.max_shard)
            else:
                shards = plan_shards([specs_of(model.weights)], options.max_shard)
            identity = self._identity(source, trained, shards)
            check = partial(self._check, identity, shards, SMALL_FILES + source.largest)
            goes_on = on_all_ranks(transport, _WHAT, check)
            on_all_ranks(transport, _WHAT, lambda: output.begin(identity) if leads else None)
            self.reporter.say(f"{options.model}: {model.describe(shards.nbytes)}")
            describe = partial(texts_of, model, shards, source.path, source.repository)
            texts = on_rank_0(transport, _WHAT, describe)
            source.watch(model.read, model.computed())
            model.read.clear()
            if opened is not None:
                opened.weights.bring([ranges[transport.rank]], opened.shape, self.reporter)
            # mpirun ends all ranks at once, so that none of several may stop.
            write = partial(write_files, goes_on=goes_on, may_stop=transport.size == 1)
            on_all_ranks(
                transport,
                "writing tensors",
                lambda: write(output, model, shards, transport.rank, self.reporter, source.bring),
            )
        # Rank 0, which has the rest, writes the completion marker last.
        is_kept = leads and transport.rank != 0
        on_all_ranks(transport, _WHAT, lambda: output.complete({}) if is_kept else None)
        on_rank_0(transport, _WHAT, lambda: output.complete(texts or {}))

    def _find_trained(self) -> tuple[Trained | None, str | None]:
        """Return the trained weights, and the directory of adapters that rank 0 gives to others."""
        path = self.options.adapter_path

        def find() -> Trained | None:
            return None if path is None else find_trained(path)

        trained = from_rank_0(self.transport, _WHAT, find)
        if trained is None or not trained.is_checkpoint or self.transport.size == 1:
            return trained, path
        # Each rank looks for a checkpoint itself.
        return on_all_ranks(self.transport, _WHAT, find), None

    @contextmanager
    def _open(self, adapters: str | None) -> Iterator[tuple[Source, OpenedModel | None]]:
        """Open the model, and on several ranks what each brings of its own layers."""
        options, transport = self.options, self.transport
        if transport.size > 1:
            asked = ModelSource.of(options)
            with open_on_all_ranks(transport, self.reporter, asked, adapters) as opened:
                find = partial(in_directory, opened.path)
                identity = from_rank_0(transport, _WHAT, lambda: find().identity)
                yield Source(opened.path, identity), opened
            return
        use_device(options.device, transport, self.reporter.say)
        alone = open_source(options.model, options.revision, self.output.source)
        with ExitStack() as stack:
            yield on_all_ranks(transport, _WHAT, lambda: stack.enter_context(alone)), None

    def _identity(self, source: Source, trained: Trained | None, shards: Shards) -> dict[str, str]:
        """Return the identity of the export, before weights are brought."""
        adapters = "none" if trained is None else trained.identity
        own = identity_of(self.options, source.identity, adapters, shards)
        layouts = self.transport.all_gather(own["layout"], _WHAT)
        name = self.transport.name
        for rank, theirs in enumerate(layouts):
            if theirs != layouts[0]:
                raise AgreedError(
                    f"{name(rank)} would write other tensors than {name(0)}",
                    "give all ranks the same model and adapters",
                )
        identity: dict[str, str] = self.transport.broadcast(own, what=_WHAT)
        return identity

    def _check(self, identity: Mapping[str, str], shards: Shards, more: int) -> bool:
        """Refuse another export, or a small disk; tell if this one goes on. Not collective."""
        goes_on = self.output.check_same(identity)
        rank, disks = self.transport.rank, self.disks
        if disks.leads(rank):
            self.output.check_room(shards, disks.groups[disks.of(rank)], more)
        return goes_on


def _build(source: Source, trained: Trained | None, options: ExportOptions) -> LazyModel:
    model = build_lazily(source.path, trained, options, has_files=source.has_files)
    gc.collect()  # modules hold unused weights, in cycles
    return model


def divide_layers(model: LazyModel, shape: ModelShape, ranks: int) -> list[Range]:
    """Return each rank's layers, of about equal bytes. ``AgreedError`` if there are too few."""
    count = shape.num_layers
    if ranks > count:
        raise AgreedError(f"{ranks} ranks, but the model has {count} layers", "use fewer ranks")
    nbytes = [0] * count
    for spec in specs_of(model.weights):
        nbytes[_layer(spec.name, shape)] += spec.nbytes
    total, before, start, ranges = sum(nbytes), 0, 0, []
    for rank in range(ranks):
        stop = start
        # A layer belongs to the rank whose share contains its middle; each rank has at least one.
        while stop < count - (ranks - rank - 1) and (
            stop == start
            or rank == ranks - 1
            or (before + nbytes[stop] / 2) * ranks < total * (rank + 1)
        ):
            before += nbytes[stop]
            stop += 1
        ranges.append((start, stop))
        start = stop
    return ranges


def _layer(name: str, shape: ModelShape) -> int:
    """Return the layer whose rank writes a tensor: the first for the embedding, else the last."""
    part = part_of(name, shape)
    if isinstance(part, int):
        return part
    return 0 if part == EMBEDDING else shape.num_layers - 1


def _plan(model: LazyModel, shape: ModelShape, ranges: Sequence[Range], most: int) -> Shards:
    of_ranks: list[list[TensorSpec]] = [[] for _ in ranges]
    for spec in specs_of(model.weights):
        layer = _layer(spec.name, shape)
        rank = next(r for r, (start, stop) in enumerate(ranges) if start <= layer < stop)
        of_ranks[rank].append(spec)
    return plan_shards(of_ranks, most)
