"""A program's own training loop, beside ``train`` and the stages that generate. As a program, the
ranks of a loop."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.bench.benchmark import (
    Bench,
    Benchmark,
    Spread,
    add_bind,
    as_flags,
    environment,
    own_core,
    program,
    verdict,
)
from scripts.bench.generation import BATCH, random_prompts
from scripts.bench.trained import (
    PATIENCE,
    SMOLLM2,
    TINY,
    demo_lacks,
    make_long_rows,
    make_wide,
    training,
)
from scripts.bench.turns import Contender, Turns, warmed_up
from shardmlx.common.environment import launched_rank, prepare
from shardmlx.distributed.run_ranks import connect
from testbed.jobs import ranks_command

if TYPE_CHECKING:
    from shardmlx.api.client import Call, TrainClient, TrainedModel

RANKS = 2
CLIENTS = 4
SHORT = 8
"""Short steps, or samples, of a turn."""

LORA_RANK = 8
TRAIN, GENERATE, LOOP = "train", "generate", "loop"


class Loop:
    """What a loop is asked for, on rank 0: ``rows`` of ``length`` tokens a step of one client,
    ``few`` of each of several; answers of so many ``tokens`` to so many ``prompts``."""

    def __init__(self, client: TrainClient, options: argparse.Namespace) -> None:
        self._client = client
        self._models = [client.create_model(rank=LORA_RANK, unembed=False) for _ in range(CLIENTS)]
        self._rows = rows_of(client, options.data, options.length)[: options.rows]
        self._few = self._rows[: options.few]
        self._brief = [{name: values[:8] for name, values in self._rows[0].items()}]
        self._prompts = random_prompts(options.prompts, options.length // 2)
        self._tokens = options.tokens
        self._turns = 0
        self._works: dict[str, Callable[[], None]] = {
            "train": self._train,
            "sample": self._sample,
            "train and sample": self._alternate,
            "short steps": partial(self._shortly, ("train",)),
            "short samples": partial(self._shortly, ("sample",)),
            "short ones by turns": partial(self._shortly, ("train", "sample")),
            "one after the other": self._one_by_one,
            "at once": self._at_once,
        }
        for work in self._works.values():
            work()

    def work(self, name: str) -> float:
        """Do one of its works; return the seconds."""
        begin = time.perf_counter()
        self._works[name]()
        return time.perf_counter() - begin

    def _train(self) -> None:
        for call in step(self._models[0], self._rows):
            call.result()

    def _sample(self) -> None:
        # Its first token is new, and with it all of a prompt: nothing of it is in the prefix cache.
        self._turns += 1
        how = {"max_tokens": self._tokens, "temperature": 0.0, "stop_ids": ()}
        prompts = [[1 + self._turns % 500, *each[1:]] for each in self._prompts]
        calls = [self._client.sample(prompt, **how) for prompt in prompts]
        for call in calls:
            call.result()

    def _alternate(self) -> None:
        self._train()
        self._sample()

    def _shortly(self, kinds: Sequence[str]) -> None:
        # So little of each that the change between them is not lost beside it.
        for _ in range(SHORT):
            if "train" in kinds:
                for each in step(self._models[0], self._brief):
                    each.result()
            if "sample" in kinds:
                self._turns += 1
                prompt = [1 + self._turns % 500, *self._prompts[0][1:8]]
                call = self._client.sample(prompt, max_tokens=2, temperature=0.0, stop_ids=())
                call.result()

    def _one_by_one(self) -> None:
        for model in self._models:
            for call in step(model, self._few):
                call.result()

    def _at_once(self) -> None:
        calls = [call for model in self._models for call in step(model, self._few)]
        for call in calls:
            call.result()


def step(model: TrainedModel, rows: list[dict[str, Any]]) -> list[Call[Any]]:
    """Begin a step of a model; return its two calls."""
    return [model.forward_backward(rows), model.optim_step(1e-5)]


def rows_of(client: TrainClient, data: Path, length: int) -> list[dict[str, Any]]:
    """Return the rows that ``train`` cuts out of long texts: a token more is a target only."""
    lines = (data / "train.jsonl").read_text().splitlines()
    texts = [client.tokenizer.encode(json.loads(line)["text"]) for line in lines]
    return [
        {"tokens": tokens[:length], "target_tokens": tokens[1 : length + 1]} for tokens in texts
    ]


def run_loop() -> None:
    """Be a rank of a loop, which works when it is asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    for name in ("rows", "few", "length", "prompts", "tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    own_core(launched_rank())
    prepare()
    from shardmlx.api.client import train_client

    with (
        connect(PATIENCE) as transport,
        train_client(
            transport,
            model=options.model,
            max_train_length=options.length,
            max_adapters=CLIENTS,
            max_lora_rank=LORA_RANK,
            batch_size=options.prompts,
            timeout=PATIENCE,
            quiet=True,
        ) as client,
    ):
        if client is not None:
            Turns(0).serve(Loop(client, options).work)


def contenders(bench: Bench) -> Iterator[Contender]:
    """Start the loop, ``train`` on the same rows, and the stages that answer the same prompts."""
    model = bench.options.model
    if bench.quick:  # prompts have tokens like those of SmolLM2
        model = make_wide(bench.directory / "model", **{**TINY, "vocab_size": 42_000})
    data = make_long_rows(bench.directory / "data")
    work = work_of(bench)
    lora = {"rank": LORA_RANK, "dropout": 0.0, "scale": 32.0 / LORA_RANK}
    own = as_flags({"model": model, "data": data, **work})
    command = ranks_command(RANKS, *program("own_loop", *own), bind=bench.options.bind)
    yield Contender(LOOP, [command], environments=[environment()])
    flags = {
        "model": str(model), "data": str(data), "fine_tune_type": "lora", "num_layers": -1,
        "batch_size": work["rows"], "max_seq_length": work["length"] + 1, "optimizer": "adamw",
        "learning_rate": 1e-5, "lora_parameters": lora, "pipeline_stages": RANKS,
        "schedule": "1f1b",
    }  # fmt: skip
    yield training(bench, TRAIN, flags, ranks=RANKS, bind=bench.options.bind)
    stages = as_flags({"model": model, "chunk": 128})
    command = ranks_command(RANKS, *program("generation", "stages", *stages))
    yield Contender(GENERATE, [command], environments=[environment()])


def work_of(bench: Bench) -> dict[str, int]:
    """Return what a loop is asked for."""
    rows, length, tokens = (8, 32, 8) if bench.quick else (8, 64, 48)
    few = bench.options.few
    return {"rows": rows, "few": few, "length": length, "prompts": BATCH, "tokens": tokens}


def own_loop(bench: Bench) -> None:
    """Steps and answers of a loop of a program's own, beside ``train`` and generation.

    LoRA of rank 8 in all linear layers of SmolLM2-135M, float32, on two ranks of a core each, 8
    rows of 64 tokens a step. By turns:

      loop, train     forward_backward and optim_step of the rows, until both are done
      train           shardmlx.train with the same rows, stages and schedule
      loop, sample    answers of 48 tokens to 8 prompts of 32, greedy
      generate        the same prompts through stages by themselves
      loop, both      a step, then the answers: what it takes longer than both alone
      short ones      8 steps of a row of 8 tokens, 8 answers of 2 tokens, and these by turns: what
                      these take longer is the change between the two, for each step
      four clients    a LoRA and a few rows each, one after the other, and at once
    """
    work = work_of(bench)
    found: dict[str, list[float]] = {}
    with warmed_up(contenders(bench)) as everyone:
        by_name = {each.name: each for each in everyone}
        loop = by_name[LOOP]

        def steps() -> float:
            return float(by_name[TRAIN].turn()[0]["step_seconds"])

        def answers() -> float:
            prompts = (work["prompts"], work["length"] // 2, work["tokens"])
            return float(by_name[GENERATE].turn(prompts)[0]["all"])

        names = (
            *("train", "sample", "train and sample"),
            *("short steps", "short samples", "short ones by turns"),
            *("one after the other", "at once"),
        )
        works: dict[str, Callable[[], float]] = {TRAIN: steps, GENERATE: answers}
        works |= {f"loop, {name}": partial(asked, loop, name) for name in names}
        for _ in range(bench.rounds):
            for name, measure in works.items():
                found.setdefault(name, []).append(measure())
        by_name[TRAIN].turn()
        loop.turn(None)
        by_name[GENERATE].turn(None)
    bench.keep(seconds=found)
    show(bench, found)


def asked(loop: Contender, name: str) -> float:
    """Return the seconds that a loop takes for one of its works."""
    return float(loop.turn([name])[0])


def show(bench: Bench, found: dict[str, list[float]]) -> None:
    """Print the seconds of each work, and the ratios that count."""
    lines = [(name, f"{Spread.of(seconds):.3f}") for name, seconds in found.items()]
    bench.show("Seconds", ("what", "median (least-most)"), lines)
    train, sample, both = (
        found[f"loop, {each}"] for each in ("train", "sample", "train and sample")
    )
    short = [
        found[f"loop, {each}"] for each in ("short steps", "short samples", "short ones by turns")
    ]
    more = [c - a - b for a, b, c in zip(train, sample, both, strict=True)]
    change = [(c - a - b) / SHORT for a, b, c in zip(*short, strict=True)]
    ratios = (
        ("tokens/s of forward_backward beside train", found[TRAIN], train, 0.95, False),
        ("samples/s beside generate", found[GENERATE], sample, 0.9, False),
        ("change between the two, of a step", change, train, 0.02, True),
        ("a step and samples, longer than both alone, of a step", more, train, 0.02, True),
        (
            f"{CLIENTS} clients at once beside one after the other",
            found["loop, one after the other"],
            found["loop, at once"],
            1.15,
            False,
        ),
    )
    rows = []
    for name, above, below, goal, at_most in ratios:
        spread = Spread.of_ratios(above, below)
        rows.append((name, f"{spread:.3f}", verdict(spread.median, goal, at_most=at_most)))
    bench.show("Ratios of turns", ("what", "median (least-most)", "goal"), rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add its own options."""
    add_bind(parser)
    parser.add_argument("--model", type=Path, default=SMOLLM2)
    parser.add_argument("--few", type=int, default=4, help="rows of each of the four clients")


OWN_LOOP = Benchmark("own-loop", own_loop, add_options, rounds=7, needs=(demo_lacks,))

if __name__ == "__main__":
    run_loop()
