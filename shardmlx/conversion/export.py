"""An export: look, build lazily, write tensor by tensor, publish.

Names, shapes and types of the tensors are enough to know the headers of all files at once.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory

from mlx_lm.utils import save_config

from shardmlx.checkpoint.export import COPIED_SUFFIXES, TensorSpec, safetensors_header, specs_of
from shardmlx.common.formatting import count, gibibytes, plural
from shardmlx.common.process_memory import peak_resident_bytes
from shardmlx.common.reporter import Reporter
from shardmlx.config.export import ExportOptions
from shardmlx.conversion.lazy_model import LazyModel, build_lazily
from shardmlx.conversion.output import SMALL_FILES, OutputDirectory, identity_of
from shardmlx.conversion.sources import Source, Trained, find_trained, open_source
from shardmlx.conversion.writer import write_files
from shardmlx.errors import file_access
from shardmlx.loading.manifest import ModelManifest
from shardmlx.loading.rank_setup import use_device
from shardmlx.loading.tokenizer import ends_of
from shardmlx.modelfiles.model_files import read_model
from shardmlx.modelfiles.safetensors_header import INDEX_FILE, LENGTH_BYTES, parse_header
from shardmlx.modelfiles.sources import ADAPTER_CONFIG_FILE, CONFIG_FILE, SUFFIX, Directory
from shardmlx.modelfiles.verify import verify
from shardmlx.models.sizes.config_reader import read_config

_COPIED = (*(f"*{suffix}" for suffix in COPIED_SUFFIXES), "*.py", "*.tiktoken")
_NOT_COPIED = (
    CONFIG_FILE,
    ADAPTER_CONFIG_FILE,
    "*.index.json",
    "*quant*config.json",  # other programs' packing, which no longer holds
    "trainer_state.json",
)


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
    try:
        if not output.is_complete:
            output.check()
            use_device(options.device, reporter.say)
            trained = None if options.adapter_path is None else find_trained(options.adapter_path)
            with open_source(options.model, options.revision, output.source) as source:
                _write(source, trained, options, output, reporter)
        output.publish()
    finally:
        output.release()


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


def divide(specs: Iterable[TensorSpec], most: int) -> list[list[TensorSpec]]:
    """Return the tensors of each file of at most ``most`` bytes; a larger tensor is alone."""
    shards: list[list[TensorSpec]] = []
    filled = 0
    for spec in specs:
        if not shards or filled + spec.nbytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    return shards


def plan_shards(specs: Iterable[TensorSpec], most: int) -> ModelManifest:
    """Divide tensors into the files that mlx-lm writes; return the beginning of these."""
    shards = divide(specs, most)
    headers = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        if len(shards) == 1:
            file = "model.safetensors"
        head = safetensors_header(shard)
        size = len(head) + sum(spec.nbytes for spec in shard)
        headers[file] = parse_header(head[LENGTH_BYTES:], size, file)
    return ModelManifest("", {}, headers)


def texts_of(
    model: LazyModel, shards: ModelManifest, source: Path, repository: str | None
) -> dict[str, bytes]:
    """Return the content of each file but tensors, as mlx-lm writes it; the tokenizer is
    ``source``'s, and README.md tells the hub the base of the model. Raises ``UserError``."""
    places = {name: place.file for name, place in shards.tensors().items()}
    index = {
        "metadata": {"total_size": shards.nbytes, "total_parameters": model.parameters},
        "weight_map": dict(sorted(places.items())),
    }
    card = ["---", "library_name: mlx", "pipeline_tag: text-generation", "tags:", "- mlx"]
    if repository is not None:
        card.append(f"base_model: {repository}")
    return {
        **dict(_copies(source)),
        "README.md": ("\n".join([*card, "---"]) + "\n").encode(),
        INDEX_FILE: json.dumps(index, indent=4).encode(),
        CONFIG_FILE: _config(model, source),
    }


def _copies(source: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(source.iterdir()):
        is_text = any(fnmatchcase(path.name, pattern) for pattern in _COPIED)
        if is_text and not any(fnmatchcase(path.name, pattern) for pattern in _NOT_COPIED):
            with file_access("read", path):
                text = path.read_bytes()
            yield path.name, text


def _config(model: LazyModel, source: Path) -> bytes:
    config = dict(model.config)
    # mlx-lm puts the ends of generation_config.json in place of config.json's.
    if len(ends := ends_of(source, read_config(source))) > 1:
        config["eos_token_id"] = ends
    with TemporaryDirectory() as directory:
        path = Path(directory) / CONFIG_FILE
        save_config(config, path, keep_vision_config=model.keeps_vision)
        return path.read_bytes()
