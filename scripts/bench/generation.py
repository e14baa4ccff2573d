#!/usr/bin/env python3
"""Generate with mlx-lm in one process, by its own pipeline, and through our stages, by turns.

mlx-lm is called as ``mlx_lm.benchmark`` calls it, its pipeline as ``mlx_lm.benchmark --pipeline``
does, over MLX's ring. Every process has one core and one BLAS thread; random prompts; no text ends
before its time.

mlx-lm's pipeline knows few families, and Llama is none of them: SmolLM2 is written down again as a
Qwen2, whose biases are zero, and all compute that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from _compare import Spread, Table, environment, machine, mpirun, parser_of, publish
from _models import SMOLLM2
from _turns import Contender, Turns, warmed_up

ONE, THEIRS, OURS = "mlx-lm", "its pipeline", "two stages"
LONG_PROMPT = 1024
SHORT_PROMPT = 32
BATCH = 8
BATCH_PROMPTS = (256, LONG_PROMPT)


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
"""Function of (prompts, tokens of each answer): seconds until all first tokens, and in all."""


def serve(work: Work, turns: Turns) -> None:
    """Warm up, then do what is asked for, until nothing is."""
    for count, length, tokens in ((1, 200, 8), (2, 40, 4)):
        work(prompts(count, length), tokens)
    turns.answer(None)
    while (asked := turns.rest()) is not None:
        count, length, tokens = asked
        turns.answer(work(prompts(count, length), tokens))
    turns.answer(None)


def own_core(rank: int) -> None:
    """Bind this process to a core, where the system allows it."""
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def mlx_lm(model_path: str, *, pipeline: bool) -> None:
    """mlx-lm: one text by ``generate_step``, more by ``BatchGenerator``."""
    from shardmlx.common.environment import prepare

    rank = int(os.environ.get("MLX_RANK", "0"))
    own_core(rank)
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

    serve(work, Turns(rank))


def stages(model_path: str, chunk: int, sizes: Sequence[int] | None) -> None:
    """Generate with this project, on the ranks that mpirun has started."""
    from shardmlx.common.environment import launched_rank, prepare

    own_core(launched_rank())
    prepare()
    from shardmlx.inference.kv_caches import KVCaches
    from shardmlx.inference.later_stage import LaterStage
    from shardmlx.inference.pipeline import FirstStage
    from shardmlx.inference.sampler import BatchSampler
    from shardmlx.inference.sampling_params import SamplingParams
    from shardmlx.inference.scheduler import Scheduler
    from shardmlx.inference.stage import StageWorker
    from shardmlx.loading.build import build_to_generate
    from shardmlx.models.runtime.slice import Slice

    from shardmlx.distributed import mpi  # isort: skip

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
    worker = StageWorker(transport, part, KVCaches(part.new_caches), BatchSampler(0))
    if transport.rank > 0:
        LaterStage(worker).run()
        transport.close()
        return
    scheduler = Scheduler(transport.size, BATCH, chunk)
    first_stage = FirstStage(worker, scheduler)
    numbers = iter(range(10**9))

    def work(rows: list[list[int]], tokens: int) -> Times:
        begin = time.perf_counter()
        counts: dict[int, int] = {}
        for row in rows:
            number = next(numbers)
            counts[number] = 0
            first_stage.add(number, row, SamplingParams())
        first = 0.0
        while not first_stage.is_idle:
            for number, _ in first_stage.step():
                counts[number] += 1
                if counts[number] == tokens:
                    first_stage.finish(number)
            if not first and all(counts.values()):
                first = time.perf_counter() - begin
        return {"first": first, "all": time.perf_counter() - begin}

    serve(work, Turns(transport.rank))
    first_stage.stop()
    transport.close()


def as_qwen2(source: Path) -> Path:
    """Write a Llama with tied embeddings as a Qwen2 that computes the same, beside ``source``."""
    from shardmlx.common.environment import prepare

    prepare()
    import mlx.core as mx

    target = source.with_name(f"{source.name}-as-qwen2")
    if (target / "config.json").exists():
        return target
    target.mkdir(exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    weights: dict[str, mx.array] = {}
    for path in sorted(source.glob("*.safetensors")):
        loaded = mx.load(str(path))
        assert isinstance(loaded, dict), "safetensors hold named arrays"
        weights |= loaded
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


def ring(ranks: int, directory: str) -> list[dict[str, str]]:
    """Return the environment of MLX's ring backend on each rank, as ``mlx.launch`` sets it."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(ranks)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        hosts = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]
    path = Path(directory) / "ring.json"
    path.write_text(json.dumps(hosts))
    return [{"MLX_HOSTFILE": str(path), "MLX_RANK": str(rank)} for rank in range(ranks)]


def contenders(options: argparse.Namespace, directory: str) -> Iterator[Contender]:
    model = as_qwen2(options.model)
    own = [str(Path(__file__).resolve()), "--model", str(model), "--chunk", options.chunk]
    if options.sizes:
        own += ["--sizes", options.sizes]
    ranks = options.ranks
    plain = [sys.executable, *own, "--as"]
    yield Contender(ONE, [[*plain, "one"]], environments=[environment()])
    yield Contender(
        THEIRS,
        [[*plain, "ring"]] * ranks,
        ranks=ranks,
        environments=[{**environment(), **each} for each in ring(ranks, directory)],
    )
    yield Contender(OURS, [mpirun(ranks, *own, "--as", "stages")], environments=[environment()])


Cases = dict[str, tuple[tuple[int, int, int], Callable[[Times], float]]]
"""Workloads by name: (prompts, their tokens, tokens of an answer), and tokens per second."""


def batch_cases(prompt: int, tokens: int) -> Cases:
    """Return the cases of several sequences at once: the whole, and two parts of the same runs."""
    return {
        f"{BATCH} sequences, {prompt} + {tokens} tokens each": (
            (BATCH, prompt, tokens),
            lambda t: BATCH * (prompt + tokens) / t["all"],
        ),
        f"of that the prompts of {prompt}": (
            (BATCH, prompt, 0),
            lambda t: BATCH * prompt / t["first"],
        ),
        f"of that the answers to {prompt}": (
            (BATCH, prompt, 0),
            lambda t: BATCH * (tokens - 1) / (t["all"] - t["first"]),
        ),
    }


def groups_of_cases(tokens: int) -> list[Cases]:
    """Return the contenders in the order of --only."""
    prefill: Cases = {
        f"prefill of {LONG_PROMPT} tokens": (
            (1, LONG_PROMPT, 1),
            lambda t: LONG_PROMPT / t["first"],
        )
    }
    decode: Cases = {
        "decode of one sequence": (
            (1, SHORT_PROMPT, tokens),
            lambda t: (tokens - 1) / (t["all"] - t["first"]),
        )
    }
    return [prefill, decode, *(batch_cases(prompt, tokens) for prompt in BATCH_PROMPTS)]


def measure(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Tokens per second of each case: of each contender, in the rounds."""
    groups = groups_of_cases(options.tokens)
    only = options.only.split(",") if options.only else None
    chosen: Cases = {}
    for number, group in enumerate(groups):
        if only is None or str(number) in only:
            chosen |= group
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in chosen}
    with (
        tempfile.TemporaryDirectory() as directory,
        warmed_up(contenders(options, directory)) as everyone,
    ):
        last: dict[str, Times] = {}
        for _ in range(options.rounds):
            for name, (work, rate) in chosen.items():
                for each in everyone:
                    if work[2]:
                        last[each.name] = each.turn(work)[0]
                    rates[name].setdefault(each.name, []).append(rate(last[each.name]))
        for each in everyone:
            each.turn(None)
    return rates


def table_of(rates: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    """Medians, and what two stages are of mlx-lm's one process, round by round."""
    return Table(
        "Tokens per second",
        ("", ONE, THEIRS, "", OURS, ""),
        [
            (
                name,
                f"{Spread.of(of[ONE]).median:.1f}",
                *(
                    cell
                    for other in (THEIRS, OURS)
                    for cell in (
                        f"{Spread.of(of[other]).median:.1f}",
                        f"{Spread.of_ratios(of[other], of[ONE]):.2f}",
                    )
                ),
            )
            for name, of in rates.items()
        ],
    )


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--model", type=Path, default=SMOLLM2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, help="of each answer")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a prompt at a time")
    parser.add_argument("--sizes", help="layers of each stage, like 17,13")
    parser.add_argument(
        "--only", help="0: prefill, 1: decode, 2, 3: several sequences; with commas between"
    )
    parser.add_argument(
        "--as", dest="role", choices=("one", "ring", "stages"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 5)
    options.tokens = options.tokens or (8 if options.quick else 48)
    model = str(options.model)
    if options.role == "stages":
        sizes = [int(size) for size in options.sizes.split(",")] if options.sizes else None
        stages(model, options.chunk, sizes)
    elif options.role:
        mlx_lm(model, pipeline=options.role == "ring")
    else:
        facts = machine()
        rates = measure(options)
        publish(options, facts, [table_of(rates)], {"tokens_per_second": rates})


if __name__ == "__main__":
    main()
