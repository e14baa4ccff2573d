"""Export: fusing beside cp of the same bytes, and quantising on one core and on all."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from scripts.bench.benchmark import Bench, Benchmark, Spread, environment, run
from scripts.bench.turns import by_turns
from testbed.jobs import ranks_command

FUSE, CP = "export, fused", "cp and sync"
ONE, ALL = "1 core", "all cores"

HIDDEN, WIDTH, HEADS, KV_HEADS, RANK = 2048, 8192, 16, 16, 8
SIDES = {
    **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    "mlp.gate_proj": (WIDTH, HIDDEN),
    "mlp.up_proj": (WIDTH, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDTH),
}
ADAPTED = "self_attn.q_proj", "self_attn.v_proj"


def make(directory: Path, layers: int) -> tuple[Path, Path]:
    """Write a model of a file a layer, and adapters for it."""
    import mlx.core as mx

    def random(*sides: int) -> mx.array:
        return mx.random.uniform(-0.02, 0.02, sides).astype(mx.bfloat16)

    model, adapters = directory / "model", directory / "adapters"
    model.mkdir()
    adapters.mkdir()
    config = {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": WIDTH,
        "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5, "vocab_size": 1024,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_text("{}")
    of_layer = {f"{name}.weight": random(*sides) for name, sides in SIDES.items()}
    norms = {f"{name}_layernorm.weight": random(HIDDEN) for name in ("input", "post_attention")}
    ends = {"model.embed_tokens.weight": random(1024, HIDDEN), "model.norm.weight": random(HIDDEN)}
    trained = {}
    for number in range(layers):
        prefix = f"model.layers.{number}."
        weights = {prefix + name: array for name, array in (of_layer | norms).items()}
        file = model / f"model-{number + 1:05d}-of-{layers:05d}.safetensors"
        mx.save_safetensors(str(file), weights if number else weights | ends)
        for name in ADAPTED:
            trained[f"{prefix}{name}.lora_a"] = mx.random.normal((HIDDEN, RANK))
            trained[f"{prefix}{name}.lora_b"] = mx.random.normal((RANK, HIDDEN))
    mx.save_safetensors(str(adapters / "adapters.safetensors"), trained)
    lora = {"rank": RANK, "scale": 2.0, "dropout": 0.0, "keys": list(ADAPTED)}
    how = {"fine_tune_type": "lora", "num_layers": layers, "lora_parameters": lora}
    (adapters / "adapter_config.json").write_text(json.dumps(how))
    os.sync()
    return model, adapters


def dropped(model: Path) -> None:
    """Drop what the page cache has of the files."""
    for path in model.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def copied(model: Path, out: Path) -> float:
    """Return the seconds of ``cp`` and ``sync``."""
    dropped(model)
    shutil.rmtree(out, ignore_errors=True)
    began = time.monotonic()
    run(["cp", "-r", model, out])
    for path in out.iterdir():
        run(["sync", path])
    return time.monotonic() - began


def exported(model: Path, out: Path, bind: str, *how: str | Path) -> float:
    """Return the seconds that the command says."""
    dropped(model)
    shutil.rmtree(out, ignore_errors=True)
    command = ranks_command(1, "-m", "shardmlx.export", model, "-o", out, *how, bind=bind)
    threads = 1 if bind == "core" else os.cpu_count() or 1
    output = run(command, environment(threads))
    said = re.search(r"in ([\d.]+) s; peak", output)
    if said is None:
        raise SystemExit(output)
    return float(said[1])


def export(bench: Bench) -> None:
    """Export: fusing beside cp of the same bytes, and quantising on one core and on all.

    A random Llama in bfloat16, of 134 MB a layer, with adapters on all of its layers; its files are
    dropped from the page cache before each turn. ``cp`` and ``sync`` beside ``export
    --adapter-path``; then ``export --quantize 4`` with one core, and with all. Seconds of exports
    are those that the command says: without Python's start. About five minutes on two cores.
    """
    with tempfile.TemporaryDirectory(dir=bench.options.directory or bench.directory) as name:
        model, adapters = make(Path(name), 2 if bench.quick else bench.options.layers)
        out = Path(name, "out")
        groups: dict[str, dict[str, Callable[[], float]]] = {
            "fuse": {
                CP: lambda: copied(model, out),
                FUSE: lambda: exported(model, out, "none", "--adapter-path", adapters),
            },
            "quantise": {
                ONE: lambda: exported(model, out, "core", "--quantize", "4"),
                ALL: lambda: exported(model, out, "none", "--quantize", "4"),
            },
        }
        for heading, contenders in bench.chosen(groups).items():
            times = by_turns(contenders, bench.rounds)
            bench.keep(**{heading: times})
            base = next(iter(contenders))
            lines = [speed_cells(name, times, base) for name in times]
            bench.show(heading, ["", "seconds", f"times as fast as {base}"], lines)


def speed_cells(name: str, times: Mapping[str, Sequence[float]], base: str) -> list[str]:
    """Return a line of a table."""
    ratio = Spread.of_ratios(times[base], times[name])
    return [name, f"{Spread.of(times[name]):.1f}", f"{ratio:.2f}"]


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--directory", help="on the disk that is measured")


EXPORT = Benchmark("export", export, add_export, rounds=3)
