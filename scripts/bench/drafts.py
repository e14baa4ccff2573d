"""Drafts of the text to come, in rounds one at a time and drafted on. As a program, a rank."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scripts.bench.benchmark import Bench, Benchmark, Spread, as_flags, own_core, program, run
from scripts.bench.generation import add_model, loaded_stage, random_prompts, sizes_of
from scripts.bench.trained import PATIENCE
from scripts.bench.turns import by_turns
from shardmlx.common.environment import launched_rank, prepare
from shardmlx.distributed.run_ranks import connect
from shardmlx.inference.drafts import BackOff, Draft, Drafter, Drafting
from testbed.jobs import ranks_command

RATES = (0.6, 0.8, 0.95)
LENGTHS = (2, 4, 8, None)
PROMPT = 32
PLAIN = "plain"


# A rank


class Oracle(Drafter):
    """Drafts are the ``text`` to come, but for the tokens that are ``wrong``."""

    def __init__(self, text: Sequence[int], rate: float) -> None:
        self._text = text
        self._wrong = np.random.RandomState(1).rand(len(text)) >= rate

    def draft(
        self, sequence: int, tokens: Sequence[int], ahead: Sequence[int], pays: Callable[[int], int]
    ) -> Draft:
        """Return as many tokens as pay."""
        begin = len(tokens) + len(ahead)
        there = slice(begin, begin + pays(0))
        pairs = zip(self._text[there], self._wrong[there].tolist(), strict=True)
        return Draft(tuple(token + wrong for token, wrong in pairs))


class OneAtATime(BackOff):
    """A rule by which no round is drafted on."""

    def goes_on(self, kind: int) -> bool:
        """Return False."""
        return False


HOW = {"one": OneAtATime, "on": BackOff}


@dataclass
class Speaker:
    """Generates the same text again and again, on rank 0."""

    worker: Any
    tokens: int
    prompt: Sequence[int]
    texts: int = 0

    def text(self, drafting: Drafting | None) -> tuple[list[int], float]:
        """Return the tokens of an answer, and how many came in a second after the first."""
        from shardmlx.inference.pipeline import FirstStage
        from shardmlx.inference.sampling_params import SamplingParams
        from shardmlx.inference.scheduler import Scheduler

        scheduler = Scheduler(self.worker.transport.size, 1, 128)
        first_stage = FirstStage(self.worker, scheduler, None, drafting)
        self.texts += 1
        tokens: list[int] = []
        context = len(self.prompt) + self.tokens
        first_stage.add(self.texts, [*self.prompt], SamplingParams(), context=context)
        begin = end = 0.0
        while not first_stage.is_idle:
            for _, sampled in first_stage.step():
                begin = begin or time.perf_counter()
                tokens.append(sampled.token)
                if len(tokens) == self.tokens:
                    end = time.perf_counter()
                    first_stage.finish(self.texts)
        first_stage.keep_alive()  # with the news of its end
        return tokens, (len(tokens) - 1) / (end - begin)

    def stop(self) -> None:
        """Tell the other stages that there are no more texts."""
        from shardmlx.inference.pipeline import FirstStage
        from shardmlx.inference.scheduler import Scheduler

        FirstStage(self.worker, Scheduler(self.worker.transport.size, 1, 128)).stop()

    def contenders(self, rates: Sequence[float]) -> dict[str, Callable[[], float]]:
        """Return what generates the text, by name; all but the first with drafts."""
        plain, _ = self.text(None)
        found: dict[str, Callable[[], float]] = {PLAIN: lambda: self.text(None)[1]}
        for rate in rates:
            oracle = Oracle([*self.prompt, *plain], rate)
            for length in LENGTHS:
                for how, kind in HOW.items():
                    back_off = kind(stages=self.worker.transport.size)
                    is_fixed = length is not None
                    drafting = Drafting(oracle, length or 16, fixed=is_fixed, back_off=back_off)
                    found[f"{rate} {length} {how}"] = self._drafted(drafting, plain)
        return found

    def _drafted(self, drafting: Drafting, plain: Sequence[int]) -> Callable[[], float]:
        def speed() -> float:
            tokens, found = self.text(drafting)
            assert tokens == plain, "drafts have changed the text"
            return found

        speed()
        return speed


def sleeping(worker: Any, seconds: float, more: float) -> None:
    """Let a worker's stage take so many seconds for a token, and ``more`` of them for each more."""
    start, finish = worker.start, worker.finish
    began = 0.0

    def started(graph: Any) -> None:
        nonlocal began
        began = time.perf_counter()
        start(graph)

    def finished(graph: Any) -> None:
        finish(graph)
        due = began + seconds * (1 + more * (graph.item.length - 1))
        time.sleep(max(due - time.perf_counter(), 0.0))

    worker.start, worker.finish = started, finished


def tiny_model(layers: int) -> Any:
    """Return a model that takes next to no time."""
    import mlx.core as mx
    from mlx_lm.models.llama import Model, ModelArgs

    mx.random.seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 50_000}
    heads = {"num_attention_heads": 2, "num_hidden_layers": layers}
    model = Model(ModelArgs("llama", rms_norm_eps=1e-5, **heads, **sizes))
    mx.eval(model.parameters())
    return model


def rank() -> None:
    """Generate on the ranks that mpirun has started; rank 0 prints the rates as JSON."""
    parser = argparse.ArgumentParser()
    add_drafts(parser)
    parser.add_argument("--rounds", type=int, required=True)
    options = parser.parse_args()
    own_core(launched_rank())
    prepare()
    from shardmlx.inference.later_stage import LaterStage
    from shardmlx.loading.build import build_to_generate

    with connect(PATIENCE) as transport:
        if options.seconds:
            model = tiny_model(transport.size)
        else:
            model = build_to_generate(options.model, dtype=None, adapter_path=None, seed=0)
        worker = loaded_stage(transport, model, sizes_of(options.sizes))
        if options.seconds:
            sleeping(worker, options.seconds, options.more)
        if transport.rank == 0:
            speaker = Speaker(worker, options.tokens, random_prompts(1, PROMPT)[0])
            rates = by_turns(speaker.contenders(options.accepted), options.rounds)
            speaker.stop()
            print(json.dumps(rates))
        else:
            LaterStage(worker).run()


# The benchmark


def drafts(bench: Bench) -> None:
    """Generate one text with drafts, in rounds one at a time and drafted on, by turns.

    Drafts are the text to come, of which each token is spoiled with a probability. Each rank has
    one core and one BLAS thread. With --seconds a stage sleeps for a tiny model: so long for a
    token, and --more of that for each more, as a GPU of its own would compute it.
    """
    options = bench.options
    names = ("model", "sizes", "seconds", "more")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    tokens = 8 if bench.quick else options.tokens
    words = as_flags({**given, "tokens": tokens, "rounds": bench.rounds})
    words += ["--accepted", *map(str, options.accepted)]
    speeds = json.loads(run(ranks_command(options.ranks, *program("drafts", *words))))
    bench.keep(tokens_per_second=speeds)
    lines = [draft_cells(speeds, rate, length) for rate in options.accepted for length in LENGTHS]
    plain = f"{Spread.of(speeds[PLAIN]):.1f}"
    header = ("accepted", "drafts", "one at a time", "drafted on", "by rounds")
    bench.show(f"Tokens per second; {plain} without drafts", header, lines)


def draft_cells(
    speeds: Mapping[str, Sequence[float]], rate: float, length: int | None
) -> tuple[str, ...]:
    """Return a line of the table."""
    one, on = (speeds[f"{rate} {length} {how}"] for how in HOW)
    return (
        f"{rate}",
        f"{length or 'auto'}",
        f"{Spread.of(one).median:.1f}",
        f"{Spread.of(on).median:.1f}",
        f"{Spread.of_ratios(on, one):.2f}",
    )


def add_drafts(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--tokens", type=int, default=96, help="of the answer")
    parser.add_argument(
        "--accepted", type=float, nargs="+", default=RATES, help="probabilities, like 0.6 0.8"
    )
    parser.add_argument("--seconds", type=float, default=0.0, help="of a stage for one token")
    parser.add_argument("--more", type=float, default=0.1, help="part of these for each more")


DRAFTS = Benchmark("drafts", drafts, add_drafts, rounds=3)

if __name__ == "__main__":
    rank()
