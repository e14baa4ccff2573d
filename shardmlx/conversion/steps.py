"""The common steps of an export by one process or several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version

from shardmlx.common.digests import bytes_digest
from shardmlx.common.durable_files import why_not_written
from shardmlx.common.formatting import count, gibibytes, plural
from shardmlx.common.reporter import Reporter
from shardmlx.config.export import ExportOptions
from shardmlx.conversion.lazy_model import LazyModel
from shardmlx.conversion.output import OutputDirectory
from shardmlx.conversion.shards import Shards
from shardmlx.conversion.writer import Crc32, write_tensors
from shardmlx.errors import UserError
from shardmlx.loading.partial_copy import PartialCopy

SMALL_FILES = 64 << 20
"""Bytes kept free on the disk for configuration and tokenizer."""


def identity_of(
    options: ExportOptions, model: str, adapters: str, shards: Shards
) -> dict[str, str]:
    """Return an export's identity, equal for equal bytes; ``model`` and ``adapters`` name
    content."""
    heads = b"".join(
        head
        for rank in sorted(set(shards.writers.values()))
        for head in shards.manifest(rank, "").heads.values()
    )
    return {
        "model": options.model,
        "content of the model": model,
        "adapters": adapters,
        "quantize": str(options.quantize),
        "dequantize": str(options.dequantize),
        "dtype": str(options.dtype),
        "gguf": str(options.gguf),
        "layout": bytes_digest(heads),
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
    }


def announce(options: ExportOptions, model: LazyModel, shards: Shards, reporter: Reporter) -> None:
    """Print the coming output."""
    reporter.say(
        f"{options.model}: {count(model.parameters)} parameters, "
        f"{plural(len(model.weights), 'tensor')} of {gibibytes(shards.nbytes)}, "
        f"{model.bits_per_weight:.2f} bits a parameter"
    )


def write_files(
    output: OutputDirectory,
    model: LazyModel,
    shards: Shards,
    rank: int,
    reporter: Reporter,
    *,
    bring: Callable[[str], None],
    drop: Callable[[], None],
    goes_on: bool,
    may_stop: bool,
) -> None:
    """Write the files of a rank; ``model`` is used up.

    ``bring`` is called before a tensor, or an expert, is computed, ``drop`` to clear the source
    from the page cache; it ``goes_on`` with existing files. Raises ``UserError``, or ``Stopped`` if
    it ``may_stop``.
    """
    files = shards.of(rank)
    manifest = shards.manifest(rank, "")
    copy = PartialCopy(output.rank(rank), manifest, kept=True, option="-o", new_digest=Crc32)
    try:
        names = [spec.name for specs in files.values() for spec in specs]
        done = copy.sound(names) if goes_on else set()
        if done:
            reporter.say(f"going on: {len(done)} of {plural(len(names), 'tensor')} are written")
        write_tensors(model, files, done, copy, reporter, bring, drop, may_stop=may_stop)
    except OSError as error:
        raise not_written(output, error, sum(manifest.sizes.values())) from None
    finally:
        copy.close()


def complete(output: OutputDirectory, texts: Mapping[str, bytes]) -> None:
    """Write all files but tensors; from now on the export is complete. Raises ``UserError``."""
    try:
        output.complete(texts)
    except OSError as error:
        raise not_written(output, error, sum(map(len, texts.values()))) from None


def not_written(output: OutputDirectory, error: OSError, nbytes: int) -> UserError:
    """Return the error for a disk that refuses ``nbytes``."""
    return UserError(
        f"-o {output.path}: {why_not_written(error, output.path, nbytes)}, and give the same "
        "command again: it goes on where it was"
    )
