"""Tensor shares of two hosts, which are network namespaces of this machine (root, Linux).

As a program: ``theirs TOKENS ROUNDS`` is a rank of MLX's ring that decodes alone, and with its
share. Each process has one core. Rank 0 prints, as JSON, the bytes of the whole model and of a
share, and for each round the seconds of a token on one process, of a sum, and of a token with
shares; also whether both texts are the same. ``late MILLISECONDS COMMAND ...`` is ``shardmlx
COMMAND`` on one core of each host, with a relay before the ring of tensor shares.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.bench.benchmark import Bench, Benchmark, last_json, own_core, program, run, run_all
from scripts.bench.generation import random_prompts
from scripts.bench.trained import WIDE, demo_lacks, make_wide, of_width
from shardmlx.common.environment import prepare
from shardmlx.modelfiles.model_files import open_model
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.facts.workload import model_sizes
from shardmlx.planning.generation_ways import generation_ways
from testbed.delays import command as delay_command
from testbed.hosts import Lab, hosts, missing

RING_PORT, RELAY_PORT = 5000, 5001

WIDTH, PROMPT = 1024, 64

LATENCY, LINK = 30e-6, 1e9
"""Of a message between these hosts, in seconds and bytes a second, about as doctor measures it."""


# Ranks

SUMS = 200

HERE = "127.0.0.1"


def theirs(tokens: int, rounds: int) -> None:
    """Decode with mlx-lm's ``shard()``, and without."""
    own_core(int(os.environ["MLX_RANK"]))
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.generate import generate_step
    from mlx_lm.models.llama import Model, ModelArgs

    group = mx.distributed.init(strict=True, backend="ring")

    def model() -> Model:
        mx.random.seed(0)
        return Model(ModelArgs.from_dict({**WIDE, **of_width(WIDTH)}))

    def nbytes(model: Model) -> int:
        mx.eval(model.parameters())
        return sum(array.nbytes for _, array in tree_flatten(model.parameters()))

    def decode(model: Model) -> tuple[float, list[int]]:
        """Return the seconds of a token after the first, and the text."""
        prompt = mx.array(random_prompts(1, PROMPT // 2)[0]) % WIDE["vocab_size"]
        text, start = [], 0.0
        for token, _ in generate_step(prompt, model, max_tokens=tokens):
            start = start or time.perf_counter()
            text.append(int(token))
        return (time.perf_counter() - start) / (tokens - 1), text

    def sum_seconds() -> float:
        """Return the seconds of a sum in a graph of nothing else."""
        hidden = mx.ones((1, WIDTH))
        mx.eval(mx.distributed.all_sum(hidden, group=group))  # both are here
        start = time.perf_counter()
        for _ in range(SUMS):
            hidden = mx.distributed.all_sum(hidden, group=group) / group.size()
        mx.eval(hidden)
        return (time.perf_counter() - start) / SUMS

    whole, shares = model(), model()
    shares.shard(group)
    found: dict[str, Any] = {"bytes": [nbytes(whole), nbytes(shares)], "rounds": []}
    for turn in range(rounds + 1):
        alone, text = decode(whole) if group.rank() == 0 else (0.0, [])
        of_sum = sum_seconds()
        together, its_text = decode(shares)
        if turn > 0:  # the first warms up
            found["rounds"].append([alone, of_sum, together])
            found["same_text"] = found.get("same_text", True) and text == its_text
    if group.rank() == 0:
        print(json.dumps(found), flush=True)


def late(milliseconds: float, arguments: Sequence[str]) -> int:
    """Run a command whose ranks reach each other through relays; without a delay, as they are."""
    from shardmlx.distributed import mlx_group
    from shardmlx.distributed.transport import Transport
    from shardmlx.main import main

    reached = mlx_group._reached

    def relayed(
        transport: Transport, peers: Sequence[int], offers: Sequence[mlx_group.Offer]
    ) -> dict[int, str]:
        own_core(transport.rank)
        found = reached(transport, peers, offers)
        for peer in peers if milliseconds else ():
            port = str(offers[peer].port)
            words = delay_command("relay", port, found[peer], port, milliseconds / 1000)
            relay = subprocess.Popen(words)
            atexit.register(relay.kill)
            found[peer] = HERE
        return found

    mlx_group._reached = relayed
    return main(list(arguments))


# The benchmark


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
                late = delay_command("relay", RELAY_PORT, peer, RING_PORT, milliseconds / 1000)
                relay = stack.enter_context(subprocess.Popen(lab.command(host, *late)))
                stack.callback(relay.kill)
            (lab.home(host) / "ring.json").write_text(json.dumps(addresses))
            variables = ("env", f"MLX_RANK={rank}", "MLX_HOSTFILE=ring.json")
            words = program("tensor_shares", "theirs", tokens, rounds)
            commands.append(lab.command(host, *variables, sys.executable, *words))
        found: dict[str, Any] = last_json(run_all(commands, timeout=400))
        return found


def ours(ranks: int, milliseconds: float, model: Path, tokens: int) -> float:
    """Return the seconds of a token that ``generate`` says, on one host or shared by two."""
    words = ("--model", model, "--ignore-chat-template", "--prompt", "ahoy " * 8)
    how = ("--tensor-parallel", ranks, "--max-tokens", tokens)
    late = program("tensor_shares", "late", milliseconds, "generate", *words, *how)
    with tempfile.TemporaryDirectory() as name, hosts(Path(name), ranks) as lab:
        output = run(["sh", "-c", 'exec "$0" "$@" 2>&1', *lab.mpirun(ranks, *late)], timeout=120)
    said = re.search(r"^Generation: (\d+) tokens, ([\d.]+)", output, re.MULTILINE)
    if said is None or int(said[1]) < tokens // 2:
        raise SystemExit(output)
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


def tensor_shares(bench: Bench) -> None:
    """Speed at which tensor shares of two hosts decode: ours, mlx-lm's, one process, and the plan.

    Each host has one core and one BLAS thread; a relay in each delays the messages of MLX's ring by
    so many milliseconds, one way. A Llama of 8 layers and width 1024 in float32 is divided by
    ``generate --tensor-parallel 2``, and by mlx-lm's ``shard()``. The plan knows how fast one
    process reads its weights, and the delay. Three minutes on two cores.
    """
    tokens = 4 if bench.quick else 24
    model = make_wide(bench.directory / "model", **of_width(WIDTH))
    own: dict[float, list[tuple[float, float]]] = {each: [] for each in bench.options.delays}
    for _ in range(bench.rounds):
        alone = ours(1, 0, model, tokens)
        for delay, times in own.items():
            times.append((alone, ours(2, delay, model, tokens)))
    lines, results = [], []
    for delay, times in own.items():
        with tempfile.TemporaryDirectory() as name, hosts(Path(name), 2) as lab:
            found = measure(lab, delay, tokens, bench.rounds)
        results.append({"delay_ms": delay, "ours": times, **found})
        lines.append(cells(delay, found, times, model))
        bench.say("  ".join(lines[-1]))
    bench.keep(tensor_shares=results)
    header = ("a message later by", "a sum", "one, mlx-lm", "its shard()", "one", "two", "plan")
    ratios = ("two / one", "two / shard()", "two / plan")
    bench.show("Tensor shares of two, tokens/s", (*header, *ratios), lines)


def add_delays(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--delays", nargs="*", type=float, default=[0, 0.1, 0.3, 1], help="in milliseconds"
    )


TENSOR_SHARES = Benchmark(
    "tensor-shares", tensor_shares, add_delays, rounds=3, needs=[missing, demo_lacks]
)

if __name__ == "__main__":
    prepare()
    if sys.argv[1] == "late":
        sys.exit(late(float(sys.argv[2]), sys.argv[3:]))
    theirs(*map(int, sys.argv[2:]))
