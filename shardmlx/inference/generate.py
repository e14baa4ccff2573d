"""The command ``shardmlx.generate`` on every rank: prepare, generate, report."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from shardmlx.common.environment import Blas
from shardmlx.common.reporter import Reporter, check_writable
from shardmlx.config.inference import DEFAULT_PROMPT, NO_DRAFT, GenerateConfig
from shardmlx.distributed.crew import Crew
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError, file_access, naming
from shardmlx.inference.detokenize import IncrementalDetokenizer
from shardmlx.inference.pipeline import FirstStage
from shardmlx.inference.prompts import PromptEncoder, PromptRequest, read_prompts, read_stdin
from shardmlx.inference.run import InferenceRun
from shardmlx.inference.setup import later_stages, prepare, run_inference
from shardmlx.inference.worker import InferenceWorker
from shardmlx.planning.facts.job_facts import GenerationLoad

RULE = "=" * 10  # mlx-lm draws it so

Prompt = tuple[tuple[int, ...], int]
"""A prompt's tokens, and how many to generate at most."""


def run(config: GenerateConfig, transport: Transport, blas: Blas) -> None:
    """Generate as ``config`` says. On all ranks; raises as ``prepare``."""
    # Answers on stdout are for another program to read.
    is_for_programs = config.prompts is not None and config.output is None
    reporter = Reporter(quiet=transport.rank != 0 or not config.verbose or is_for_programs)
    run_inference(transport, reporter, partial(_generate, config, blas))


def _generate(config: GenerateConfig, blas: Blas, crew: Crew[InferenceWorker]) -> None:
    """Generate what is asked for, on rank 0."""
    crew.worker.reporter.say(str(blas))
    prompts: list[Prompt] = []

    def read(encoder: PromptEncoder) -> GenerationLoad:
        prompts.extend(tokenised(config, encoder))
        return GenerationLoad(
            sequences=len(prompts),
            prompt=max(len(tokens) for tokens, _ in prompts),
            answer=max(most for _, most in prompts),
            context=max(len(tokens) + most for tokens, most in prompts),
        )

    prepared = prepare(config, crew, read)
    with later_stages(crew):
        _answer(config, prepared, prompts)


def tokenised(config: GenerateConfig, encoder: PromptEncoder) -> list[Prompt]:
    """Read and tokenise the prompts that ``config`` names, as mlx-lm does. Raises ``UserError``."""
    if config.prompts is not None:
        requests = read_prompts(config.prompts, config.max_tokens)
    else:
        given = DEFAULT_PROMPT if config.prompt is None else config.prompt
        prompt = given.replace("\\n", "\n").replace("\\t", "\t")
        prompt = read_stdin() if prompt == "-" else prompt
        if not prompt:
            raise UserError("--prompt is empty", "give a text")
        requests = [PromptRequest(prompt, config.max_tokens, "--prompt")]
    if config.output is not None:
        check_writable(Path(config.output), "--output")
    encoder = replace(
        encoder, system_prompt=config.system_prompt, prefill_response=config.prefill_response
    )
    found = []
    for request in requests:
        with naming(request.where):
            tokens = encoder.encode(request.prompt, is_plain=config.ignore_chat_template)
        found.append((tokens, request.max_tokens))
    return found


def _answer(config: GenerateConfig, prepared: InferenceRun, prompts: Sequence[Prompt]) -> None:
    first_stage = prepared.first_stage()
    answers = [
        prepared.ask(first_stage, number, tokens, most)
        for number, (tokens, most) in enumerate(prompts)
    ]
    if config.prompts is None:
        _stream(answers[0], len(prompts[0][0]), first_stage, prepared.reporter)
    else:
        _write(config, prompts, answers, first_stage, prepared.reporter)
    if config.draft != NO_DRAFT:
        prepared.reporter.say(f"Drafts: {first_stage.drafted}")
    first_stage.stop()


def _stream(
    answer: IncrementalDetokenizer, prompt_tokens: int, first_stage: FirstStage, reporter: Reporter
) -> None:
    reporter.say(RULE)
    try:
        for _, text in first_stage.stream({0: answer}):
            print(text, end="", flush=True)
    finally:
        print(flush=True)  # so that an error begins a line
    reporter.say(RULE)
    if not answer.text:
        reporter.say("No text generated for this prompt")
        return
    for what, tokens, seconds in (
        ("Prompt", prompt_tokens, answer.first - answer.started),
        ("Generation", answer.count, answer.last - answer.first),
    ):
        rate = tokens / max(seconds, 1e-9)
        reporter.say(f"{what}: {tokens} tokens, {rate:.3f} tokens-per-sec")


def _write(
    config: GenerateConfig,
    prompts: Sequence[Prompt],
    answers: Sequence[IncrementalDetokenizer],
    first_stage: FirstStage,
    reporter: Reporter,
) -> None:
    """Write all answers, as JSON lines in the order of their prompts, and say how long it took."""
    waiting = deque(zip(prompts, answers, strict=True))
    with ExitStack() as stack, reporter.bar("generating", len(answers)) as bar:
        file = sys.stdout
        if config.output is not None:
            stack.enter_context(file_access("write", config.output))
            file = stack.enter_context(open(config.output, "w", encoding="utf-8"))
        for number, _ in first_stage.stream(dict(enumerate(answers))):
            bar.advance(answers[number].finish_reason is not None)
            while waiting and waiting[0][1].finish_reason is not None:
                (tokens, _), answer = waiting.popleft()
                line = {
                    "text": answer.text,
                    "prompt_tokens": len(tokens),
                    "generation_tokens": answer.count,
                    "finish_reason": answer.finish_reason,
                }
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                file.flush()
    seconds = max(max(each.last for each in answers) - answers[0].started, 1e-9)
    read = sum(len(tokens) for tokens, _ in prompts)
    generated = sum(answer.count for answer in answers)
    reporter.say(
        f"{len(answers)} answers in {seconds:.1f} s: {read} prompt tokens, {generated} generated, "
        f"{(read + generated) / seconds:.3f} tokens-per-sec together"
    )
