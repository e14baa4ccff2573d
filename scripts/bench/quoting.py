"""Answers that quote their prompt, with drafts by lookup. As a program, a process that answers."""

from __future__ import annotations

import argparse
import ast
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scripts.bench.benchmark import (
    Bench,
    Benchmark,
    Spread,
    as_flags,
    environment,
    own_core,
    program,
)
from scripts.bench.trained import SMOLLM2
from scripts.bench.turns import Contender, Turns, warmed_up
from shardmlx.common.environment import launched_rank, prepare
from testbed.jobs import ROOT, ranks_command

THEIRS, PLAIN, LOOKUP = "mlx-lm, drafts", "two stages", "with lookup"
QUOTING, FREE = "quoting", "free"
TEXTS = 5
"""Passages, and functions, of each kind of task."""

PROSE = (
    "Repeat the following text, word for word.",
    "Replace the word '{longest}' by 'something' in the following text, and change nothing else.",
    "Correct the spelling of the following text, and change nothing else.",
    "Quote the two most important sentences of the following text, word for word.",
    "Write the following text as a list, with one sentence in each line.",
)
CODE = (
    "Rename the function {name} of this Python code to renamed, and write the whole code.",
    "Write this Python code again, with a comment above each return.",
    "Write this Python code again without its docstring.",
)
QUESTIONS = (
    "Write a short story about a sailor and a lighthouse keeper.",
    "How does a bicycle stay upright? Explain it to a child.",
)


def passages() -> list[str]:
    """Return paragraphs of the documentation, of 250 to 500 characters."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    paragraphs = (each for page in pages for each in page.read_text().split("\n\n"))
    prose = (" ".join(each.split()) for each in paragraphs if each[:1].isalpha())
    fitting = [each for each in prose if 250 <= len(each) <= 500]
    return fitting[:: len(fitting) // TEXTS][:TEXTS]


def functions() -> list[ast.FunctionDef]:
    """Return functions of the code, of 6 to 16 lines, with docstrings."""
    found = []
    for path in sorted((ROOT / "shardmlx/common").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                lines = (node.end_lineno or 0) - node.lineno
                found += [node] * (6 <= lines <= 16)
    return found[:: len(found) // TEXTS][:TEXTS]


def tasks() -> list[tuple[str, str]]:
    """Return pairs of (kind, prompt)."""
    prompts = []
    for ask in PROSE:
        for text in passages():
            longest = max(re.findall(r"[a-z]+", text), key=len)
            given = re.sub(r"\b(\w)(\w)(\w{5,})", r"\1\3\2", text) if "spelling" in ask else text
            prompts.append((QUOTING, f"{ask.format(longest=longest)}\n\n{given}"))
    for ask in CODE:
        prompts += [
            (QUOTING, f"{ask.format(name=node.name)}\n\n{ast.unparse(node)}")
            for node in functions()
        ]
    return [*prompts, *((FREE, question) for question in QUESTIONS)]


@dataclass(frozen=True)
class Answer:
    """The ``tokens`` of an answer, and the ``seconds`` from its first to its last."""

    tokens: list[int]
    seconds: float
    drafts: str = ""


Work = Callable[[str, bool, int], Answer]
"""Function of (prompt, whether to draft, tokens at most)."""


# A process that answers


def mlx_lm(model_path: str, drafted: int) -> None:
    """mlx-lm in one process, with a second copy of the model that drafts."""
    from mlx_lm import load, stream_generate

    model, tokenizer, *_ = load(model_path)
    draft_model = load(model_path)[0]

    def work(prompt: str, _: bool, most: int) -> Answer:
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        tokens, times = [], []
        for response in stream_generate(
            model,
            tokenizer,
            ids,
            max_tokens=most,
            draft_model=draft_model,
            num_draft_tokens=drafted,
        ):
            tokens.append(response.token)
            times.append(time.perf_counter())
        return Answer(tokens, times[-1] - times[0])

    work("Hello", True, 8)
    Turns(0).serve(lambda *asked: vars(work(*asked)))


def stages(model_path: str, tokens: int) -> None:
    """Two stages, on the ranks that mpirun has started."""
    import shardmlx
    from shardmlx.common.reporter import Reporter
    from shardmlx.config.inference import LOOKUP as BY_LOOKUP
    from shardmlx.config.inference import InferenceConfig
    from shardmlx.distributed.crew import Crew
    from shardmlx.inference.drafts import NO_DRAFTS, BackOff, Drafter, Drafting, LookupDrafter
    from shardmlx.inference.run import InferenceRun
    from shardmlx.inference.setup import later_stages, run_inference, typical_load
    from shardmlx.inference.setup import prepare as load
    from shardmlx.inference.worker import InferenceWorker

    config = InferenceConfig.from_flat(model=model_path, draft=BY_LOOKUP, max_tokens=tokens)

    def lead(crew: Crew[InferenceWorker]) -> None:
        prepared = load(config, crew, lambda encoder: typical_load(config, 1, 1024, encoder))
        with later_stages(crew):
            answer_all(prepared)

    def answer_all(prepared: InferenceRun) -> None:
        first_stage = prepared.first_stage()
        encoder = prepared.prompts
        drafting = first_stage.drafting
        numbers = iter(range(10**9))

        def work(prompt: str, drafts: bool, most: int) -> Answer:
            number = next(numbers)
            back_off = BackOff(stages=drafting.back_off.stages)
            new = replace(drafting, drafter=LookupDrafter(), back_off=back_off)
            first_stage.drafting = new if drafts else Drafting(Drafter(), 0)
            answer = prepared.ask(first_stage, number, encoder.encode(prompt), most)
            tokens, counts = [], NO_DRAFTS
            while not first_stage.is_idle:
                for _, sampled in first_stage.step():
                    tokens.append(sampled.token)
                    counts = first_stage.drafts(number)
                    answer.take(sampled.token)
                    if answer.finish_reason is not None:
                        first_stage.finish(number)
            return Answer(tokens, answer.last - answer.first, str(counts) if drafts else "")

        work("Hello", True, 8)
        Turns(0).serve(lambda *asked: vars(work(*asked)))
        first_stage.stop()

    with shardmlx.connect() as transport:
        run_inference(transport, Reporter(quiet=True), lead)


def answer() -> None:
    """Answer as a contender."""
    parser = argparse.ArgumentParser()
    parser.add_argument("place", choices=("one", "stages"))
    add_quoting(parser)
    options = parser.parse_args()
    own_core(launched_rank())
    prepare()
    if options.place == "stages":
        stages(str(options.model), options.tokens)
    else:
        mlx_lm(str(options.model), options.drafted)


# The benchmark


def contenders(bench: Bench, tokens: int) -> Iterator[Contender]:
    """Start two stages, and mlx-lm unless it is to be left out."""
    options = bench.options
    own = as_flags({"model": options.model, "drafted": options.drafted, "tokens": tokens})
    command = ranks_command(2, *program("quoting", "stages", *own))
    yield Contender(PLAIN, [command], environments=[environment()])
    if not options.no_mlx_lm:
        one = [sys.executable, *program("quoting", "one", *own)]
        yield Contender(THEIRS, [one], environments=[environment()])


def measure(bench: Bench) -> dict[str, list[dict[str, Any]]]:
    """Return the answers of each contender to each task, in the rounds."""
    tokens = 16 if bench.quick else bench.options.tokens
    asked = [task for task in tasks() if bench.wants(task[0])][:: 10 if bench.quick else 1]
    found: dict[str, list[dict[str, Any]]] = {PLAIN: [], LOOKUP: [], THEIRS: []}
    with warmed_up(contenders(bench, tokens)) as everyone:
        ours, *theirs = everyone
        for _ in range(bench.rounds):
            for kind, prompt in asked:
                turns = [(PLAIN, ours, False), (LOOKUP, ours, True)]
                turns += [(THEIRS, each, True) for each in theirs]
                for name, each, drafts in turns:
                    answer = each.turn((prompt, drafts, tokens))[0]
                    found[name].append({"kind": kind, "prompt": prompt, **answer})
                plain, lookup = found[PLAIN][-1], found[LOOKUP][-1]
                bench.say(
                    f"{kind} {len(found[PLAIN])}: {plain['seconds'] / lookup['seconds']:.2f} x, "
                    f"{len(plain['tokens'])} tokens; {lookup['drafts']}"
                )
        for each in everyone:
            each.turn(None)
    return found


def rate(answers: Sequence[Mapping[str, Any]]) -> float:
    """Return the tokens a second of answers, behind the first token of each."""
    tokens = sum(len(each["tokens"]) - 1 for each in answers)
    seconds: float = sum(each["seconds"] for each in answers)
    return tokens / seconds


def row(kind: str, found: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> list[str]:
    """Return what lookup is of another contender: by answers, in all, and equal texts."""
    pairs = [
        pair
        for pair in zip(found[LOOKUP], found[name], strict=False)
        if pair[0]["kind"] == kind and all(len(each["tokens"]) > 1 for each in pair)
    ]
    mine, other = zip(*pairs, strict=True)
    ratios = Spread.of_ratios([rate([each]) for each in mine], [rate([each]) for each in other])
    same = sum(pair[0]["tokens"] == pair[1]["tokens"] for pair in pairs)
    return [
        kind,
        name,
        f"{rate(other):.1f}",
        f"{rate(mine):.1f}",
        f"{rate(mine) / rate(other):.2f}",
        f"{ratios:.2f}",
        f"{same} of {len(pairs)}",
    ]


def quoting(bench: Bench) -> None:
    """Answers that quote their prompt: two stages with --draft lookup and without, and mlx-lm.

    Forty tasks copy, edit, extract or list passages of the documentation and functions of the code;
    two questions quote nothing. Greedy, by turns: two stages have a core each and one BLAS thread,
    mlx-lm has one core, and a second copy of the model drafts, since there is no smaller one with
    this tokenizer. Each answer begins with drafts that have proved nothing yet, as that of
    ``generate`` does. --only quoting or free selects tasks.
    """
    found = measure(bench)
    bench.keep(answers=found)
    others = [name for name in (PLAIN, THEIRS) if found[name]]
    kinds = dict.fromkeys(each["kind"] for each in found[PLAIN])
    lines = [row(kind, found, name) for kind in kinds for name in others]
    header = ("", "beside", "its tok/s", LOOKUP, "ratio", "of each answer", "same text")
    bench.show("Tokens per second", header, lines)


def add_quoting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=SMOLLM2)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer at most")
    parser.add_argument("--drafted", type=int, default=3, help="tokens that mlx-lm drafts")
    parser.add_argument("--no-mlx-lm", action="store_true", help="leave it out")


QUOTING_TASKS = Benchmark("quoting", quoting, add_quoting)

if __name__ == "__main__":
    answer()
