"""An export: look, build lazily, write tensor by tensor, publish."""

from __future__ import annotations

import gc
from pathlib import Path

from shardmlx.checkpoint.export import specs_of
from shardmlx.common.formatting import count, gibibytes, plural
from shardmlx.common.process_memory import peak_resident_bytes
from shardmlx.common.reporter import Reporter
from shardmlx.config.export import ExportOptions
from shardmlx.conversion.lazy_model import build_lazily
from shardmlx.conversion.output import SMALL_FILES, OutputDirectory, identity_of
from shardmlx.conversion.shards import plan_shards, texts_of
from shardmlx.conversion.sources import Source, Trained, find_trained, open_source
from shardmlx.conversion.writer import write_files
from shardmlx.loading.rank_setup import use_device
from shardmlx.modelfiles.model_files import read_model
from shardmlx.modelfiles.sources import SUFFIX, Directory
from shardmlx.modelfiles.verify import verify


def report(options: ExportOptions, seconds: float, reporter: Reporter) -> int:
    """Say what was written, and what ``--verify`` finds; return the exit status."""
    path = Path(options.output_dir)
    weights = [file for file in path.iterdir() if file.suffix == SUFFIX]
    nbytes = sum(file.stat().st_size for file in weights)
    reporter.say(
        f"{path}: {plural(len(weights), 'file')} of weights, {gibibytes(nbytes)}, in "
        f"{seconds:.1f} s; peak memory {gibibytes(peak_resident_bytes())}"
    )
    if not options.verify:
        return 0
    checked, faults = verify(read_model(Directory(path)))
    for line in (*checked, *faults):
        reporter.say(line)
    return 1 if faults else 0


def export(options: ExportOptions, reporter: Reporter) -> None:
    """Export. Raises ``UserError``, or ``Stopped`` after Ctrl-C."""
    output = OutputDirectory(Path(options.output_dir))
    if not output.is_complete:
        output.check()
        use_device(options.device, reporter.say)
        trained = None if options.adapter_path is None else find_trained(options.adapter_path)
        with open_source(options.model, options.revision, output.source) as source:
            _write(source, trained, options, output, reporter)
    output.publish()


def _write(
    source: Source,
    trained: Trained | None,
    options: ExportOptions,
    output: OutputDirectory,
    reporter: Reporter,
) -> None:
    """Compute and write all tensors, and then the other files."""
    model = build_lazily(source.path, trained, options, has_files=source.has_files)
    gc.collect()  # modules hold unused weights, in cycles
    shards = plan_shards(specs_of(model.weights), options.max_shard)
    adapters = "none" if trained is None else trained.identity
    identity = identity_of(options, source.identity, adapters, shards)
    goes_on = output.check_same(identity)
    output.check_room(shards, SMALL_FILES + source.largest)
    output.begin(identity)
    reporter.say(
        f"{options.model}: {count(model.parameters)} parameters, "
        f"{plural(len(model.weights), 'tensor')} of {gibibytes(shards.nbytes)}, "
        f"{model.bits_per_weight:.2f} bits a parameter"
    )
    texts = texts_of(model, shards, source.path, source.repository)
    source.watch(model.read, model.computed())
    model.read.clear()
    write_files(output, model, shards, reporter, source.bring, goes_on=goes_on)
    output.complete(texts)
