"""Generation through our stages, beside mlx-lm. As a program, a process that generates."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.bench.benchmark import (
    Bench,
    Benchmark,
    Spread,
    as_flags,
    environment,
    own_core,
    program,
)
from scripts.bench.trained import PATIENCE, SMOLLM2
from scripts.bench.turns import Contender, Turns, warmed_up
from shardmlx.common.environment import launched_rank, prepare
from shardmlx.distributed.run_ranks import connect
from testbed.jobs import ranks_command

if TYPE_CHECKING:
    from shardmlx.distributed.transport import Transport
    from shardmlx.inference.stage import StageWorker

ONE, THEIRS, OURS = "mlx-lm", "its pipeline", "two stages"
LONG_PROMPT = 1024
SHORT_PROMPT = 32
BATCH = 8
BATCH_PROMPTS = (256, LONG_PROMPT)


Times = dict[str, float]
Work = Callable[[list[list[int]], int], Times]
"""Function of (prompts, tokens of each answer): seconds until all first tokens, and in all."""


def random_prompts(count: int, length: int, vocabulary: int = 40_000) -> list[list[int]]:
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


# A process that generates


def serve(work: Work, turns: Turns) -> None:
    """Warm up, then do what is asked for, until nothing is."""
    for count, length, tokens in ((1, 200, 8), (2, 40, 4)):
        work(random_prompts(count, length), tokens)
    turns.serve(lambda count, length, tokens: work(random_prompts(count, length), tokens))


class Plain:
    """mlx-lm: one text by ``generate_step``, more by ``BatchGenerator``."""

    def __init__(self, model_path: str, *, pipeline: bool) -> None:
        import mlx.core as mx
        from mlx_lm import load
        from mlx_lm.utils import sharded_load

        if pipeline:
            self._model, _ = sharded_load(model_path, mx.distributed.init(backend="ring"))
        else:
            self._model, _ = load(model_path)

    def work(self, rows: list[list[int]], tokens: int) -> Times:
        """Answer prompts with so many tokens each."""
        return self._one(rows[0], tokens) if len(rows) == 1 else self._several(rows, tokens)

    def _one(self, prompt: list[int], tokens: int) -> Times:
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        start = time.perf_counter()
        first = 0.0
        steps = generate_step(mx.array(prompt), self._model, max_tokens=tokens)
        for i, _ in enumerate(steps):
            first = first or time.perf_counter() - start
            if i + 1 == tokens:
                break
        return {"first": first, "all": time.perf_counter() - start}

    def _several(self, rows: list[list[int]], tokens: int) -> Times:
        from mlx_lm.generate import BatchGenerator

        start = time.perf_counter()
        generator = BatchGenerator(self._model, stop_tokens=[])
        generator.insert(rows, [tokens] * len(rows))
        seen: set[int] = set()
        first = 0.0
        while responses := generator.next_generated():
            seen |= {response.uid for response in responses}
            if len(seen) == len(rows):
                first = first or time.perf_counter() - start
        generator.close()
        return {"first": first, "all": time.perf_counter() - start}


def loaded_stage(transport: Transport, model: Any, sizes: Sequence[int] | None) -> StageWorker:
    """Return this rank's stage of a model, whose last one has the rest of the layers; without
    ``sizes`` they are even."""
    from shardmlx.inference.kv_caches import KVCaches
    from shardmlx.inference.sampler import BatchSampler
    from shardmlx.inference.stage import StageWorker
    from shardmlx.models.runtime.slice import Slice

    layers = len(model.layers)
    before = list(sizes or [layers // transport.size] * transport.size)[:-1]
    borders = [sum(before[:i]) for i in range(transport.size)] + [layers]
    part = Slice(model, borders[transport.rank], borders[transport.rank + 1])
    part.load()
    transport.barrier()
    return StageWorker(transport, part, KVCaches(part.new_caches), BatchSampler(0))


def stages(model_path: str, chunk: int, sizes: Sequence[int] | None) -> None:
    """Generate with this project, on the ranks that mpirun has started."""
    from shardmlx.inference.later_stage import LaterStage
    from shardmlx.loading.build import build_to_generate

    with connect(PATIENCE) as transport:
        model = build_to_generate(Path(model_path), dtype=None, adapter_path=None, seed=0)
        worker = loaded_stage(transport, model, sizes)
        if transport.rank > 0:
            LaterStage(worker).run()
        else:
            answer_all(worker, chunk)


def answer_all(worker: StageWorker, chunk: int) -> None:
    """Answer what is asked for, as the first stage."""
    from shardmlx.inference.pipeline import FirstStage
    from shardmlx.inference.sampling_params import SamplingParams
    from shardmlx.inference.scheduler import Scheduler

    first_stage = FirstStage(worker, Scheduler(worker.transport.size, BATCH, chunk))
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

    serve(work, Turns(0))
    first_stage.stop()


def generate() -> None:
    """Generate as a contender, in the place that ``--as`` names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("place", choices=("one", "ring", "stages"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--chunk", type=int, required=True)
    parser.add_argument("--sizes")
    options = parser.parse_args()
    rank = int(os.environ.get("MLX_RANK", launched_rank()))
    own_core(rank)
    prepare()
    if options.place == "stages":
        stages(options.model, options.chunk, sizes_of(options.sizes))
    else:
        plain = Plain(options.model, pipeline=options.place == "ring")
        serve(plain.work, Turns(rank))


def sizes_of(text: str | None) -> list[int] | None:
    """Return the layers of each stage, of ``17,13``."""
    return [int(size) for size in text.split(",")] if text else None


# The benchmark


def as_qwen2(source: Path) -> Path:
    """Write a Llama with tied embeddings as a Qwen2 that computes the same, beside ``source``."""
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


def ring(ranks: int, directory: Path) -> list[dict[str, str]]:
    """Return the environment of MLX's ring backend on each rank, as ``mlx.launch`` sets it."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(ranks)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        hosts = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]
    path = directory / "ring.json"
    path.write_text(json.dumps(hosts))
    return [{"MLX_HOSTFILE": str(path), "MLX_RANK": str(rank)} for rank in range(ranks)]


def contenders(bench: Bench) -> Iterator[Contender]:
    """Start mlx-lm in one process, its pipeline, and our stages."""
    options, ranks = bench.options, bench.options.ranks
    given = {"model": as_qwen2(options.model), "chunk": options.chunk}
    own = as_flags({**given, "sizes": options.sizes} if options.sizes else given)
    plain = [sys.executable, *program("generation")]
    yield Contender(ONE, [[*plain, "one", *own]], environments=[environment()])
    yield Contender(
        THEIRS,
        [[*plain, "ring", *own]] * ranks,
        ranks=ranks,
        environments=[{**environment(), **each} for each in ring(ranks, bench.directory)],
    )
    command = ranks_command(ranks, *program("generation", "stages", *own))
    yield Contender(OURS, [command], environments=[environment()])


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


def cases_of(tokens: int, shorter: int) -> Cases:
    """Return all cases, with answers of so many tokens, and prompts that are so much shorter."""
    longest = LONG_PROMPT // shorter
    cases: Cases = {
        f"prefill of {longest} tokens": (
            (1, longest, 1),
            lambda t: longest / t["first"],
        ),
        "decode of one sequence": (
            (1, SHORT_PROMPT, tokens),
            lambda t: (tokens - 1) / (t["all"] - t["first"]),
        ),
    }
    for prompt in BATCH_PROMPTS:
        cases |= batch_cases(prompt // shorter, tokens)
    return cases


def generation(bench: Bench) -> None:
    """Generate with mlx-lm in one process, by its own pipeline, and through our stages, by turns.

    mlx-lm is called as ``mlx_lm.benchmark`` calls it, its pipeline as ``mlx_lm.benchmark
    --pipeline`` does, over MLX's ring. Every process has one core and one BLAS thread; random
    prompts; no text ends before its time. Cases that are parts of another need that one.

    mlx-lm's pipeline knows few families, and Llama is none of them: SmolLM2 is written down again
    as a Qwen2, whose biases are zero, and all compute that.
    """
    tokens, shorter = (8, 16) if bench.quick else (bench.options.tokens, 1)
    chosen = bench.chosen(cases_of(tokens, shorter))
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in chosen}
    with warmed_up(contenders(bench)) as everyone:
        last: dict[str, Times] = {}
        for _ in range(bench.rounds):
            for name, (work, rate) in chosen.items():
                for each in everyone:
                    if work[2]:
                        last[each.name] = each.turn(work)[0]
                    rates[name].setdefault(each.name, []).append(rate(last[each.name]))
        for each in everyone:
            each.turn(None)
    bench.keep(tokens_per_second=rates)
    lines = [(name, *rate_cells(of)) for name, of in rates.items()]
    bench.show("Tokens per second", ("", ONE, THEIRS, "", OURS, ""), lines)


def rate_cells(of: Mapping[str, Sequence[float]]) -> list[str]:
    """Return medians, and what two contenders are of mlx-lm's one process, round by round."""
    cells = [f"{Spread.of(of[ONE]).median:.1f}"]
    for other in (THEIRS, OURS):
        ratio = Spread.of_ratios(of[other], of[ONE])
        cells += [f"{Spread.of(of[other]).median:.1f}", f"{ratio:.2f}"]
    return cells


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a model, and how it is divided."""
    parser.add_argument("--model", type=Path, default=SMOLLM2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", help="layers of each stage, like 17,13")


def add_generation(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a prompt at a time")


GENERATION = Benchmark("generation", generation, add_generation, rounds=5)

if __name__ == "__main__":
    generate()
