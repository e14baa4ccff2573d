"""The command ``shardmlx export``: look, build lazily, write tensor by tensor, publish."""

from __future__ import annotations

import gc
import time
from importlib.metadata import version
from pathlib import Path

from shardmlx.common.digests import bytes_digest
from shardmlx.common.durable_files import why_not_written
from shardmlx.common.environment import Blas
from shardmlx.common.formatting import count, gibibytes, plural
from shardmlx.common.process_memory import peak_resident_bytes
from shardmlx.common.reporter import Reporter
from shardmlx.config.export import ExportOptions
from shardmlx.conversion.lazy_model import LazyModel, build_lazily
from shardmlx.conversion.output import OutputDirectory
from shardmlx.conversion.shards import Shards, plan_shards, specs_of
from shardmlx.conversion.sources import Source, open_source
from shardmlx.conversion.texts import texts_of
from shardmlx.conversion.trained import Trained, find_trained
from shardmlx.conversion.writer import write_tensors
from shardmlx.distributed.agreement import AgreedError, on_all_ranks
from shardmlx.distributed.transport import Transport
from shardmlx.errors import AgreedFailure, UserError
from shardmlx.loading.partial_copy import PartialCopy
from shardmlx.modelfiles.model_files import read_model
from shardmlx.modelfiles.sources import Directory
from shardmlx.modelfiles.verify import verify

_SMALL_FILES = 64 << 20
"""Bytes kept free on the disk for configuration and tokenizer."""


def run(options: ExportOptions, transport: Transport, blas: Blas) -> None:
    """Export as ``options`` say. All ranks must call it.

    Raises ``AgreedError`` for what the user can mend, before anything is written; ``AgreedFailure``
    where ``--verify`` finds a fault; ``Stopped`` after Ctrl-C.
    """
    if transport.size > 1:
        raise AgreedError(f"export on {transport.size} ranks", "run it without mpirun")
    reporter = Reporter(quiet=transport.rank != 0)
    on_all_ranks(transport, "exporting", lambda: export(options, reporter))


def export(options: ExportOptions, reporter: Reporter) -> None:
    """Export on one process. Raises ``UserError``, ``AgreedFailure`` or ``Stopped``."""
    started = time.monotonic()
    output = OutputDirectory(Path(options.output_dir).expanduser())
    output.check()
    trained = None if options.adapter_path is None else find_trained(options.adapter_path)
    if not output.is_complete:
        with open_source(options.model, options.revision, output.source) as source:
            _write(options, output, source, trained, reporter)
    output.publish()
    files = read_model(Directory(output.path))
    nbytes = sum(header.file_size for header in files.headers.values())
    reporter.say(
        f"{output.path}: {plural(len(files.headers), 'file')} of weights, {gibibytes(nbytes)}, in "
        f"{time.monotonic() - started:.1f} s; peak memory {gibibytes(peak_resident_bytes())}"
    )
    if options.verify:
        verification = verify(files)
        for line in (*verification.checked, *verification.faults):
            reporter.say(line)
        if verification.faults:
            raise AgreedFailure(f"--verify: {plural(len(verification.faults), 'fault')}")


def _write(
    options: ExportOptions,
    output: OutputDirectory,
    source: Source,
    trained: Trained | None,
    reporter: Reporter,
) -> None:
    """Write all of the model into the working directory; nothing of it where that is refused."""
    model = build_lazily(source.path, trained, options)
    gc.collect()  # modules hold weights that were not used, in cycles
    shards = plan_shards([specs_of(model.weights)], options.max_shard)
    identity = _identity(options, source, trained, shards)
    goes_on = output.check_same(identity)
    manifest = shards.manifest(0, identity["layout"])
    sizes = {output.rank(0) / file: size for file, size in manifest.sizes.items()}
    output.check_room(sizes, _SMALL_FILES + source.largest)
    output.begin(identity)
    _announce(options, model, shards, reporter)
    texts = texts_of(model, shards, source.path, source.repository)
    copy = PartialCopy(output.rank(0), manifest, kept=True, option="-o")
    try:
        done = copy.sound(model.weights) if goes_on else set()
        if done:
            tensors = plural(len(model.weights), "tensor")
            reporter.say(f"going on: {len(done)} of {tensors} are written")
        write_tensors(model, shards.of(0), done, source, copy, reporter)
        output.complete(texts)
    except OSError as error:
        nbytes = sum(manifest.sizes.values())
        raise UserError(
            f"-o {output.path}: {why_not_written(error, output.path, nbytes)}, and give the same "
            "command again: it goes on where it was"
        ) from None
    finally:
        copy.close()


def _identity(
    options: ExportOptions, source: Source, trained: Trained | None, shards: Shards
) -> dict[str, str]:
    """Return what makes two exports the same, to the byte."""
    return {
        "model": options.model,
        "content of the model": source.identity,
        "adapters": "none" if trained is None else trained.identity,
        "quantize": str(options.quantize),
        "dequantize": str(options.dequantize),
        "dtype": str(options.dtype),
        "layout": bytes_digest(b"".join(shards.manifest(0, "").heads.values())),
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
    }


def _announce(options: ExportOptions, model: LazyModel, shards: Shards, reporter: Reporter) -> None:
    reporter.say(
        f"{options.model}: {count(model.parameters)} parameters, "
        f"{plural(len(model.weights), 'tensor')} of {gibibytes(shards.nbytes)}, "
        f"{model.bits_per_weight:.2f} bits a parameter"
    )
