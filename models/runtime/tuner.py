"""What we use of ``mlx_lm.tuner``, which is imported here alone: it would bring services along."""

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
