"""The modules that a LoRA changes, found in a model of mlx-lm, and what other programs are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from shardmlx.api.requests import LoraOptions
from shardmlx.compat import reads_weight
from shardmlx.config.specs import FineTune
from shardmlx.errors import UserError
from shardmlx.models.runtime.parts import find_parts

ALPHA = 32.0
"""A LoRA's output is multiplied by this, over its rank, as in Tinker."""

_LINEARS = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)

_MLP = ("mlp", "moe", "ffn", "feed_forward", "expert")
"""Words in the names of the blocks of a layer that do not mix positions."""


@dataclass(frozen=True, slots=True)
class AdapterKeys:
    """The names of the modules of a model that can have adapters: in its layers those of
    ``attention``, or what is in its place, and of the ``mlp``; and the ``unembed``ding, which may
    be the embedding, too."""

    attention: Sequence[str]
    mlp: Sequence[str]
    unembed: Sequence[str]

    @classmethod
    def of(cls, model: nn.Module) -> AdapterKeys:
        """Return the names for a model of mlx-lm that was built, lazily."""
        found: dict[str, None] = {}
        for layer in model.layers:
            modules = dict(layer.named_modules())
            for path, module in modules.items():
                above, _, name = path.rpartition(".")
                is_read = above in modules and reads_weight(modules[above], name)
                if isinstance(module, _LINEARS) and not is_read:
                    found[path] = None
        mlp = [path for path in found if any(word in path.partition(".")[0] for word in _MLP)]
        parts = find_parts(model)
        unembed = [*parts.heads] or [parts.embedding_path]
        return cls([path for path in found if path not in mlp], mlp, unembed)

    def chosen(self, lora: LoraOptions) -> list[str]:
        """Return the names of the modules that a LoRA changes. Raises ``UserError`` for none."""
        keys = [
            *(self.attention if lora.attention else ()),
            *(self.mlp if lora.mlp else ()),
            *(self.unembed if lora.unembed else ()),
        ]
        if not keys:
            raise UserError(
                "the model has none of the modules that this LoRA would train",
                "train others of train_attn, train_mlp and train_unembed",
            )
        return keys


def parameters_of(lora: LoraOptions, keys: Sequence[str]) -> dict[str, Any]:
    """Return the ``lora_parameters`` of mlx-lm."""
    return {"rank": lora.rank, "scale": ALPHA / lora.rank, "dropout": 0.0, "keys": list(keys)}


def fine_tune_of(
    lora: LoraOptions | None, keys: Sequence[str] | None, dtype: str | None
) -> FineTune:
    """Return what a LoRA trains, of all layers; nothing for None."""
    if lora is None:
        return FineTune(train=False, dtype=dtype)
    parameters = parameters_of(lora, keys or ())
    if keys is None:
        del parameters["keys"]
    return FineTune(train=True, num_layers=-1, lora_parameters=parameters, dtype=dtype, zero=0)


def adapter_config(lora: LoraOptions, keys: Sequence[str]) -> Mapping[str, Any]:
    """Return the adapter_config.json with which mlx-lm loads a LoRA."""
    return {
        "fine_tune_type": "lora",
        "num_layers": -1,
        "lora_parameters": parameters_of(lora, keys),
    }
