"""Find training results: adapters of ``train`` or ``mlx_lm.lora``, or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardmlx.checkpoint.store import MANIFEST, Store, step_of
from shardmlx.common.digests import bytes_digest
from shardmlx.errors import UserError
from shardmlx.loading.adapters import PEFT_FILE, PICKLED, find_adapters
from shardmlx.loading.manifest import fingerprint
from shardmlx.modelfiles.sources import ADAPTER_CONFIG_FILE, ADAPTER_FILE, CONFIG_FILE

_WEIGHTS = "weights-"


@dataclass(frozen=True, slots=True)
class Trained:
    """A run's result: a ``directory`` of adapters, or a checkpoint's ``files`` and its options."""

    name: str
    identity: str
    directory: Path | None = None
    files: tuple[Path, ...] = ()
    fine_tune_type: str = "lora"
    num_layers: int = 0
    lora_parameters: Mapping[str, Any] = field(default_factory=dict)


def find_trained(name: str) -> Trained:
    """Find adapters, or the (newest) checkpoint of a directory. Raises ``UserError``."""
    path = Path(name)
    if not path.is_dir():
        raise UserError(f"--adapter-path {name} is no directory", "name that of a finished run")
    has_tensors = any((path / file).is_file() for file in (ADAPTER_FILE, PEFT_FILE, PICKLED))
    if has_tensors and (path / ADAPTER_CONFIG_FILE).is_file():
        _, file = find_adapters(path)
        return Trained(name, fingerprint(path, [file.name]), path)
    if (step := step_of(path.absolute().name)) is not None and (path / MANIFEST).is_file():
        return _of_checkpoint(name, Store(path.absolute().parent), step)
    if steps := Store(path).steps():
        return _of_checkpoint(name, Store(path), steps[-1])
    if (path / CONFIG_FILE).is_file():
        raise UserError(
            f"--adapter-path {name} is a whole model", "name it as the MODEL to export, and no more"
        )
    raise UserError(
        f"--adapter-path {name} has no {ADAPTER_FILE} with its {ADAPTER_CONFIG_FILE}, and no "
        "complete checkpoint",
        "name the directory that train wrote",
    )


def _of_checkpoint(name: str, store: Store, step: int) -> Trained:
    manifest = store.manifest(step)
    files = [file for file in manifest.files if file.name.startswith(_WEIGHTS)]
    for file in files:
        if fault := store.fault(step, file):
            raise UserError(
                fault, "copy the checkpoint here whole, from every machine that has a part of it"
            )
    made_with = manifest.identity.get("options", {})
    try:
        return Trained(
            name=name,
            identity=bytes_digest(manifest.to_json()),
            files=tuple(store.path(step) / file.name for file in files),
            fine_tune_type=made_with["fine_tune_type"],
            num_layers=made_with["num_layers"],
            lora_parameters=made_with["lora_parameters"],
        )
    except KeyError:
        raise UserError(f"{store.path(step)} does not say how it was trained") from None
