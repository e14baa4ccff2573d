#!/usr/bin/env python3
"""Make steps of a training loop by turns, and watch the memory of its ranks.

    python scripts/soak_steps.py --steps 2000

Two ranks train a LoRA of a small model. A step is forward_backward, optim_step and a sample from a
new snapshot. The resident memory of the ranks is printed now and then. The script fails if it grows
by more than ``--most`` bytes a step in the second half. Linux only.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
from _soaking import parser_of, small_model

import shardmlx
from shardmlx.api.client import TrainClient
from testbed.jobs import ROOT, Running

RANKS = 2
EVERY = 250


def resident(pid: int) -> int:
    """Return the bytes of a process that are in memory."""
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) << 10


def make_steps(client: TrainClient, steps: int) -> list[int]:
    """Make steps; return the resident bytes of all ranks, every so many of them. On rank 0."""
    parent = psutil.Process().parent()
    assert parent is not None, "mpirun has started it"
    pids = [each.pid for each in parent.children()]
    model = client.create_model(rank=4)
    random = np.random.default_rng(0)
    seen = []
    for step in range(steps + 1):
        if step % EVERY == 0:
            each = [resident(pid) for pid in pids]
            seen.append(sum(each))
            print(step, *(f"{nbytes / 2**20:.1f} MiB" for nbytes in each), flush=True)
        rows = []
        for length in random.integers(6, 40, 4):
            tokens = random.integers(1, 90, length)
            rows.append({"tokens": tokens[:-1], "target_tokens": tokens[1:]})
        loss = model.forward_backward(rows)
        model.optim_step(1e-3)
        loss.result()
        snapshot = model.snapshot()
        prompt = [int(token) for token in random.integers(1, 90, 5)]
        client.sample(prompt, snapshot, count=2, max_tokens=4).result()
        client.drop_snapshot(snapshot)
    return seen


def on_ranks(model: str, steps: int, most: float) -> None:
    """Make the steps with all ranks. Raises ``SystemExit`` if memory grows."""
    with (
        shardmlx.connect() as transport,
        shardmlx.train_client(
            transport, model=model, max_train_length=64, max_lora_rank=4
        ) as client,
    ):
        if client is None:
            return
        seen = make_steps(client, steps)
    middle = len(seen) // 2
    grown = (seen[-1] - seen[middle]) / (EVERY * max(1, len(seen) - 1 - middle))
    print(f"bytes a step in the second half, all ranks together: {grown:.0f}")
    if grown > most:
        raise SystemExit(1)


def main(words: Sequence[str] | None = None) -> int:
    """Return 1 if memory grows."""
    parser = parser_of(str(__doc__))
    parser.add_argument("--steps", type=int, default=2000, help="to make (default: 2000)")
    parser.add_argument(
        "--most", type=float, default=8192, help="bytes a step to grow at most (default: 8192)"
    )
    parser.add_argument("--model", help="given to the ranks that this script starts")
    flags = parser.parse_args(words)
    if flags.model is not None:
        on_ranks(flags.model, flags.steps, flags.most)
        return 0
    with tempfile.TemporaryDirectory() as name:
        model, _ = small_model(Path(name))
        given = ("--model", model, "--steps", str(flags.steps), "--most", str(flags.most))
        with Running.ranks(RANKS, ROOT / "scripts/soak_steps.py", *given) as running:
            shown = 0
            while running.wait(0.5) is None:
                said = running.job().stdout
                print(said[shown:], end="", flush=True)
                shown = len(said)
            job = running.job()
    print(job.stdout[shown:], end="")
    print(job.stderr, end="", file=sys.stderr)
    return job.returncode


if __name__ == "__main__":
    raise SystemExit(main())
