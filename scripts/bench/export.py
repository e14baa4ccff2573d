#!/usr/bin/env python3
"""Measure export: fusing beside cp of the same bytes, and quantising on one core and on all.

    python scripts/bench/export.py [--layers N] [--only fuse|quantise] [--directory DIR]

A random Llama in bfloat16, of 134 MB a layer, with adapters on all of its layers; its files are
dropped from the page cache before each turn. ``cp`` and ``sync`` beside ``export --adapter-path``;
then ``export --quantize 4`` with one core, and with all. Seconds of exports are those that the
command says: without Python's start. About five minutes on two cores.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from _compare import Spread, Table, by_turns, environment, machine, mpirun, parser_of, publish

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
    dropped(model)
    shutil.rmtree(out, ignore_errors=True)
    began = time.monotonic()
    subprocess.run(["cp", "-r", model, out], check=True)
    for path in out.iterdir():
        subprocess.run(["sync", path], check=True)
    return time.monotonic() - began


def exported(model: Path, out: Path, bind: str, *how: object) -> float:
    """Return the seconds that the command says."""
    dropped(model)
    shutil.rmtree(out, ignore_errors=True)
    command = mpirun(1, "-m", "shardmlx.export", model, "-o", out, *how, bind=bind)
    threads = 1 if bind == "core" else os.cpu_count() or 1
    done = subprocess.run(
        list(map(str, command)),
        env={**os.environ, **environment(threads)},
        capture_output=True,
        text=True,
    )
    said = re.search(r"in ([\d.]+) s; peak", done.stdout)
    if done.returncode or said is None:
        raise SystemExit(done.stdout + done.stderr)
    return float(said[1])


def table_of(heading: str, times: Mapping[str, Sequence[float]], base: str) -> Table:
    rows = [
        [name, f"{Spread.of(seconds):.1f}", f"{Spread.of_ratios(times[base], seconds):.2f}"]
        for name, seconds in times.items()
    ]
    return Table(heading, ["", "seconds", f"times as fast as {base}"], rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--only", choices=["fuse", "quantise"])
    parser.add_argument("--directory", help="on the disk that is measured")
    options = parser.parse_args()
    facts = machine()
    rounds = 1 if options.quick else options.rounds or 3
    tables, numbers = [], {}
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        model, adapters = make(Path(name), 2 if options.quick else options.layers)
        out = Path(name, "out")
        fuse = "--adapter-path", adapters
        four = "--quantize", "4"
        groups: dict[str, dict[str, Callable[[], float]]] = {
            "fuse": {
                CP: lambda: copied(model, out),
                FUSE: lambda: exported(model, out, "none", *fuse),
            },
            "quantise": {
                ONE: lambda: exported(model, out, "core", *four),
                ALL: lambda: exported(model, out, "none", *four),
            },
        }
        for heading, contenders in groups.items():
            if options.only in (None, heading):
                times = by_turns(contenders, rounds)
                print(times, file=sys.stderr, flush=True)
                numbers[heading] = times
                tables.append(table_of(heading, times, next(iter(contenders))))
    publish(options, facts, tables, numbers)


if __name__ == "__main__":
    main()
