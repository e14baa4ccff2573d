"""Identify the run that a checkpoint belongs to: model, data, optimizer, and other facts that
decide the losses.

Layout, number of steps, reports and paths may change during a run. No MLX, no MPI.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardmlx.config.objective import ObjectiveOptions
from shardmlx.engine.batches import Sample
from shardmlx.errors import UserError, refusing
from shardmlx.modelfiles.safetensors_header import MODEL_FILES, ReadBytes, read_bytes
from shardmlx.modelfiles.sources import CONFIG_FILE

SAME_OPTIONS = (
    "fine_tune_type",
    "num_layers",
    "lora_parameters",
    "unfreeze_all",
    "resume_adapter_file",
    "batch_size",
    "grad_accumulation_steps",
    "max_seq_length",
    "mask_prompt",
    "max_grad_norm",
    "master_weights",
    "sum_dtype",
    "dtype",
    "seed",
    *(each.name for each in fields(ObjectiveOptions)),
)
"""The options that must stay the same in a run, compared by name."""

_PROBES = 16
_PROBE_BYTES = 1 << 16
_READERS = 8


def identity_of(
    options: Mapping[str, Any],
    model_path: Path,
    train: Sequence[Sample],
    valid: Sequence[Sample],
    read: ReadBytes | None = None,
) -> dict[str, Any]:
    """Return the identity of a run with these options of ``train``, as JSON; ``read`` reads weights
    that ``model_path`` lacks."""
    identity = {
        "model": {"name": options["model"], "sha256": _model(model_path, read)},
        "data": {
            "name": options["data"],
            "train": {"samples": len(train), "sha256": _samples(train)},
            "valid": {"samples": len(valid), "sha256": _samples(valid)},
        },
        "optimizer": {
            "name": options["optimizer"],
            "learning_rate": options["learning_rate"],
            "lr_schedule": options["lr_schedule"],
            "settings": options["optimizer_config"].get(options["optimizer"], {}),
        },
        "options": {name: options[name] for name in SAME_OPTIONS},
    }
    result: dict[str, Any] = json.loads(json.dumps(identity))
    return result


def check_identity(ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str | Path) -> None:
    """Raise `UserError` unless the checkpoint at ``where`` is of the same run."""
    with refusing(f"{where} does not say which run it is of", "take another one"):
        difference = next(_differences(ours, theirs), None)
    if difference is not None:
        problem, same = difference
        raise UserError(
            f"{where} {problem}", f"resume with {same}, or start anew with another --checkpoint-dir"
        )


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how the checkpoint's run differs from ours, and what would be the same."""
    now, then = ours["model"], theirs["model"]
    if now["sha256"] != then["sha256"]:
        what = f"{then['name']}, not {now['name']}"
        if now["name"] == then["name"]:
            what = f"{now['name']} had other weights or another config.json then"
        yield f"is a checkpoint of another model: {what}", "that model"
    now, then = ours["data"], theirs["data"]
    for name in ("train", "valid"):
        if now[name] != then[name]:
            yield (
                f"is a checkpoint of a run on other data: its {name} set came from {then['name']} "
                f"with {then[name]['samples']} samples, now it is {now['name']} with "
                f"{now[name]['samples']}, and the tokens differ",
                "the same data and tokenizer",
            )
    now, then = ours["optimizer"], theirs["optimizer"]
    if now != then:
        yield f"was made with the optimizer {_optimizer(then)}, not {_optimizer(now)}", "that"
    now, then = ours["options"], theirs["options"]
    for name, value in now.items():
        # A checkpoint of an older release lacks options that it did not know.
        if then.get(name, value) != value:
            yield f"was made with {name} {then[name]}, not {value}", "that"


def _optimizer(optimizer: Mapping[str, Any]) -> str:
    rate = optimizer["lr_schedule"] or optimizer["learning_rate"]
    return f"{optimizer['name']} {optimizer['settings']} with the learning rate {rate}"


def _model(path: Path, read: ReadBytes | None) -> str:
    """Return a digest of the configuration, and of the weights' headers and samples."""
    digest = hashlib.sha256((path / CONFIG_FILE).read_bytes())
    with ThreadPoolExecutor(_READERS) as pool:
        for file in sorted(path.glob(MODEL_FILES)):
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            offsets = [i * max(0, size - _PROBE_BYTES) // (_PROBES - 1) for i in range(_PROBES)]
            probe = partial(read or partial(read_bytes, path), file.name)
            for data in pool.map(probe, offsets, [min(_PROBE_BYTES, size)] * _PROBES):
                digest.update(data)
    return digest.hexdigest()


def _samples(samples: Iterable[Sample]) -> str:
    digest = hashlib.sha256()
    for tokens, start in samples:
        digest.update(np.array([len(tokens), start], np.int64).tobytes())
        digest.update(np.asarray(tokens, np.int64).tobytes())
    return digest.hexdigest()
