"""Costs that grow with the work and no faster. As a program, one row of the table."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from scripts.bench.benchmark import (
    Bench,
    Benchmark,
    Spread,
    as_flags,
    environment,
    last_json,
    program,
    run,
    verdict,
)
from scripts.bench.trained import NEVER, WIDE
from shardmlx.common.environment import prepare
from testbed.jobs import ranks_command
from testbed.rows import write

Work = Callable[[Path, bool], float]
"""Function of a directory of its own, and whether it is to be over soon."""

ANNOUNCE = "announce"
"""Word of the program of ranks that announce steps, in the place of a row's number."""

MICROBATCHES, LAYERS, MUON_LAYERS = 4, 8, 30
"""Of the runs whose evaluations are counted."""


# Models and rows


@cache
def vocabulary() -> list[str]:
    """Return 900 words."""
    draw = random.Random(5)
    return ["".join(draw.choices("aeioutnrsldm", k=draw.randint(2, 8))) for _ in range(900)]


def words_of(seed: int, count: int) -> str:
    """Return a text of so many words, the same for the same seed."""
    return " ".join(random.Random(seed).choices(vocabulary(), k=count))


def talk(seed: int, messages: int, words: int = 12) -> dict[str, Any]:
    """Return a row of so many messages."""
    roles = ("user", "assistant")
    said = [words_of(seed + i, words) for i in range(messages)]
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]}


def tiny(directory: Path, layers: int = 2, width: int = 64) -> Path:
    """Write a model of so many layers and such a width, whose texts never end by themselves."""
    import mlx.core as mx

    from testbed.small_models import tokenizer_directory, with_tokenizer

    data = Path(write(directory / "words", train=[talk(i, 2) for i in range(100)]))
    config = {
        **WIDE, "num_hidden_layers": layers, "hidden_size": width, "vocab_size": 1000,
        "intermediate_size": 2 * width, "num_attention_heads": 4, "num_key_value_heads": 2,
        "tie_word_embeddings": True, "max_position_embeddings": 1 << 17,
    }  # fmt: skip
    model = directory / f"model-{layers}-{width}"
    with_tokenizer(model, config, tokenizer_directory(directory / "tokenizer", data, 900))
    weights: Any = mx.load(str(model / "model.safetensors"))
    weights["model.embed_tokens.weight"][config["eos_token_id"]] = 0
    mx.save_safetensors(str(model / "model.safetensors"), weights, {"format": "mlx"})
    return model


def by_turns_of(fewer: Callable[[], Any], more: Callable[[], Any], rounds: int = 3) -> float:
    """Return by how much more CPU time of this thread ``more`` takes, by turns."""
    ratios = []
    for _ in range(rounds):
        first = thread_seconds(fewer)
        ratios.append(thread_seconds(more) / first)
    return Spread.of(ratios).median


def thread_seconds(work: Callable[[], Any]) -> float:
    """Return the CPU time that this thread takes."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


# Generation


@contextmanager
def generating(model: Path, tokens: int) -> Iterator[Callable[[], int]]:
    """Yield what generates a text in this process, and returns how many tokens it had."""
    import shardmlx

    counted = 0
    with shardmlx.connect() as transport:
        pipeline = shardmlx.load_pipeline(str(model), transport, max_tokens=tokens, temp=0.0)

        def text() -> int:
            nonlocal counted
            counted = 0
            for _ in pipeline.stream_generate("hello there"):
                counted += 1
            return counted

        yield text


def begun_ahead(directory: Path, quick: bool) -> float:
    """Return the share of decode steps that were begun before the one before was read."""
    from shardmlx.inference.commands import Decode
    from shardmlx.inference.stage import StageWorker

    steps: list[str] = []
    start, finish = StageWorker.start, StageWorker.finish

    def started(worker: Any, graph: Any) -> None:
        if isinstance(graph.item, Decode):
            steps.append("begun")
        start(worker, graph)

    def finished(worker: Any, graph: Any) -> None:
        finish(worker, graph)
        if isinstance(graph.item, Decode):
            steps.append("read")

    with (
        patch.object(StageWorker, "start", started),
        patch.object(StageWorker, "finish", finished),
        generating(tiny(directory), 60) as text,
    ):
        text()
    ahead = under_way = 0
    for step in steps:
        under_way += 1 if step == "begun" else -1
        ahead += step == "read" and under_way > 0
    return ahead / steps.count("read")


def announcing(directory: Path, quick: bool) -> float:
    """Return the microseconds of CPU time in which rank 0 of two announces a step that repeats its
    group's last one."""
    words = program("growth", ANNOUNCE, directory, int(quick))
    return float(last_json(run(ranks_command(2, *words), timeout=300)))


def announce_repeated(steps: int) -> float | None:
    """Announce so many steps from rank 0 to rank 1; return the microseconds of each there."""
    import shardmlx
    from shardmlx.distributed.transport import Outbox
    from shardmlx.inference.announcements import Announcer
    from shardmlx.inference.commands import Decode

    with shardmlx.connect() as transport:
        announcer = Announcer(Outbox(transport), transport.size)
        if transport.rank > 0:
            for _ in range(steps):
                number = announcer.await_next()
                transport.wait(number, lambda: "the benchmark")
                announcer.heard(number, lambda: "the benchmark")
            return None
        step = (Decode((0,), 0),)
        announcer.announce(step, "the benchmark")
        began = time.thread_time()
        for _ in range(steps - 1):
            announcer.announce(step, "the benchmark")
            announcer.outbox.drain(8)
        taken = time.thread_time() - began
        announcer.outbox.drain(0)
        return taken / (steps - 1) * 1e6


def beside_mlx_lm(directory: Path, quick: bool, layers: int = 2) -> float:
    """Return the speed of generation, by CPU time of all threads, beside mlx_lm's."""
    from mlx_lm import load, stream_generate

    tokens = 100 if quick else 2000
    path = tiny(directory, layers)
    model, tokenizer, *_ = load(str(path))

    def theirs() -> None:
        count = sum(1 for _ in stream_generate(model, tokenizer, "hello there", max_tokens=tokens))
        assert count >= tokens, f"mlx_lm's text ended after {count} tokens"

    ratios = []
    with generating(path, tokens) as ours:
        for work in (ours, theirs):
            work()
        for _ in range(1 if quick else 3):
            seconds = []
            for work in (ours, theirs):
                start = time.process_time()
                work()
                seconds.append(time.process_time() - start)
            ratios.append(seconds[1] / seconds[0])
    return Spread.of(ratios).median


def lookup(directory: Path, quick: bool) -> float:
    """Return how much longer a draft by lookup takes in a text of 100,000 tokens than in 1,000."""
    from shardmlx.inference.drafts import LookupDrafter

    def drafting(length: int) -> Callable[[], None]:
        draw = random.Random(1)
        text = [draw.randrange(30_000) for _ in range(length - 6)]
        text += text[10:16]
        drafter = LookupDrafter()
        drafter.read(0, text)

        def work() -> None:
            for _ in range(2000):
                drafter.draft(0, text, (), lambda kind: 8)

        work()
        return work

    return by_turns_of(drafting(1000), drafting(100_000))


# Training


@dataclass(frozen=True)
class StepCosts:
    """The calls of ``mx.eval`` and the milliseconds of the main thread that a step takes."""

    evaluations: float
    milliseconds: float


def step_costs(directory: Path, **options: Any) -> StepCosts:
    """Return what steps of a run on one rank take, behind the first ones."""
    import mlx.core as mx

    import shardmlx

    data = write(directory / "data", train=[talk(i, 2) for i in range(64)])
    config = shardmlx.TrainConfig.from_flat(
        **{
            "data": data, "adapter_path": str(directory / "out"), "num_layers": -1, "iters": 15,
            "batch_size": MICROBATCHES, "micro_batch_size": 1, "steps_per_report": 1,
            "val_batches": 0, "save_every": NEVER, "pack": False, **options,
        }
    )  # fmt: skip
    evaluate, calls = mx.eval, 0

    def counted(*arrays: Any) -> None:
        nonlocal calls
        calls += 1
        evaluate(*arrays)

    seen: list[tuple[int, float]] = []

    def listen(event: str, values: Any) -> None:
        if event == "train":
            seen.append((calls, 1000 * time.thread_time()))

    with patch.object(mx, "eval", counted), shardmlx.connect() as transport:
        shardmlx.train_model(config, transport, on_event=listen)
    (first, began), (last, ended) = seen[4], seen[-2]
    steps = len(seen) - 6
    return StepCosts((last - first) / steps, (ended - began) / steps)


def evaluations(directory: Path, quick: bool, **options: Any) -> float:
    """Return the calls of ``mx.eval`` in a step."""
    return step_costs(directory, model=str(tiny(directory, LAYERS)), **options).evaluations


def of_full(directory: Path, quick: bool) -> float:
    """Return the calls in a step of a full fine-tune."""
    return evaluations(directory, quick, fine_tune_type="full")


def of_muon(directory: Path, quick: bool) -> float:
    """Return the calls in a step of one with Muon, whose temporary arrays are the most, of 40 MB of
    weights: these are not updated together in any case."""
    model = str(tiny(directory, MUON_LAYERS, width=192))
    return step_costs(directory, model=model, fine_tune_type="full", optimizer="muon").evaluations


def milliseconds(directory: Path, quick: bool) -> float:
    """Return the CPU time of the main thread that a micro-batch takes, in milliseconds."""
    costs = step_costs(directory, model=str(tiny(directory)))
    return costs.milliseconds / MICROBATCHES


def start(directory: Path, quick: bool) -> float:
    """Return how much more CPU time a run takes to its first step with 100 times as many rows."""
    model = tiny(directory)
    seconds = []
    for count in (1000, 10_000 if quick else 100_000):
        rows = [talk(i % 500, 2) for i in range(count)]
        data = write(directory / f"rows-{count}", train=rows, valid=rows[:16])
        flags = {"model": model, "data": data, "adapter_path": directory / "out", "iters": 1}
        flags |= {"batch_size": 4, "micro_batch_size": 1, "val_batches": 1, "num_layers": -1}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "shardmlx.train", *as_flags(flags)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
        seconds.append(user + system)
    return seconds[1] / seconds[0]


def tokenised(data: str, tokenizer: Any, **options: Any) -> None:
    """Make tokens of all rows in a directory."""
    from shardmlx.config.train import TrainConfig
    from shardmlx.training.datasets import read_data

    given = {"data": data, "batch_size": 1, "max_seq_length": 1 << 20, **options}
    found = read_data(TrainConfig.from_flat(**given).wanted_data, tokenizer, None)
    for number in range(len(found.train)):
        _ = found.train[number]


def a_row(directory: Path, quick: bool, *, masked: bool = False) -> float:
    """Return how much longer a row takes to become tokens than with mlx-lm's ``ChatDataset``."""
    from mlx_lm.tokenizer_utils import load
    from mlx_lm.tuner.datasets import ChatDataset

    tokenizer = load(tiny(directory))
    rows = [talk(i, 2) for i in range(200 if quick else 2000)]
    data = write(directory / "rows", train=rows)
    dataset = ChatDataset(rows, tokenizer, mask_prompt=masked)

    def theirs() -> None:
        for line in (directory / "rows/train.jsonl").read_text().splitlines():
            dataset.process(json.loads(line))

    def ours() -> None:
        tokenised(data, tokenizer, mask_prompt=masked)

    for work in (ours, theirs):
        work()
    return by_turns_of(theirs, ours)


def of_masked(directory: Path, quick: bool) -> float:
    """Return the same with ``--mask-prompt``."""
    return a_row(directory, quick, masked=True)


def messages(directory: Path, quick: bool) -> float:
    """Return how much longer a row of 400 messages takes than one of 100, where each answer
    counts."""
    from mlx_lm.tokenizer_utils import load

    tokenizer = load(tiny(directory))
    few, many = (
        write(directory / f"{count}", train=[talk(i, count, 30) for i in range(2)])
        for count in (100, 400)
    )

    def work(data: str) -> None:
        tokenised(data, tokenizer, loss_on="assistant")

    work(few)
    return by_turns_of(partial(work, few), partial(work, many))


def packing(directory: Path, quick: bool) -> float:
    """Return the milliseconds in which 1,024 rows are packed in 256 micro-batches."""
    from shardmlx.engine.batches import make_batch, pack

    draw = np.random.RandomState(0)
    samples = [(draw.randint(0, 1000, draw.randint(20, 200)).tolist(), 0) for _ in range(1024)]
    batch = make_batch(samples, 2048)
    return 1000 * min(thread_seconds(lambda: pack(batch, 256)) for _ in range(5))


# Planning, hubs, pages


def planned(directory: Path, config: dict[str, Any], macs: int, batch: int) -> float:
    """Return the CPU time of a plan for so many Macs of 64 GB."""
    from shardmlx.config.train import TrainConfig
    from shardmlx.planning.facts.chips import machines_of
    from shardmlx.planning.training_plan import plan_training

    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    machines = [replace(mac, flops=5e12) for mac in machines_of(", ".join(["64GB"] * macs))]
    options = TrainConfig.from_flat(model=str(directory), batch_size=batch, max_seq_length=1024)
    return thread_seconds(lambda: plan_training(options, machines))


SHAPE = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128256,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPE_70B = {
    **SHAPE, "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672,
    "num_attention_heads": 64, "quantization": {"group_size": 64, "bits": 4},
}  # fmt: skip


def plan(directory: Path, quick: bool) -> float:
    """Return how much longer a plan for 4,096 sequences takes than for 64."""
    seconds = []
    for batch in (64, 4096):
        # In a process of its own, since a plan finds again what the one before has computed.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
            processes.submit(planned, directory / "model", SHAPE, 4, 8).result()
            plan = processes.submit(planned, directory / "model", SHAPE, 4, batch)
            seconds.append(plan.result())
    return seconds[1] / seconds[0]


def plan_of_70b(directory: Path, quick: bool) -> float:
    """Return the seconds of a plan of a 70B model for 16 Macs."""
    return planned(directory / "model", SHAPE_70B, 16, 64)


def hub(directory: Path, quick: bool) -> float:
    """Return how much more memory the median of 32 islands takes than that of 2. Linux only."""
    size = 1_000_000 if quick else 8_000_000
    grown = []
    for islands in (2, 32):
        # In a process of its own, since the memory of the one before is used again.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
            grown.append(processes.submit(of_median, islands, size, directory).result())
    return grown[1] / grown[0]


def of_median(islands: int, size: int, directory: Path) -> int:
    """Return the kB that the median of so many islands takes above its start."""
    from shardmlx.islands.aggregate import median

    base = np.random.default_rng(0).standard_normal(size, np.float32)
    arrays = (base * np.float32(1 + number) for number in range(islands))
    Path("/proc/self/clear_refs").write_text("5")  # the most that is resident, from now on
    before = resident("VmRSS")
    median(arrays, [1.0] * islands, directory)
    return resident("VmHWM") - before


def resident(name: str) -> int:
    """Return a line of this process's status, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def page(directory: Path, quick: bool) -> float:
    """Return the MB of the page of a run with 20,000 reports."""
    from shardmlx.runreport.page import render_page

    ranks = [
        {
            "rank": rank, "host": "vm", "step_seconds": 0.0123456, "compute_seconds": 0.01,
            "exposed_comm_seconds": 0.001, "bubble": 0.1, "peak_memory_bytes": 123456789,
            "active_memory_bytes": 12345678, "process_peak_bytes": 223456789,
        }
        for rank in range(2)
    ]  # fmt: skip
    report = {
        "event": "train", "loss": 2.5, "tokens": 512, "tokens_per_second": 1234.5,
        "learning_rate": 1e-5, "grad_norm": 1.2, "skipped": 0, "step_seconds": 0.0123,
        "bubble": 0.1, "shapes": 3, "ranks": ranks,
    }  # fmt: skip
    begin: dict[str, Any] = {"event": "start", "step": 0, "iters": 20_000, "options": {}}
    events = [begin, *({**report, "step": step} for step in range(1, 20_001))]
    return len(render_page(events, title="run").encode()) / 1e6


# The table


@dataclass(frozen=True)
class Row:
    """What is measured, and the goal of it."""

    name: str
    goal: float
    work: Work
    at_most: bool = True


ROWS = (
    Row("decode steps begun ahead, one process", 0.95, begun_ahead, at_most=False),
    Row("generate of 2,000 tokens, 2 x 64 / mlx_lm", 0.90, beside_mlx_lm, at_most=False),
    Row("the same, 32 x 64", 0.97, partial(beside_mlx_lm, layers=32), at_most=False),
    Row("two ranks, announcing a repeated step, us", 60, announcing),
    Row("mx.eval of a LoRA step, 4 micro-batches", 3 * MICROBATCHES + 4, evaluations),
    Row("mx.eval of a full step, 8 layers", 3 * MICROBATCHES + 4 + LAYERS, of_full),
    Row("the same with Muon, 30 layers", 3 * MICROBATCHES + 4 + MUON_LAYERS, of_muon),
    Row("main thread a micro-batch, 2 x 64, ms", 5, milliseconds),
    Row("start, 100,000 rows / 1,000", 2, start),
    Row("tokenising a row / mlx-lm", 1.1, a_row),
    Row("tokenising a masked row / mlx-lm", 1.1, of_masked),
    Row("400 messages / 100, --loss-on assistant", 4.5, messages),
    Row("packing 1,024 rows in 256, ms", 15, packing),
    Row("plan, batch 4,096 / 64", 2, plan),
    Row("plan of 70B on 16 Macs, s", 5, plan_of_70b),
    Row("hub, median of 32 islands / 2, memory", 1.2, hub),
    Row("page of 20,000 reports, MB", 3, page),
    Row("lookup draft at 100,000 tokens / 1,000", 2, lookup),
)


def growth(bench: Bench) -> None:
    """Costs that grow with the work and no faster: ratios, counts, and whether goals are reached.

    Each row is measured in a process of its own, once in each round. Ratios of time are of CPU
    time, by turns within the process, so that other work on the machine hardly matters. Five
    minutes on two cores.
    """
    rows = bench.chosen({row.name: row for row in ROWS})
    values: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(bench.rounds):
        for name, row in rows.items():
            directory = bench.path(f"{ROWS.index(row)}-{len(values[name])}")
            directory.mkdir()
            words = program("growth", ROWS.index(row), directory, int(bench.quick))
            output = run([sys.executable, *words], environment(), timeout=900)
            values[name].append(float(last_json(output)))
            bench.say(f"{name}: {values[name][-1]:.3g}")
    bench.keep(growth=values)
    lines = []
    for name, row in rows.items():
        spread = Spread.of(values[name])
        reached = verdict(spread.median, row.goal, at_most=row.at_most)
        lines.append((name, f"{spread:.2f}", reached))
    bench.show("Growth", ("what", "median (least-most)", "goal"), lines)


GROWTH = Benchmark("growth", growth, rounds=3)

if __name__ == "__main__":
    number, where, is_quick = sys.argv[1:]
    prepare()
    if number == ANNOUNCE:
        found = announce_repeated(1_000 if is_quick == "1" else 20_000)
    else:
        found = ROWS[int(number)].work(Path(where), is_quick == "1")
    if found is not None:
        print(json.dumps(found), flush=True)
