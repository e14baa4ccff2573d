#!/usr/bin/env python3
"""Generate with mlx-lm in one process, by its own pipeline, and through our stages, by turns.

mlx-lm is called as ``mlx_lm.benchmark`` calls it, its pipeline as ``mlx_lm.benchmark --pipeline``
does, over MLX's ring. Every process has one core and one BLAS thread; random prompts; no text ends
before its time. Prints medians as a table.

mlx-lm's pipeline knows few families, and Llama is none of them: SmolLM2 is written down again as a
Qwen2, whose biases are zero, and all compute that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

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


def own_core(rank: int) -> None:
    """A core for this process; where the system lets it be."""
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def mlx_lm(model_path: str, answers: IO[str], *, pipeline: bool) -> None:
    """mlx-lm: one text by ``generate_step``, more by ``BatchGenerator``."""
    from shardmlx.environment import prepare

    own_core(int(os.environ.get("MLX_RANK", "0")))
    prepare()
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import BatchGenerator, generate_step
    from mlx_lm.utils import sharded_load

    if pipeline:
        model, _ = sharded_load(model_path, mx.distributed.init(backend="ring"))
    else:
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
    from shardmlx.environment import launched_rank, prepare

    own_core(launched_rank())
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


def as_qwen2(source: Path) -> Path:
    """A Llama with tied embeddings as a Qwen2 that computes the same, beside ``source``."""
    from shardmlx.environment import prepare

    prepare()
    import mlx.core as mx

    target = source.with_name(f"{source.name}-as-qwen2")
    if (target / "config.json").exists():
        return target
    target.mkdir(exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    weights = {}
    for path in sorted(source.glob("*.safetensors")):
        weights |= mx.load(str(path))
    for name in list(weights):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            bias = name.removesuffix("weight") + "bias"
            weights[bias] = mx.zeros(weights[name].shape[0], weights[name].dtype)
    file = "model-00001-of-00001.safetensors"
    mx.save_safetensors(str(target / file), weights, metadata={"format": "mlx"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(sorted(weights), file)}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    for path in source.glob("*"):
        if path.name.startswith(("tokenizer", "special", "chat_template", "generation_config")):
            (target / path.name).write_bytes(path.read_bytes())
    config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (target / "config.json").write_text(json.dumps(config))
    return target


class Contender:
    """Processes that work when they are asked to; the first of them answers."""

    def __init__(self, name: str, command: Sequence[str], each: Sequence[dict[str, str]]) -> None:
        self.name = name
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment |= {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        self._processes = [
            subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment | own,
            )
            for own in each
        ]

    def ask(self, count: int, length: int, tokens: int) -> Times:
        self._tell(json.dumps([count, length, tokens]))
        answers = [json.loads(self._out(process).readline()) for process in self._processes]
        first: Times = answers[0]
        return first

    def close(self) -> None:
        self._tell("null")  # mpirun does not pass on that stdin is closed
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()

    def _tell(self, line: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()

    @staticmethod
    def _out(process: subprocess.Popen[str]) -> IO[str]:
        assert process.stdout is not None
        return process.stdout


def ring(ranks: int, directory: str) -> list[dict[str, str]]:
    """What MLX's ring backend wants to know on each rank, as ``mlx.launch`` tells it."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(ranks)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        hosts = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]
    path = Path(directory) / "ring.json"
    path.write_text(json.dumps(hosts))
    return [{"MLX_HOSTFILE": str(path), "MLX_RANK": str(rank)} for rank in range(ranks)]


def contenders(arguments: argparse.Namespace, directory: str) -> list[Contender]:
    here, model = str(Path(__file__).resolve()), str(as_qwen2(arguments.model))
    own = [sys.executable, here, "--model", model, "--chunk", str(arguments.chunk)]
    if arguments.sizes:
        own += ["--sizes", arguments.sizes]
    ranks = arguments.ranks
    mpirun = [str(Path(sys.executable).with_name("mpirun")), "-n", str(ranks)]
    mpirun += ["--oversubscribe", "--bind-to", "none"]
    return [
        Contender("mlx-lm", [*own, "--as", "one"], [{}]),
        Contender("its pipeline", [*own, "--as", "ring"], ring(ranks, directory)),
        Contender("stages", [*mpirun, *own, "--as", "stages"], [{}]),
    ]


def measure(arguments: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Tokens per second of each case: for each contender, in the rounds."""
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
        "of that the prompts": (
            (BATCH, BATCH_PROMPT, 0),
            lambda t: BATCH * BATCH_PROMPT / t["first"],
        ),
        "of that the answers": (
            (BATCH, BATCH_PROMPT, 0),
            lambda t: BATCH * (tokens - 1) / (t["all"] - t["first"]),
        ),
    }
    only = arguments.only.split(",") if arguments.only else None
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        everyone = contenders(arguments, directory)
        for each in everyone:
            stack.callback(each.close)
        for each in everyone:
            each.ask(1, 200, 8)
            each.ask(2, 40, 4)
        results: dict[str, list[list[float]]] = {name: [[] for _ in everyone] for name in cases}
        for _ in range(arguments.rounds):
            last: list[Times] = [{} for _ in everyone]
            for index, (name, (work, rate)) in enumerate(cases.items()):
                if only and str(min(index, 2)) not in only:
                    continue
                for i, each in enumerate(everyone):
                    if work[2]:
                        last[i] = each.ask(*work)
                    results[name][i].append(rate(last[i]))
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
    parser.add_argument(
        "--as", dest="role", choices=("one", "ring", "stages"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")] if arguments.sizes else None
    model = str(arguments.model)
    if arguments.role == "stages":
        stages(model, sys.stdout, arguments.chunk, sizes)
    elif arguments.role:
        mlx_lm(model, sys.stdout, pipeline=arguments.role == "ring")
    else:
        print_table(measure(arguments))


def print_table(results: dict[str, list[list[float]]]) -> None:
    """As Markdown: medians, and what ours is of mlx-lm's one process, round by round."""
    print("| tokens per second | mlx-lm | its pipeline | | stages | | of the rounds |")
    print("|---|---|---|---|---|---|---|")
    for name, (one, theirs, ours) in results.items():
        if one:
            ratios = [sorted(b / a for a, b in zip(one, x, strict=True)) for x in (theirs, ours)]
            cells = [
                name,
                f"{statistics.median(one):.1f}",
                *(
                    cell
                    for rates, ratio in zip((theirs, ours), ratios, strict=True)
                    for cell in (
                        f"{statistics.median(rates):.1f}",
                        f"{statistics.median(ratio):.2f}x",
                    )
                ),
                f"{ratios[1][0]:.2f}-{ratios[1][-1]:.2f}",
            ]
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
