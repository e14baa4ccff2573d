#!/usr/bin/env python3
"""How fast tensor shares of two hosts decode: ours and mlx-lm's, beside one process and the plan.

    python scripts/bench/tensor_shares.py [--delays 0 0.3 1] [--json FILE]

Hosts are network namespaces (root, Linux), each with one core and one BLAS thread; a relay in each
delays the messages of MLX's ring by so many milliseconds, one way. A Llama of 8 layers and width
1024 in float32 is divided by ``generate --tensor-parallel 2``, and by mlx-lm's ``shard()``. The
plan knows how fast one process reads its weights, and the delay.

Three minutes on two cores.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from _compare import ROOT, Table, environment, machine, parser_of, publish
from _models import make_wide, of_width
from sums import run

from shardmlx.modelfiles.model_files import open_model
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.facts.workload import model_sizes
from shardmlx.planning.generation_ways import generation_ways

sys.path.insert(0, str(ROOT))

from testbed.hosts import Lab, hosts, missing

RING_PORT, RELAY_PORT = 5000, 5001

WIDTH, PROMPT = 1024, 64

LATENCY, LINK = 30e-6, 1e9
"""Of a message between these hosts, in seconds and bytes a second, about as doctor measures it."""


def measure(lab: Lab, milliseconds: float, tokens: int, rounds: int) -> dict[str, Any]:
    """Return what rank 0 has measured over a link with this delay; without one, over no relay."""
    own = [f"{lab.address(host)}:{RING_PORT}" for host in lab.hosts]
    with ExitStack() as stack:
        commands = []
        for rank, host in enumerate(lab.hosts):
            addresses = [[address] for address in own]
            if milliseconds:
                addresses[1 - rank] = [f"127.0.0.1:{RELAY_PORT}"]
                peer = lab.address(lab.hosts[1 - rank])
                numbers = (str(RELAY_PORT), peer, str(RING_PORT), str(milliseconds / 1000))
                program = (sys.executable, ROOT / "scripts/bench/_relay.py", *numbers)
                relay = stack.enter_context(subprocess.Popen(lab.command(host, *program)))
                stack.callback(relay.kill)
            (lab.home(host) / "ring.json").write_text(json.dumps(addresses))
            variables = ("env", f"MLX_RANK={rank}", "MLX_HOSTFILE=ring.json")
            shares = (ROOT / "scripts/bench/_shares.py", str(tokens), str(rounds))
            commands.append(lab.command(host, *variables, sys.executable, *shares))
        return run(commands)


def ours(ranks: int, milliseconds: float, model: Path, tokens: int) -> float:
    """Return the seconds of a token that ``generate`` says, on one host or shared by two."""
    program = (ROOT / "scripts/bench/_late_ring.py", str(milliseconds), "generate")
    words = ("--model", model, "--ignore-chat-template", "--prompt", "ahoy " * 8)
    how = ("--tensor-parallel", str(ranks), "--max-tokens", str(tokens))
    with tempfile.TemporaryDirectory() as name, hosts(Path(name), ranks) as lab:
        done = subprocess.run(
            lab.mpirun(ranks, *program, *words, *how),
            env={**os.environ, **environment()},
            capture_output=True,
            text=True,
            timeout=120,
        )
    said = re.search(
        r"^Generation: (\d+) tokens, ([\d.]+)", done.stdout + done.stderr, re.MULTILINE
    )
    if said is None or int(said[1]) < tokens // 2:
        raise SystemExit(f"{done.args!r}\n{done.stdout}\n{done.stderr}")
    # It counts all tokens, in the time from the first to the last.
    count, rate = int(said[1]), float(said[2])
    return count / rate / (count - 1)


def planned(model: Path, alone: float, milliseconds: float) -> float:
    """Return the seconds of a token that the planner predicts for two hosts."""
    sizes = model_sizes(open_model(str(model)), None)
    read = (
        sizes.weight_sizes.total(0, len(sizes.weight_sizes.layers)) - sizes.weight_sizes.embedding
    )
    late = LATENCY + milliseconds / 1000
    mac = Machine(host="mac1", memory=1 << 40, bandwidth=read / alone, link=LINK, latency=late)
    machines = (mac, replace(mac, host="mac2"))
    ways = generation_ways(sizes, Cluster(machines=machines, backend="cpu"), PROMPT)
    return next(1 / each.tokens_per_second for each in ways if each.tensor_parallel == 2)


def cells(
    milliseconds: float, found: dict[str, Any], own: list[tuple[float, float]], model: Path
) -> tuple[str, ...]:
    """Return a line of the table; whatever disturbs a machine makes a token later."""
    of_one, of_sum, theirs = map(min, zip(*found["rounds"], strict=True))
    alone, together = map(min, zip(*own, strict=True))
    plan = planned(model, alone, milliseconds)
    return (
        f"{milliseconds:g} ms",
        f"{1000 * of_sum:.2f} ms",
        *(f"{1 / seconds:.1f}" for seconds in (of_one, theirs, alone, together, plan)),
        *(f"{seconds / together:.2f}" for seconds in (alone, theirs, plan)),
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--delays", nargs="*", type=float, default=[0, 0.1, 0.3, 1])
    options = parser.parse_args()
    if lacks := missing():
        raise SystemExit(lacks)
    facts = machine()
    tokens, rounds = (4, 1) if options.quick else (24, options.rounds or 3)
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache") as directory:
        model = make_wide(Path(directory) / "model", **of_width(WIDTH))
        own: dict[float, list[tuple[float, float]]] = {each: [] for each in options.delays}
        for _ in range(rounds):
            alone = ours(1, 0, model, tokens)
            for delay, times in own.items():
                times.append((alone, ours(2, delay, model, tokens)))
        lines, results = [], []
        for delay, times in own.items():
            with tempfile.TemporaryDirectory() as name, hosts(Path(name), 2) as lab:
                found = measure(lab, delay, tokens, rounds)
            results.append({"delay_ms": delay, "ours": times, **found})
            lines.append(cells(delay, found, times, model))
            print("  ".join(lines[-1]), file=sys.stderr, flush=True)
    header = ("a message later by", "a sum", "one, mlx-lm", "its shard()", "one", "two", "plan")
    ratios = ("two / one", "two / shard()", "two / plan")
    table = Table("Tensor shares of two, tokens/s", (*header, *ratios), lines)
    publish(options, facts, [table], {"tensor_shares": results})


if __name__ == "__main__":
    main()
