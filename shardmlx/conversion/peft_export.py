"""Write adapters alone, in the form that PEFT, vLLM and llama.cpp's converter read."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from shardmlx.checkpoint.export import safetensors_pieces, specs_of
from shardmlx.common.durable_files import NewFiles, why_not_written
from shardmlx.common.formatting import gibibytes, plural
from shardmlx.common.reporter import Reporter
from shardmlx.config.export import ExportOptions
from shardmlx.conversion.sources import find_trained
from shardmlx.errors import UserError, naming
from shardmlx.loading.adapters import read_tensors
from shardmlx.loading.peft import PEFT_FILE, from_peft, is_peft, to_peft
from shardmlx.loading.rank_setup import use_device
from shardmlx.modelfiles.model_files import ModelFiles, open_model
from shardmlx.modelfiles.parts import needed_shape, planned_tensors
from shardmlx.modelfiles.sources import ADAPTER_CONFIG_FILE

COMMON = ("model.layers.", "model.embed_tokens", "model.language_model.", "lm_head")
"""Beginnings of names that mlx-lm and transformers have in common."""


def export_peft(options: ExportOptions, reporter: Reporter) -> None:
    """Write the adapters as PEFT's two files, from the headers of the model alone. Raises
    ``UserError``."""
    directory = Path(options.output_dir)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        what = "is not empty" if directory.is_dir() else "is a file"
        raise UserError(f"-o {directory} {what}", "name a new directory")
    use_device(options.device, reporter.say)
    trained = find_trained(str(options.adapter_path))
    files = open_model(options.model, options.revision)
    names = files.tensors or planned_tensors(files.config)
    modules = {name.rpartition(".")[0] for name in names}
    weights = read_tensors(trained.files)
    config = dict(trained.config)
    with naming(f"--adapter-path {trained.name}"):
        if is_peft(config):
            weights, config = from_peft(config, weights, modules)
        tied = needed_shape(files).tied
        tensors, described = to_peft(config, weights, options.model, tied=tied)
        for target in described["target_modules"]:
            _check_name(files, modules, target)
    specs = specs_of(tensors)
    content = safetensors_pieces(specs, tensors.items())
    new = NewFiles(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        new.write(PEFT_FILE, content)
        new.write(ADAPTER_CONFIG_FILE, [(json.dumps(described, indent=2) + "\n").encode()])
        new.publish()
    except OSError as error:
        new.discard()
        nbytes = sum(spec.nbytes for spec in specs)
        raise UserError(f"-o {directory}: {why_not_written(error, directory, nbytes)}") from None
    size = gibibytes(sum(spec.nbytes for spec in specs))
    count = plural(len(described["target_modules"]), "module")
    reporter.say(f"{directory}: {config['fine_tune_type']} of {count} as PEFT's, {size}")


def _check_name(files: ModelFiles, modules: Collection[str], target: str) -> None:
    """Raise ``UserError`` for a module that transformers may call otherwise. Files that were
    converted for MLX have mlx-lm's names, which are transformers' in most families."""
    is_converted = any(each.metadata.get("format") == "mlx" for each in files.headers.values())
    if target.startswith(COMMON) if is_converted or not files.tensors else target in modules:
        return
    raise UserError(
        f"{target} has adapters, and {files.name} does not show what transformers calls it",
        "name the model that the adapters are for as it was before its conversion for MLX",
    )
