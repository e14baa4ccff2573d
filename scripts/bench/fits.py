"""What fits on which Macs: the plans of well-known models, from the shapes of their config.json.

    python scripts/bench/fits.py [--lengths | --large]

LoRA of rank 8 on the last 16 layers, batches of 4 sequences of 1024 tokens. Nothing is run, and
nothing is downloaded. MLX may use 74% of a Mac's memory, which is what macOS wires on one with
16 GB. Prints the table of docs/what-fits.md, in about four minutes.

``--lengths`` prints that of docs/long-texts.md: the longest sequence that fits, for batches of one
per replica, with attention and loss in pieces, and in brackets without.

``--large`` prints the table of the largest models: parameters, those that a token uses, and the
peak GiB of the fullest Mac with weights in 4 bits, LoRA on the last 4 layers, and one pipeline.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from bisect import bisect_left
from pathlib import Path
from typing import Any

from shardmlx.config.common_options import AUTO, OFF
from shardmlx.config.specs import FULL, NONE, SELECTIVE
from shardmlx.config.train import TrainConfig
from shardmlx.costmodel.hostfile import Machine
from shardmlx.errors import UserError
from shardmlx.modelfiles.model_files import open_model
from shardmlx.modelfiles.parts import inspect_files
from shardmlx.models.shape import ModelShape
from shardmlx.planning.training_plan import plan_training

GIB = 2**30


WIRED = 0.74
"""Part of a Mac's memory that its GPU may use: macOS wires no more below 36 GB."""

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


LONG_MODELS = {
    "SmolLM2-135M": shape("llama", 30, 576, 1536, "9/3", 49152, tie_word_embeddings=True),
    "Mistral-7B": MODELS["Mistral-7B"],
    "Mistral-Large 123B": shape("mistral", 88, 12288, 28672, "96/8", 32768, head_dim=128),
}

LONG_MACS = ((1, 16), (2, 16), (2, 32), (2, 64), (4, 64))

LENGTHS = [2**power for power in range(9, 18)]
"""512 tokens to 128k."""


def macs(count: int, gigabytes: int) -> list[Machine]:
    """Return Macs that are alike."""
    return [
        Machine(host=f"mac{i}", wired=round(WIRED * gigabytes * GIB), flops=5e12, link=2e9)
        for i in range(count)
    ]


def longest(directory: str, count: int, gigabytes: int, chunk: str) -> str:
    """Return the longest of ``LENGTHS`` that fits, in thousands from 1024 on."""

    def is_too_long(length: int) -> bool:
        config = TrainConfig(
            model=directory,
            batch_size=1,
            max_seq_length=length,
            data_parallel=1,
            num_layers=-1,
            attention_chunk=chunk,
            loss_chunk=chunk,
        )
        try:
            plan_training(config, macs(count, gigabytes))
        except UserError:
            return True
        return False

    fitting = bisect_left(LENGTHS, True, key=is_too_long)
    if not fitting:
        return "-"
    length = LENGTHS[fitting - 1]
    return f"{length // 1024}k" if length >= 1024 else str(length)


def long_cell(directory: str, count: int, gigabytes: int) -> str:
    """Return the longest sequence with pieces, and without."""
    with_pieces, without = (longest(directory, count, gigabytes, chunk) for chunk in (AUTO, OFF))
    return f"{with_pieces} ({without})"


def cell(directory: str, count: int, gigabytes: int) -> str:
    """Return how a model fits: peak GiB of the fullest Mac; a star where whole layers are
    recomputed, a plus where their cheap parts are."""
    machines = macs(count, gigabytes)
    config = TrainConfig(model=directory, batch_size=4, max_seq_length=1024)
    try:
        chosen = plan_training(config, machines)
    except UserError:
        return "-"
    peak = max(rank.peak for rank in chosen.prediction.ranks)
    replicas = chosen.prediction.plan.mesh.dp
    return (
        f"{peak / GIB:.1f}"
        + {NONE: "", SELECTIVE: "+", FULL: "*"}[chosen.choice.run.batch.recomputed]
        + (f" ({replicas} replicas)" if replicas > 1 else "")
    )


LARGE_MACS = ((2, 64), (4, 64), (2, 128), (4, 128), (8, 128), (2, 512), (4, 512))


def large_cell(directory: str, count: int, gigabytes: int) -> str:
    """Return the peak GiB of the fullest Mac, with all choices made for the least memory."""
    config = TrainConfig(
        model=directory,
        batch_size=4,
        max_seq_length=1024,
        num_layers=4,
        partitioner="memory",
        schedule="1f1b",
        micro_batch_size=1,
        data_parallel=1,
        pack=False,
    )
    try:
        chosen = plan_training(config, macs(count, gigabytes))
    except UserError:
        return "-"
    return f"{max(rank.peak for rank in chosen.prediction.ranks) / GIB:.0f}"


def print_large() -> None:
    """Print the table of the largest models, whose fields are in large_models.json."""
    models = json.loads(Path(__file__).with_name("large_models.json").read_text())
    every = [f"{count} x {size} GB" for count, size in LARGE_MACS]
    print("| model | parameters | a token uses | weights in 4 bits |", " | ".join(every), "|")
    print("|---" * (len(every) + 4) + "|")
    for name, config in models.items():
        config = {"torch_dtype": "bfloat16", **config, **BITS["4 bits"]}
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "config.json").write_text(json.dumps(config))
            files = open_model(directory)
            shape, nbytes = ModelShape.from_config(config), inspect_files(files).whole.nbytes
            facts = (
                f"{shape.parameters() / 1e9:.1f}B",
                f"{shape.active_parameters() / 1e9:.1f}B",
                f"{nbytes / GIB:.1f} GiB",
            )
            cells = [large_cell(directory, *each) for each in LARGE_MACS]
        print(f"| {name} |", " | ".join((*facts, *cells)), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lengths", action="store_true", help="the longest sequence that fits")
    parser.add_argument("--large", action="store_true", help="the largest models")
    options = parser.parse_args()
    if options.large:
        print_large()
        return
    models, every, show = (
        (LONG_MODELS, LONG_MACS, long_cell) if options.lengths else (MODELS, MACS, cell)
    )
    print("| model | |", " | ".join(f"{count} x {size} GB" for count, size in every), "|")
    print("|---" * (len(every) + 2) + "|")
    for name, config in models.items():
        for bits, quantization in BITS.items():
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "config.json").write_text(json.dumps(config | quantization))
                cells = [show(directory, *each) for each in every]
            print(f"| {name} | {bits} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
