"""Parts of ``mlx_lm.tuner``, imported without the services that it would bring along."""

from shardmlx.compat import services_load_late

with services_load_late():
    from mlx_lm.tuner.dora import DoRALinear
    from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear
    from mlx_lm.tuner.utils import build_schedule, linear_to_lora_layers

__all__ = [
    "DoRALinear",
    "LoRALinear",
    "LoRASwitchLinear",
    "build_schedule",
    "linear_to_lora_layers",
]
