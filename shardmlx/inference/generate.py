"""The command ``shardmlx.generate`` on every rank: prepare, generate, report."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from shardmlx.common.environment import Blas
from shardmlx.common.reporter import Bar, Reporter, check_writable
from shardmlx.config.inference import DEFAULT_PROMPT, GenerateConfig
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError
from shardmlx.inference.detokenize import IncrementalDetokenizer
from shardmlx.inference.pipeline import FirstStage
from shardmlx.inference.plan import GenerationLoad
from shardmlx.inference.prompts import PromptReader, PromptRequest, read_prompts, read_stdin
from shardmlx.inference.setup import (
    InferenceRun,
    new_detokenizer,
    prepare,
    report_memory,
    sampling_params_of,
)

RULE = "=" * 10
"""Line above and below the text, as mlx-lm draws it."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt's tokens, and how many to generate at most."""

    tokens: Sequence[int]
    max_tokens: int


def run(config: GenerateConfig, transport: Transport, blas: Blas) -> None:
    """Generate as ``config`` says, which is the same on all ranks. All ranks must call it.

    Raises ``AgreedError`` on all ranks alike for what the user can mend, before weights are read.
    """
    # Answers on stdout are for another program to read.
    is_for_programs = config.prompts is not None and config.output is None
    reporter = Reporter(quiet=transport.rank != 0 or not config.verbose or is_for_programs)
    reporter.say(str(blas))
    prompts: list[TokenizedPrompt] = []

    def read(reader: PromptReader, most_positions: int | None) -> GenerationLoad:
        prompts.extend(tokenised(config, reader))
        return load_of(prompts)

    prepared = prepare(config, transport, reporter, read)
    if prepared.reader is None:
        prepared.later_stage().run()
    else:
        _lead(config, prepared, prepared.reader, prompts, reporter)
    report_memory(prepared, reporter)


def tokenised(config: GenerateConfig, reader: PromptReader) -> list[TokenizedPrompt]:
    """Read and tokenise the prompts that ``config`` names, as mlx-lm does.

    Raises ``UserError`` for a prompt, a file or an ``--output`` that is not usable.
    """
    if config.prompts is not None:
        requests = read_prompts(config.prompts, config.max_tokens)
    else:
        given = DEFAULT_PROMPT if config.prompt is None else config.prompt
        prompt = given.replace("\\n", "\n").replace("\\t", "\t")
        prompt = read_stdin() if prompt == "-" else prompt
        if not prompt:
            raise UserError("--prompt is empty", "give a text")
        messages = ({"role": "user", "content": prompt},)
        requests = [PromptRequest(messages, config.max_tokens, "--prompt", prompt)]
    if config.output is not None:
        check_writable(Path(config.output), "--output")
    reader = replace(
        reader, system_prompt=config.system_prompt, prefill_response=config.prefill_response
    )
    return [TokenizedPrompt(_tokens(config, reader, each), each.max_tokens) for each in requests]


def _tokens(
    config: GenerateConfig, reader: PromptReader, request: PromptRequest
) -> tuple[int, ...]:
    try:
        if request.prompt is not None and (config.ignore_chat_template or not reader.has_template):
            return reader.text(request.prompt)
        return reader.chat(request.messages)
    except UserError as error:
        raise UserError(f"{request.where}: {error.problem}", error.remedy) from None


def load_of(prompts: Sequence[TokenizedPrompt]) -> GenerationLoad:
    """Return how many tokens these prompts and their answers may take."""
    return GenerationLoad(
        sequences=len(prompts),
        prompt=max(len(each.tokens) for each in prompts),
        answer=max(each.max_tokens for each in prompts),
        context=max(len(each.tokens) + each.max_tokens for each in prompts),
    )


def _lead(
    config: GenerateConfig,
    prepared: InferenceRun,
    reader: PromptReader,
    prompts: Sequence[TokenizedPrompt],
    reporter: Reporter,
) -> None:
    """Generate all answers on rank 0, and print or write them."""
    first_stage = prepared.first_stage()
    answers = []
    for number, prompt in enumerate(prompts):
        answers.append(new_detokenizer(reader.tokenizer, prompt.max_tokens))
        first_stage.add(number, prompt.tokens, sampling_params_of(config, reader.tokenizer, number))
    if config.prompts is None:
        _stream(answers[0], len(prompts[0].tokens), first_stage, reporter)
    else:
        with _output(config) as file, reporter.bar("generating", len(answers)) as bar:
            _write(prompts, answers, first_stage, file, bar)
        _summary(prompts, answers, reporter)
    first_stage.stop()


def _stream(
    answer: IncrementalDetokenizer, prompt_tokens: int, first_stage: FirstStage, reporter: Reporter
) -> None:
    """Print one answer as it comes."""
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
    prompt_seconds = max(answer.first - answer.started, 1e-9)
    seconds = max(answer.last - answer.first, 1e-9)
    reporter.say(
        f"Prompt: {prompt_tokens} tokens, {prompt_tokens / prompt_seconds:.3f} tokens-per-sec"
    )
    reporter.say(f"Generation: {answer.count} tokens, {answer.count / seconds:.3f} tokens-per-sec")


def _write(
    prompts: Sequence[TokenizedPrompt],
    answers: Sequence[IncrementalDetokenizer],
    first_stage: FirstStage,
    file: IO[str],
    bar: Bar,
) -> None:
    """Write all answers, as JSON lines in the order of their prompts."""
    waiting = deque(zip(prompts, answers, strict=True))
    for number, _ in first_stage.stream(dict(enumerate(answers))):
        bar.advance(answers[number].finish_reason is not None)
        while waiting and waiting[0][1].finish_reason is not None:
            prompt, answer = waiting.popleft()
            line = {
                "text": answer.text,
                "prompt_tokens": len(prompt.tokens),
                "generation_tokens": answer.count,
                "finish_reason": answer.finish_reason,
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()


def _output(config: GenerateConfig) -> AbstractContextManager[IO[str]]:
    if config.output is None:
        return nullcontext(sys.stdout)
    return Path(config.output).open("w", encoding="utf-8")


def _summary(
    prompts: Sequence[TokenizedPrompt],
    answers: Sequence[IncrementalDetokenizer],
    reporter: Reporter,
) -> None:
    seconds = max(max(t.last for t in answers) - min(t.started for t in answers), 1e-9)
    read = sum(len(prompt.tokens) for prompt in prompts)
    generated = sum(answer.count for answer in answers)
    reporter.say(
        f"{len(answers)} answers in {seconds:.1f} s: {read} prompt tokens, {generated} generated, "
        f"{(read + generated) / seconds:.3f} tokens-per-sec together"
    )
