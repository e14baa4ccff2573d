"""Directories of adapters: mlx-lm's, and PEFT's. No MLX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmlx.config.checks import FINE_TUNE_TYPES, check_lora_values
from shardmlx.errors import UserError
from shardmlx.modelfiles.sources import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from shardmlx.models.config_reader import parse_config

PEFT_FILE = "adapter_model.safetensors"
PEFT_TYPE = "peft_type"

PICKLED = "adapter_model.bin"

MERGE = "merge it into its model with PEFT (merge_and_unload), and name the result as the model"

_REFUSED = (
    *("modules_to_save", "layer_replication", "trainable_token_indices", "target_parameters"),
    *("lora_bias", "megatron_config", "alora_invocation_tokens", "arrow_config", "kasa_config"),
    "monteclora_config",
)
"""Settings of PEFT that train more than pairs of matrices, or use these otherwise."""

_MOVES_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of ``init_lora_weights`` that change the weights of the model too."""


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """Return the checked adapter_config.json of mlx-lm, or of a LoRA of PEFT, which has a
    ``peft_type``.

    Raises ``UserError`` that names the file.
    """
    file = directory / ADAPTER_CONFIG_FILE
    try:
        config = parse_config(file.read_bytes(), file)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from None
    try:
        if PEFT_TYPE in config:
            _check_peft(config)
        else:
            _check_own(config)
    except UserError as error:
        raise UserError(f"{file}: {error.problem}", error.remedy) from None
    return config


def adapter_file(directory: Path) -> str:
    """Return the name of the file with the tensors, whether or not it is there."""
    try:
        is_peft = PEFT_TYPE in parse_config((directory / ADAPTER_CONFIG_FILE).read_bytes(), "")
    except (UserError, OSError):
        return ADAPTER_FILE
    return PEFT_FILE if is_peft else ADAPTER_FILE


def check_adapter_file(file: Path) -> None:
    """Raise ``UserError`` unless the file with the tensors is there."""
    if file.is_file():
        return
    if file.name == PEFT_FILE and file.with_name(PICKLED).is_file():
        raise UserError(
            f"{file.with_name(PICKLED)} is pickled", f"save it with PEFT as {PEFT_FILE}"
        )
    raise UserError(f"there is no {file}")


def _check_own(config: Mapping[str, Any]) -> None:
    kind = config.get("fine_tune_type", "lora")
    if kind not in FINE_TUNE_TYPES:
        raise UserError(f"fine_tune_type is {kind!r}", f"one of {', '.join(FINE_TUNE_TYPES)}")
    if kind == "full":
        return
    layers, parameters = config.get("num_layers"), config.get("lora_parameters")
    if not isinstance(layers, int) or isinstance(layers, bool):
        raise UserError(f"num_layers is {layers!r}", "a whole number says which layers have them")
    if not isinstance(parameters, Mapping):
        raise UserError(f"lora_parameters is {parameters!r}", "a mapping says what they are")
    check_lora_values(parameters)


def _check_peft(config: Mapping[str, Any]) -> None:
    """Refuse any adapter but a plain LoRA, by its name."""
    kind = config[PEFT_TYPE]
    if kind != "LORA":
        raise UserError(f"peft_type {kind!r} is not LORA, which alone can be converted", MERGE)
    if config.get("use_dora"):
        raise UserError("DoRA of PEFT (use_dora) cannot be converted", MERGE)
    used = (key for key in config if key.startswith("use_") and key != "use_rslora")
    for key in (*used, *_REFUSED):
        if config.get(key):
            raise UserError(f"{key} of PEFT cannot be converted", MERGE)
    bias, init = config.get("bias") or "none", str(config.get("init_lora_weights", "")).lower()
    if bias != "none":
        raise UserError(f"bias {bias!r} of PEFT cannot be converted", MERGE)
    if init.startswith(_MOVES_WEIGHTS):
        raise UserError(f"init_lora_weights {init!r} of PEFT changes the model itself", MERGE)
    for key, kinds in (("r", int), ("lora_alpha", (int, float))):
        value = config.get(key)
        if not isinstance(value, kinds) or isinstance(value, bool) or value <= 0:
            raise UserError(f"{key} is {value!r}", "a number above 0, as PEFT writes it")
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, Mapping):
        raise UserError(f"alpha_pattern is {patterns!r}", "a mapping, as PEFT writes it")
