"""The command ``shardmlx evaluate`` on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from shardmlx.common.environment import Blas
from shardmlx.common.formatting import plural
from shardmlx.common.reporter import Reporter, check_writable
from shardmlx.config.data import DataOptions
from shardmlx.config.inference import EvaluateConfig
from shardmlx.distributed.transport import Transport
from shardmlx.engine.batches import Sample
from shardmlx.errors import UserError, file_access
from shardmlx.evaluation.scoring import Scorer, Scores, Sequences, perplexity_of
from shardmlx.evaluation.tasks import Question, check_tasks, rows_of, run_tasks
from shardmlx.inference.detokenize import StopStrings
from shardmlx.inference.plan import GenerationLoad
from shardmlx.inference.prompts import PromptEncoder
from shardmlx.inference.run import InferenceRun, report_memory
from shardmlx.inference.setup import prepare
from shardmlx.loading.rank_setup import SETUP_SECONDS
from shardmlx.training.datasets import read_data

GENERATE = "generate"
"""A request of rank 0. Another is sequences to score; None is the end."""


def run(config: EvaluateConfig, transport: Transport, blas: Blas) -> None:
    """Evaluate with the same ``config`` on all ranks; all must call it. Raises as ``prepare``."""
    reporter = Reporter(quiet=transport.rank != 0)
    reporter.say(str(blas))
    texts: list[Sample] = []

    def read(encoder: PromptEncoder) -> GenerationLoad:
        if config.output is not None:
            check_writable(Path(config.output), "--output")
        if config.data is None:
            check_tasks(config)
            longest = min(config.max_seq_length, encoder.positions or config.max_seq_length)
            return GenerationLoad(config.batch_size, longest, 1, longest)
        texts.extend(read_texts(config, encoder, reporter.warn))
        longest = max(len(tokens) for tokens, _ in texts)
        return GenerationLoad(min(config.batch_size, len(texts)), longest, 1, longest)

    prepared = prepare(config, transport, reporter, read)
    plan = prepared.plan
    scorer = Scorer(transport, prepared.part, config.batch_size, plan.setup.chunk, plan.mesh)
    transport.activity.begin("evaluating")
    if prepared.encoder is None:
        # Rank 0 may compute for long between two requests: its own metric, or a prompt.
        with transport.longer_timeout(SETUP_SECONDS):
            while (request := transport.broadcast(None, what="requests")) is not None:
                if request == GENERATE:
                    prepared.later_stage().run()
                else:
                    scorer.score(request)
    else:
        results = _lead(config, prepared, scorer, prepared.encoder, texts)
        transport.broadcast(None, what="requests")
        if config.output is not None:
            with file_access("write", config.output):
                Path(config.output).write_text(json.dumps(results, indent=2) + "\n")
    report_memory(prepared)


def read_texts(
    config: EvaluateConfig, encoder: PromptEncoder, warn: Callable[[str], None]
) -> list[Sample]:
    """Read and tokenise ``--data``; ``warn`` of cut texts. Raises ``UserError``."""
    options = replace(DataOptions.of(config), test=True, batch_size=1)
    data = read_data(options, encoder.tokenizer, encoder.positions, vocabulary=encoder.vocabulary)
    for warning in data.warnings:
        warn(warning)
    samples = list(data.test)[: config.limit]
    cut = [(tokens[: config.max_seq_length], start) for tokens, start in samples]
    scored = [(tokens, start) for tokens, start in cut if len(tokens) > max(start, 1)]
    if not scored:
        problem = f"--data {config.data} has no token to predict"
        raise UserError(problem, "name a set of longer texts")
    return scored


def _lead(
    config: EvaluateConfig,
    prepared: InferenceRun,
    scorer: Scorer,
    encoder: PromptEncoder,
    texts: Sequence[Sample],
) -> Mapping[str, Any]:
    transport, reporter = prepared.transport, prepared.reporter

    def score(sequences: Sequences) -> list[Scores]:
        transport.broadcast(sequences, what="requests")
        return scorer.score(sequences)

    def answer(questions: Sequence[Question]) -> list[str]:
        transport.broadcast(GENERATE, what="requests")
        stage = prepared.first_stage()
        answers = [
            prepared.ask(stage, number, tokens, most, StopStrings(stops))
            for number, (tokens, most, stops) in enumerate(questions)
        ]
        for _ in stage.stream(dict(enumerate(answers))):
            pass
        stage.stop()
        return [each.text for each in answers]

    if config.data is None:
        results = run_tasks(config, encoder, score, answer)
        reporter.table(("task", "metric", "value", "standard error"), rows_of(results))
        return results
    found = perplexity_of(texts, score([[*map(int, tokens)] for tokens, _ in texts]))
    reporter.say(
        f"{config.data}: perplexity {found.perplexity:.4f} +/- {found.standard_error:.4f}, loss "
        f"{found.loss:.4f}, {found.tokens} tokens of {plural(len(texts), 'text')}"
    )
    return asdict(found) | {"texts": len(texts)}
