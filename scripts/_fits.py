"""The tables of what fits on which Macs, from the shapes of well-known models' config.json.

Nothing is run, and nothing is downloaded. MLX may use what macOS wires. Each table can be made of
one model ``only``.
"""

from __future__ import annotations

import _root

import json
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardmlx.config.commands import BY_NAME
from shardmlx.config.common_options import AUTO, OFF
from shardmlx.config.specs import FULL, NONE, SELECTIVE
from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError
from shardmlx.modelfiles.model_files import open_model
from shardmlx.modelfiles.parts import Inspection, inspect_files, read_shape
from shardmlx.planning.facts.chips import CHIPS, as_macs, machines_of
from shardmlx.planning.facts.hostfile import Machine, read_hostfile
from shardmlx.planning.training_plan import plan_training

GIB = 2**30


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

LARGE_MACS = ((2, 64), (4, 64), (2, 128), (4, 128), (8, 128), (2, 512), (4, 512))

SHARED_MODELS = {
    "Mistral-7B": MODELS["Mistral-7B"],
    "Qwen2.5-32B": shape("qwen2", 64, 5120, 27648, "40/8", 152064),
    "Llama-3.3-70B": MODELS["Llama-3.3-70B"],
    "Mistral-Large 123B": LONG_MODELS["Mistral-Large 123B"],
}

SUMS = (300e-6, 50e-6, 10e-6)
"""Seconds of a sum with its synchronisation: over TCP, and from the slowest to the fastest RDMA."""

EXAMPLES = {
    "chat-8b": (MODELS["Llama-3.1-8B"] | BITS["4 bits"], "macbook-and-studio"),
    "lora-70b": (MODELS["Llama-3.3-70B"] | BITS["4 bits"], "macbook-and-studio"),
    "full-1b": (
        shape("llama", 16, 2048, 8192, "32/8", 128256, head_dim=64, tie_word_embeddings=True),
        "two-macs",
    ),
}
"""Files of examples/: the shape of each one's model, and a hostfile to plan for."""

LENGTHS = [2**power for power in range(9, 18)]
"""512 tokens to 128k."""


def _machines(count: int, gigabytes: int) -> list[Machine]:
    """Return Macs that are alike, of any chip."""
    macs = machines_of(", ".join([f"{gigabytes}GB"] * count))
    return [replace(mac, flops=5e12) for mac in macs]


def common(only: str | None = None) -> str:
    """Return the peak GiB of the fullest Mac: LoRA of rank 8 on the last 16 layers, batches of 4
    sequences of 1024 tokens. A star is where whole layers are recomputed, a plus where their cheap
    parts are; x N are replicas."""

    def cell(directory: str, machines: list[Machine]) -> str:
        config = TrainConfig.from_flat(
            model=directory, batch_size=4, max_seq_length=1024, tensor_parallel=1
        )
        chosen = plan_training(config, machines)
        peak = max(rank.peak for rank in chosen.prediction.ranks)
        replicas = chosen.prediction.plan.mesh.dp
        recomputed = {NONE: "", SELECTIVE: "+", FULL: "*"}[chosen.run.batch.recomputed]
        return f"{peak / GIB:.1f}{recomputed}" + (f" x {replicas}" if replicas > 1 else "")

    return _by_bits(_some(MODELS, only), MACS, cell)


def lengths(only: str | None = None) -> str:
    """Return the longest sequences that fit, for LoRA on all layers and batches of one; in brackets
    without attention and loss in pieces."""

    def cell(directory: str, machines: list[Machine]) -> str:
        with_pieces, without = (_longest(directory, machines, chunk) for chunk in (AUTO, OFF))
        return f"{with_pieces} ({without})"

    return _by_bits(_some(LONG_MODELS, only), LONG_MACS, cell)


def large(only: str | None = None) -> str:
    """Return the peak GiB of the fullest Mac for the largest models: weights in 4 bits, LoRA on the
    last 4 layers, one pipeline, all chosen for the least memory."""

    def cell(directory: str, machines: list[Machine]) -> str:
        config = TrainConfig.from_flat(
            model=directory,
            batch_size=4,
            max_seq_length=1024,
            num_layers=4,
            partitioner="memory",
            schedule="1f1b",
            micro_batch_size=1,
            data_parallel=1,
            tensor_parallel=1,
            pack=False,
        )
        peaks = [rank.peak for rank in plan_training(config, machines).prediction.ranks]
        return f"{max(peaks) / GIB:.0f}"

    rows = []
    models = json.loads(Path(__file__).with_name("_large_models.json").read_text())
    for name, config in _some(models, only).items():
        config = {"torch_dtype": "bfloat16", **config, **BITS["4 bits"]}
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "config.json").write_text(json.dumps(config))
            nbytes = inspect_files(open_model(directory)).whole.nbytes
            shape = read_shape(config)
            facts = (
                f"{shape.parameters() / 1e9:.1f}B",
                f"{shape.active_parameters() / 1e9:.1f}B",
                f"{nbytes / GIB:.1f} GiB",
            )
            rows.append((name, *facts, *_cells(directory, LARGE_MACS, cell)))
    heads = ("model", "parameters", "a token uses", "weights in 4 bits")
    return _table((*heads, *_names(LARGE_MACS)), rows)


def blog(only: str | None = None) -> str:
    """Return GiB of each rank and tokens/s of the blog's Mistral-7B, planned for one and two Macs
    with an M1 Pro and 16 GB."""
    machines_and_stages = ((1, None), (2, 1), (2, 2))

    def cell(directory: str, machines: int, stages: int | None) -> str:
        config = TrainConfig.from_flat(
            model=directory, batch_size=8, num_layers=8, pipeline_stages=stages
        )
        macs = [
            Machine(host=f"mac{i}", memory=16 * GIB, flops=5.2e12, link=2e9)
            for i in range(machines)
        ]
        try:
            chosen = plan_training(config, macs)
        except UserError:
            return "does not fit"
        prediction = chosen.prediction
        peaks = dict.fromkeys(f"{rank.peak / GIB:.1f}" for rank in prediction.ranks)
        divided = "weights divided: " if chosen.run.fine_tune.divides_weights else ""
        return f"{divided}{' and '.join(peaks)} GiB, {prediction.tokens_per_second:.0f} tokens/s"

    rows = []
    for bits in BITS if only is None else [only]:
        with tempfile.TemporaryDirectory() as directory:
            config = MODELS["Mistral-7B"] | BITS[bits]
            Path(directory, "config.json").write_text(json.dumps(config))
            rows.append((bits, *(cell(directory, *each) for each in machines_and_stages)))
    return _table(("", "one Mac", "two, data parallel", "two, pipeline"), rows)


def examples(only: str | None = None) -> str:
    """Return what is planned for the configurations of examples/."""
    rows = []
    for name, (config, hosts) in EXAMPLES.items() if only is None else [(only, EXAMPLES[only])]:
        path = _root.ROOT / "examples" / f"{name}.yaml"
        about = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "config.json").write_text(json.dumps(config))
            options = BY_NAME["train"].line.load(["-c", str(path), "--model", directory], 0)
            machines = read_hostfile(_root.ROOT / "hostfiles" / hosts)
            chosen = plan_training(options, machines)
        prediction = chosen.prediction
        peaks = " and ".join(f"{rank.peak / GIB:.1f}" for rank in prediction.ranks)
        seconds = f"{prediction.step_seconds:.3g} s"
        link = f"[`{hosts}`](../hostfiles/{hosts})"
        rows.append((f"[`{name}.yaml`](../examples/{name}.yaml)", about, link, peaks, seconds))
    return _table(("file", "", "planned for", "GiB", "a step"), rows)


def shares(only: str | None = None) -> str:
    """Return by how much a reader's tokens come sooner with tensor shares of two Macs, for each of
    ``SUMS``, in 16 and in 4 bits; a dash where the largest Macs that are sold do not hold them."""
    largest = {
        name: max(CHIPS[name].sizes[max(CHIPS[name].sizes)])
        for name in ("M4", "M4 Pro", "M4 Max", "M3 Ultra")
    }
    macs = as_macs(machines_of(", ".join(f"{chip} {size}GB" for chip, size in largest.items())))
    rows = []
    for name, config in _some(SHARED_MODELS, only).items():
        models = []
        for quantization in BITS.values():
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "config.json").write_text(json.dumps(config | quantization))
                models.append(inspect_files(open_model(directory)))
        rows.append((name, *("<br>".join(_sooner(model, mac) for model in models) for mac in macs)))
    return _table(("model", *largest), rows)


def _sooner(model: Inspection, mac: Machine) -> str:
    """Return the cell of a model, of whose bytes each of two Macs holds half of the layers'."""
    divided = sum(layer.nbytes for layer in model.layers)
    assert mac.wired is not None
    if model.whole.nbytes - divided / 2 > mac.wired:
        return "-"
    assert mac.bandwidth is not None
    read = divided + model.head.nbytes
    found = (
        faster_by_shares(read / mac.bandwidth, divided / read, len(model.layers), each)
        for each in SUMS
    )
    return "/".join(f"{each:.1f}" for each in found)


def faster_by_shares(
    seconds: float, divided: float, layers: int, sum_seconds: float, ranks: int = 2
) -> float:
    """Return by how much a token comes sooner with tensor shares, beside one process's ``seconds``.

    ``divided`` is the part of the bytes of a token that ranks divide. Each layer has two sums.
    """
    rest = 1 - divided * (1 - 1 / ranks)
    return seconds / (seconds * rest + 2 * layers * sum_seconds)


def _some(models: dict[str, dict[str, Any]], only: str | None) -> dict[str, dict[str, Any]]:
    return models if only is None else {only: models[only]}


def _by_bits(
    models: dict[str, dict[str, Any]],
    macs: tuple[tuple[int, int], ...],
    cell: Callable[[str, list[Machine]], str],
) -> str:
    """Return a table with two rows a model, of 16 and 4 bits."""
    rows = []
    for name, config in models.items():
        for bits, quantization in BITS.items():
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "config.json").write_text(json.dumps(config | quantization))
                first = "" if quantization else name
                rows.append((first, bits, *_cells(directory, macs, cell)))
    return _table(("model", "", *_names(macs)), rows)


def _cells(
    directory: str, macs: tuple[tuple[int, int], ...], cell: Callable[[str, list[Machine]], str]
) -> list[str]:
    """Return a cell for each group of Macs; a dash where the model does not fit."""
    found = []
    for count, gigabytes in macs:
        try:
            found.append(cell(directory, _machines(count, gigabytes)))
        except UserError:
            found.append("-")
    return found


def _longest(directory: str, machines: list[Machine], chunk: str) -> str:
    """Return the longest of ``LENGTHS`` that fits, in thousands from 1024 on."""
    config = TrainConfig.from_flat(
        model=directory,
        batch_size=1,
        data_parallel=1,
        num_layers=-1,
        attention_chunk=chunk,
        loss_chunk=chunk,
    )
    try:
        chosen = plan_training(config, machines, max_of="seq")
    except UserError:
        return "-"
    fitting = bisect_right(LENGTHS, chosen.asked.batch.max_seq_length)
    if not fitting:
        return "-"
    length = LENGTHS[fitting - 1]
    return f"{length // 1024}k" if length >= 1024 else str(length)


def _names(macs: tuple[tuple[int, int], ...]) -> list[str]:
    return [f"{count} x {size} GB" for count, size in macs]


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = ["| " + " | ".join(each) + " |" for each in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:], ""])
