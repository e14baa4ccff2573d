"""What fits on which Macs: the plans of well-known models, from the shapes of their config.json.

    python scripts/bench/fits.py

LoRA of rank 8 on the last 16 layers, batches of 4 sequences of 1024 tokens. Nothing is run, and
nothing is downloaded. MLX may use 74% of a Mac's memory, which is what macOS wires on one with
16 GB. Prints the table of docs/planning.md, in about four minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from shardmlx.config.train import TrainConfig
from shardmlx.costmodel.hostfile import Machine
from shardmlx.errors import UserError
from shardmlx.planning.training_plan import plan_training

GIB = 2**30

MEMORY_FRACTION = 0.74

MACS = ((1, 16), (2, 16), (1, 32), (2, 32), (4, 32), (2, 64))
"""How many Macs, and GB of each."""


def shape(
    family: str, layers: int, hidden: int, inner: int, heads: str, vocabulary: int, **more: Any
) -> dict[str, Any]:
    """Return a config.json; ``heads`` are attention / key-value heads."""
    attention, kv = map(int, heads.split("/"))
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": attention,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **more,
    }


MODELS = {
    "SmolLM2-1.7B": shape("llama", 24, 2048, 8192, "32/32", 49152, tie_word_embeddings=True),
    "Qwen3-4B": shape(
        "qwen3", 36, 2560, 9728, "32/8", 151936, head_dim=128, tie_word_embeddings=True
    ),
    "Mistral-7B": shape("mistral", 32, 4096, 14336, "32/8", 32768),
    "Llama-3.1-8B": shape("llama", 32, 4096, 14336, "32/8", 128256),
    "Mistral-Nemo 12B": shape("mistral", 40, 5120, 14336, "32/8", 131072, head_dim=128),
    "Mistral-Small 22B": shape("mistral", 56, 6144, 16384, "48/8", 32768, head_dim=128),
    "Mixtral-8x7B": shape(
        "mixtral", 32, 4096, 14336, "32/8", 32000, num_local_experts=8, num_experts_per_tok=2
    ),
    "Llama-3.3-70B": shape("llama", 80, 8192, 28672, "64/8", 128256),
}

BITS = {"16 bits": {}, "4 bits": {"quantization": {"group_size": 64, "bits": 4}}}


def cell(directory: str, count: int, gigabytes: int) -> str:
    """Return how a model fits: peak GiB of the fullest Mac; a star where layers are recomputed."""
    machines = [
        Machine(host=f"mac{i}", memory=gigabytes * GIB, flops=5e12, link=2e9) for i in range(count)
    ]
    config = TrainConfig(model=directory, batch_size=4, max_seq_length=1024)
    try:
        chosen = plan_training(config, machines, memory_fraction=MEMORY_FRACTION)
    except UserError:
        return "-"
    peak = max(rank.peak for rank in chosen.prediction.ranks)
    replicas = chosen.prediction.plan.mesh.dp
    return (
        f"{peak / GIB:.1f}"
        + "*" * bool(chosen.choice.candidate.checkpoint)
        + (f" ({replicas} replicas)" if replicas > 1 else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.parse_args()
    print("| model | |", " | ".join(f"{count} x {size} GB" for count, size in MACS), "|")
    print("|---" * (len(MACS) + 2) + "|")
    for name, config in MODELS.items():
        for bits, quantization in BITS.items():
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "config.json").write_text(json.dumps(config | quantization))
                cells = [cell(directory, *macs) for macs in MACS]
            print(f"| {name} | {bits} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
