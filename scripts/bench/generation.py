#!/usr/bin/env python3
"""Generate with mlx-lm in one process and through two stages, by turns: medians, as a table.

One BLAS thread for each process and rank; random prompts; no text ends before its time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2 = ROOT / ".cache/smollm2-135m-instruct"

LONG_PROMPT = 1024
SHORT_PROMPT = 32
BATCH = 8
BATCH_PROMPT = 256


def prompts(count: int, length: int, vocabulary: int = 40_000) -> list[list[int]]:
    """Random token ids, the same in all processes."""
    state = 12345
    rows = []
    for _ in range(count):
        row = []
        for _ in range(length):
            state = (1103515245 * state + 12345) % 2**31
            row.append(1000 + state % vocabulary)
        rows.append(row)
    return rows


Times = dict[str, float]
Work = Callable[[list[list[int]], int], Times]
"""(prompts, tokens of each answer) -> seconds until all first tokens, and in all."""


def serve(work: Work, answers: IO[str]) -> None:
    """Do what each line on stdin asks for."""
    for line in sys.stdin:
        asked = json.loads(line)
        if asked is None:
            break
        count, length, tokens = asked
        answers.write(json.dumps(work(prompts(count, length), tokens)) + "\n")
        answers.flush()


def one_process(model_path: str, answers: IO[str]) -> None:
    """mlx-lm: one text by ``generate_step``, more by ``BatchGenerator``."""
    from shardmlx.environment import prepare

    prepare()
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import BatchGenerator, generate_step

    model, _ = load(model_path)

    def one(prompt: list[int], tokens: int) -> Times:
        start = time.perf_counter()
        first = 0.0
        for i, _ in enumerate(generate_step(mx.array(prompt), model, max_tokens=tokens)):
            first = first or time.perf_counter() - start
            if i + 1 == tokens:
                break
        return {"first": first, "all": time.perf_counter() - start}

    def work(rows: list[list[int]], tokens: int) -> Times:
        if len(rows) == 1:
            return one(rows[0], tokens)
        start = time.perf_counter()
        generator = BatchGenerator(model, stop_tokens=[])
        generator.insert(rows, [tokens] * len(rows))
        seen: set[int] = set()
        first = 0.0
        while responses := generator.next_generated():
            seen |= {response.uid for response in responses}
            if len(seen) == len(rows):
                first = first or time.perf_counter() - start
        generator.close()
        return {"first": first, "all": time.perf_counter() - start}

    serve(work, answers)


def stages(model_path: str, answers: IO[str], chunk: int, sizes: Sequence[int] | None) -> None:
    """This project, on the ranks that mpirun has started."""
    from shardmlx.environment import prepare

    prepare()
    from shardmlx.choice import Choice
    from shardmlx.inference import Follower, Leader
    from shardmlx.loading import build_to_generate
    from shardmlx.models.slice import Slice
    from shardmlx.token_schedule import Scheduler

    from shardmlx import mpi  # isort: skip

    transport = mpi.MPITransport(600.0)
    model = build_to_generate(Path(model_path), dtype=None, adapter_path=None, seed=0)
    layers = len(model.layers)
    if sizes is None:
        sizes = [layers // transport.size] * (transport.size - 1)
        sizes = [*sizes, layers - sum(sizes)]
    start = sum(sizes[: transport.rank])
    part = Slice(model, start, start + sizes[transport.rank])
    part.load()
    transport.barrier()
    if transport.rank > 0:
        Follower(transport, part).run()
        transport.close()
        return
    leader = Leader(transport, part, Scheduler(transport.size, BATCH, chunk))
    numbers = iter(range(10**9))

    def work(rows: list[list[int]], tokens: int) -> Times:
        begin = time.perf_counter()
        counts: dict[int, int] = {}
        for row in rows:
            number = next(numbers)
            counts[number] = 0
            leader.add(number, row, Choice())
        first = 0.0
        while not leader.is_idle:
            for number, _ in leader.step():
                counts[number] += 1
                if counts[number] == tokens:
                    leader.finish(number)
            if not first and all(counts.values()):
                first = time.perf_counter() - begin
        return {"first": first, "all": time.perf_counter() - begin}

    serve(work, answers)
    leader.stop()
    transport.close()


class Contender:
    """A process that works when it is asked to."""

    def __init__(self, command: Sequence[str]) -> None:
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment |= {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, count: int, length: int, tokens: int) -> Times:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([count, length, tokens]) + "\n")
        self._process.stdin.flush()
        answer: Times = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("null\n")  # mpirun does not pass on that stdin is closed
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    here, model = str(Path(__file__).resolve()), str(arguments.model)
    own = [sys.executable, here, "--model", model, "--chunk", str(arguments.chunk)]
    if arguments.sizes:
        own += ["--sizes", arguments.sizes]
    mpirun = [str(Path(sys.executable).with_name("mpirun")), "-n", str(arguments.ranks)]
    mpirun += ["--oversubscribe", "--bind-to", "none"]
    contenders = [Contender([*own, "--as", "one"]), Contender([*mpirun, *own, "--as", "stages"])]
    tokens = arguments.tokens
    cases: dict[str, tuple[tuple[int, int, int], Callable[[Times], float]]] = {
        f"prefill of {LONG_PROMPT} tokens": (
            (1, LONG_PROMPT, 1),
            lambda t: LONG_PROMPT / t["first"],
        ),
        "decode of one text": (
            (1, SHORT_PROMPT, tokens),
            lambda t: (tokens - 1) / (t["all"] - t["first"]),
        ),
        f"{BATCH} texts, {BATCH_PROMPT} + {tokens} tokens each": (
            (BATCH, BATCH_PROMPT, tokens),
            lambda t: BATCH * (BATCH_PROMPT + tokens) / t["all"],
        ),
        "  of that the prompts": (
            (BATCH, BATCH_PROMPT, 0),
            lambda t: BATCH * BATCH_PROMPT / t["first"],
        ),
        "  of that the answers": (
            (BATCH, BATCH_PROMPT, 0),
            lambda t: BATCH * (tokens - 1) / (t["all"] - t["first"]),
        ),
    }
    results: dict[str, Any] = {name: ([], []) for name in cases}
    only = arguments.only.split(",") if arguments.only else None
    try:
        for each in contenders:
            each.ask(1, 200, 8)
            each.ask(2, 40, 4)
        for _ in range(arguments.rounds):
            last: list[Times] = [{}, {}]
            for index, (name, (work, rate)) in enumerate(cases.items()):
                if only and str(min(index, 2)) not in only:
                    continue
                for i, each in enumerate(contenders):
                    if work[2]:
                        last[i] = each.ask(*work)
                    results[name][i].append(rate(last[i]))
    finally:
        for each in contenders:
            each.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=SMOLLM2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a prompt at a time")
    parser.add_argument("--sizes", help="layers of each stage, like 17,13")
    parser.add_argument("--only", help="0: prefill, 1: decode, 2: texts; with commas between")
    parser.add_argument("--as", dest="role", choices=("one", "stages"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")] if arguments.sizes else None
    if arguments.role == "one":
        one_process(str(arguments.model), sys.stdout)
    elif arguments.role == "stages":
        stages(str(arguments.model), sys.stdout, arguments.chunk, sizes)
    else:
        print(f"{'tokens per second':40} {'one process':>12} {'stages':>8} {'ratio':>6}  spread")
        for name, (one, ours) in measure(arguments).items():
            if one:
                ratios = [b / a for a, b in zip(one, ours, strict=True)]
                print(
                    f"{name:40} {statistics.median(one):12.1f} {statistics.median(ours):8.1f} "
                    f"{statistics.median(ratios):6.2f}  {min(ratios):.2f}-{max(ratios):.2f}"
                )


if __name__ == "__main__":
    main()
