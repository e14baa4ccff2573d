#!/usr/bin/env python3
"""Generate one text with drafts, in rounds one at a time and drafted on, by turns.

Drafts are the text to come, of which each token is spoiled with a probability. Each rank has one
core and one BLAS thread. With --seconds a stage sleeps for a tiny model: so long for a token, and
--more of that for each more, as a GPU of its own would compute it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _compare import Spread, Table, by_turns, machine, mpirun, parser_of, publish, run
from _models import SMOLLM2
from generation import own_core, prompts

RATES = (0.6, 0.8, 0.95)
LENGTHS = (2, 4, 8, None)
PROMPT = 32
PLAIN = "plain"


def rank(options: argparse.Namespace) -> None:
    """Generate on the ranks that mpirun has started; rank 0 prints the rates as JSON."""
    from shardmlx.common.environment import launched_rank, prepare

    own_core(launched_rank())
    prepare()
    import mlx.core as mx
    import numpy as np
    from mlx_lm.models.llama import Model, ModelArgs

    from shardmlx.inference.drafts import BackOff, Draft, Drafter, Drafting
    from shardmlx.inference.kv_caches import KVCaches
    from shardmlx.inference.later_stage import LaterStage
    from shardmlx.inference.pipeline import FirstStage
    from shardmlx.inference.sampler import BatchSampler
    from shardmlx.inference.sampling_params import SamplingParams
    from shardmlx.inference.scheduler import Scheduler
    from shardmlx.inference.stage import ItemGraph, StageWorker
    from shardmlx.loading.build import build_to_generate
    from shardmlx.models.runtime.slice import Slice

    from shardmlx.distributed import mpi  # isort: skip

    class Oracle(Drafter):
        """Drafts are the ``text`` to come, but for the tokens that are ``wrong``."""

        def __init__(self, text: Sequence[int], rate: float) -> None:
            self._text = text
            self._wrong = np.random.RandomState(1).rand(len(text)) >= rate

        def draft(
            self,
            sequence: int,
            tokens: Sequence[int],
            ahead: Sequence[int],
            pays: Callable[[int], int],
        ) -> Draft:
            begin = len(tokens) + len(ahead)
            there = slice(begin, begin + pays(0))
            pairs = zip(self._text[there], self._wrong[there].tolist(), strict=True)
            return Draft(tuple(token + wrong for token, wrong in pairs))

    class OneAtATime(BackOff):
        def goes_on(self, kind: int) -> bool:
            return False

    class SleepingWorker(StageWorker):
        """A worker whose stage takes as long as is said."""

        def start(self, graph: ItemGraph) -> None:
            self._began = time.perf_counter()
            super().start(graph)

        def finish(self, graph: ItemGraph) -> None:
            super().finish(graph)
            more = options.more * (graph.item.length - 1)
            due = self._began + options.seconds * (1 + more)
            time.sleep(max(due - time.perf_counter(), 0.0))

    transport = mpi.MPITransport(600.0)
    if options.seconds:
        mx.random.seed(0)
        sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 50_000}
        heads = {"num_attention_heads": 2, "num_hidden_layers": transport.size}
        model: Any = Model(ModelArgs("llama", rms_norm_eps=1e-5, **heads, **sizes))
        mx.eval(model.parameters())
    else:
        model = build_to_generate(options.model, dtype=None, adapter_path=None, seed=0)
    layers = len(model.layers)
    # The last one has the head.
    sizes_of = [-(-layers // transport.size)] * (transport.size - 1)
    if options.sizes:
        sizes_of = [int(size) for size in options.sizes.split(",")][:-1]
    borders = [sum(sizes_of[:i]) for i in range(transport.size)] + [layers]
    part = Slice(model, borders[transport.rank], borders[transport.rank + 1])
    if not options.seconds:
        part.load()
    transport.barrier()
    kind = SleepingWorker if options.seconds else StageWorker
    worker = kind(transport, part, KVCaches(part.new_caches), BatchSampler(0))
    if transport.rank > 0:
        LaterStage(worker).run()
        transport.close()
        return
    numbers = iter(range(10**9))
    (prompt,) = prompts(1, PROMPT, 40_000)

    def text(drafting: Drafting | None) -> tuple[list[int], float]:
        """Return the tokens of an answer, and how many came in a second after the first."""
        scheduler = Scheduler(transport.size, 1, 128)
        first_stage, number, tokens = (
            FirstStage(worker, scheduler, None, drafting),
            next(numbers),
            [],
        )
        first_stage.add(number, prompt, SamplingParams(), context=PROMPT + options.tokens)
        begin = 0.0
        while not first_stage.is_idle:
            for _, sampled in first_stage.step():
                begin = begin or time.perf_counter()
                tokens.append(sampled.token)
                if len(tokens) == options.tokens:
                    end = time.perf_counter()
                    first_stage.finish(number)
        first_stage.keep_alive()  # with the news of its end
        return tokens, (len(tokens) - 1) / (end - begin)

    plain, _ = text(None)
    oracles = {rate: Oracle([*prompt, *plain], rate) for rate in options.accepted}
    contenders: dict[str, Callable[[], float]] = {PLAIN: lambda: text(None)[1]}
    for rate in options.accepted:
        for length in LENGTHS:
            for how, kind_of in (("one", OneAtATime), ("on", BackOff)):
                back_off = kind_of(stages=transport.size)
                drafting = Drafting(
                    oracles[rate], length or 16, fixed=length is not None, back_off=back_off
                )

                def drafted(drafting: Drafting = drafting) -> float:
                    tokens, speed = text(drafting)
                    assert tokens == plain, "drafts have changed the text"
                    return speed

                drafted()
                contenders[f"{rate} {length} {how}"] = drafted
    rates = by_turns(contenders, options.rounds)
    first_stage = FirstStage(worker, Scheduler(transport.size, 1, 128))
    first_stage.stop()
    transport.close()
    print(json.dumps(rates))


def table_of(options: argparse.Namespace, speeds: dict[str, list[float]]) -> Table:
    lines = []
    for rate in options.accepted:
        for length in LENGTHS:
            one, on = (speeds[f"{rate} {length} {how}"] for how in ("one", "on"))
            lines.append(
                (
                    f"{rate}",
                    f"{length or 'auto'}",
                    f"{Spread.of(one).median:.1f}",
                    f"{Spread.of(on).median:.1f}",
                    f"{Spread.of_ratios(on, one):.2f}",
                )
            )
    plain = f"{Spread.of(speeds[PLAIN]):.1f}"
    header = ("accepted", "drafts", "one at a time", "drafted on", "by rounds")
    return Table(f"Tokens per second; {plain} without drafts", header, lines)


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--model", type=Path, default=SMOLLM2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, help="of the answer")
    parser.add_argument(
        "--accepted", type=float, nargs="+", default=RATES, help="probabilities, like 0.6 0.8"
    )
    parser.add_argument("--sizes", help="layers of each stage, like 17,13")
    parser.add_argument("--seconds", type=float, default=0.0, help="of a stage for one token")
    parser.add_argument("--more", type=float, default=0.1, help="part of these for each more")
    parser.add_argument("--as", dest="role", choices=("rank",), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.tokens = options.tokens or (8 if options.quick else 96)
    if options.role == "rank":
        rank(options)
        return
    facts = machine()
    own = [str(Path(__file__).resolve()), "--as", "rank", "--rounds", str(options.rounds)]
    for name in ("model", "tokens", "sizes", "seconds", "more"):
        if (value := getattr(options, name)) is not None:
            own += [f"--{name}", str(value)]
    own += ["--accepted", *map(str, options.accepted)]
    speeds = json.loads(run(mpirun(options.ranks, *own)))
    publish(options, facts, [table_of(options, speeds)], {"tokens_per_second": speeds})


if __name__ == "__main__":
    main()
