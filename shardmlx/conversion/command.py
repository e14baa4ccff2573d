"""The command ``shardmlx export``: look, build lazily, write tensor by tensor, publish."""

from __future__ import annotations

import gc
import time
from pathlib import Path

from shardmlx.checkpoint.export import specs_of
from shardmlx.common.environment import Blas
from shardmlx.common.formatting import gibibytes, plural
from shardmlx.common.process_memory import peak_resident_bytes
from shardmlx.common.reporter import Reporter
from shardmlx.config.export import ExportOptions
from shardmlx.conversion.gguf import as_gguf, check_gguf, plan_gguf
from shardmlx.conversion.lazy_model import build_lazily
from shardmlx.conversion.output import SMALL_FILES, OutputDirectory, identity_of
from shardmlx.conversion.ranks import export_on_ranks
from shardmlx.conversion.shards import Shards, plan_shards
from shardmlx.conversion.sources import Source, open_source
from shardmlx.conversion.texts import texts_of
from shardmlx.conversion.trained import Trained, find_trained
from shardmlx.conversion.writer import write_files
from shardmlx.distributed.agreement import AgreedError, on_all_ranks
from shardmlx.distributed.transport import Transport
from shardmlx.errors import AgreedFailure
from shardmlx.modelfiles.model_files import read_model
from shardmlx.modelfiles.sources import Directory
from shardmlx.modelfiles.verify import verify


def run(options: ExportOptions, transport: Transport, blas: Blas) -> None:
    """Export as ``options`` say. All ranks must call it.

    Raises ``AgreedError`` for the user's mistakes, ``AgreedFailure`` if ``--verify`` finds a fault,
    ``Stopped`` after Ctrl-C.
    """
    reporter = Reporter(quiet=transport.rank != 0)
    started = time.monotonic()
    if options.gguf and transport.size > 1:
        raise AgreedError(f"--gguf on {transport.size} ranks", "run it on one")
    if transport.size > 1:
        is_whole = export_on_ranks(options, transport, reporter)
    else:
        is_whole = True
        on_all_ranks(transport, "exporting", lambda: export(options, reporter))
    if transport.rank == 0:
        _report(options, time.monotonic() - started, is_whole, reporter)


def export(options: ExportOptions, reporter: Reporter) -> None:
    """Export on one process. Raises ``UserError`` or ``Stopped``."""
    output = OutputDirectory(Path(options.output_dir))
    output.check()
    trained = None if options.adapter_path is None else find_trained(options.adapter_path)
    if not output.is_complete:
        with open_source(options.model, options.revision, output.source) as source:
            _write(options, output, source, trained, reporter)
    output.publish()


def _write(
    options: ExportOptions,
    output: OutputDirectory,
    source: Source,
    trained: Trained | None,
    reporter: Reporter,
) -> None:
    """Write the whole model into the working directory; nothing if it is refused."""
    model = build_lazily(source.path, trained, options, has_files=source.has_files)
    gc.collect()  # modules hold unused weights, in cycles
    shards: Shards
    if options.gguf:
        check_gguf(model, source.path)
        model = as_gguf(model)
        shards = plan_gguf(model, source.path)
    else:
        shards = plan_shards([specs_of(model.weights)], options.max_shard)
    adapters = "none" if trained is None else trained.identity
    identity = identity_of(options, source.identity, adapters, shards)
    goes_on = output.check_same(identity)
    output.check_room(shards, [0], SMALL_FILES + source.largest)
    output.begin(identity)
    reporter.say(f"{options.model}: {model.describe(shards.nbytes)}")
    texts = {} if options.gguf else texts_of(model, shards, source.path, source.repository)
    source.watch(model)
    model.read.clear()
    write_files(output, model, shards, 0, reporter, source.bring, goes_on=goes_on, may_stop=True)
    output.complete(texts)


def _report(options: ExportOptions, seconds: float, is_whole: bool, reporter: Reporter) -> None:
    """Print the result; check it after ``--verify``."""
    path = Path(options.output_dir)
    weights = [file for file in path.iterdir() if file.suffix in (".safetensors", ".gguf")]
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
