"""The command ``shardmlx evaluate`` on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from shardmlx.common.environment import Blas
from shardmlx.common.formatting import plural
from shardmlx.common.json_output import JsonOutput
from shardmlx.common.reporter import Reporter, check_writable
from shardmlx.config.inference import EVALUATE, EvaluateConfig
from shardmlx.distributed.crew import Crew, lead, together
from shardmlx.distributed.transport import Transport
from shardmlx.engine.batches import Sample
from shardmlx.errors import UserError, file_access
from shardmlx.evaluation.scoring import Scorer, Scores, Sequences, perplexity_of
from shardmlx.evaluation.tasks import Question, check_tasks, rows_of, run_tasks
from shardmlx.inference.detokenize import StopStrings
from shardmlx.inference.prompts import PromptEncoder
from shardmlx.inference.route import TokenRoute
from shardmlx.inference.run import InferenceRun
from shardmlx.inference.setup import RankMemory, prepare, report_memory
from shardmlx.inference.worker import InferenceWorker
from shardmlx.planning.facts.job_facts import GenerationLoad
from shardmlx.training.datasets import read_data


class EvaluationWorker(InferenceWorker):
    """The part of one rank in an evaluation."""

    def __init__(self, transport: Transport, reporter: Reporter) -> None:
        super().__init__(transport, reporter)
        self._scorer: Scorer | None = None

    @together
    def score(self, sequences: Sequences, rows: int) -> list[Scores]:
        """Score sequences with the other ranks, so many ``rows`` at a time; return the scores on
        rank 0."""
        if self._scorer is None:
            chunk = self.run.generation.setup.chunk
            self._scorer = Scorer(
                self.transport, [self.run.part], rows, chunk, TokenRoute.of(self.run.job.mesh)
            )
        return self._scorer.score(sequences)


def run(config: EvaluateConfig, transport: Transport, blas: Blas) -> None:
    """Evaluate as rank 0's ``config`` says. On all ranks; raises as ``lead``."""
    reporter = Reporter(quiet=transport.rank != 0)
    with closing(EvaluationWorker(transport, reporter)) as worker:
        lead(transport, worker, partial(_evaluate, config, blas))


def _evaluate(config: EvaluateConfig, blas: Blas, crew: Crew[EvaluationWorker]) -> None:
    """Evaluate, on rank 0, and write JSON if it is asked for."""
    with JsonOutput(config.json, EVALUATE.command, {"--output": config.output}) as output:
        results, ranks = _evaluated(config, blas, crew)
        asked = {
            "model": config.source.model,
            "adapter_path": config.adapter_path,
            "data": config.data,
            "tasks": config.tasks,
        }
        output.write({**asked, "results": results, "ranks": ranks})


def _evaluated(
    config: EvaluateConfig, blas: Blas, crew: Crew[EvaluationWorker]
) -> tuple[Mapping[str, Any], list[RankMemory]]:
    """Return the results, and the memory of each rank, once they are printed."""
    reporter = crew.worker.reporter
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

    prepared = prepare(config, crew, read)
    prepared.transport.activity.begin("evaluating")
    results = _measure(config, crew, prepared, texts)
    if config.output is not None:
        with file_access("write", config.output):
            Path(config.output).write_text(json.dumps(results, indent=2) + "\n")
    return results, report_memory(crew)


def read_texts(
    config: EvaluateConfig, encoder: PromptEncoder, warn: Callable[[str], None]
) -> list[Sample]:
    """Read and tokenise ``--data``; ``warn`` of cut texts. Raises ``UserError``."""
    data = read_data(
        config.wanted_data, encoder.tokenizer, encoder.positions, vocabulary=encoder.vocabulary
    )
    for warning in data.warnings:
        warn(warning)
    samples = data.test[: config.limit]
    for warning in data.test.news():
        warn(warning)
    cut = [(tokens[: config.max_seq_length], start) for tokens, start in samples]
    scored = [(tokens, start) for tokens, start in cut if len(tokens) > max(start, 1)]
    if not scored:
        problem = f"--data {config.data} has no token to predict"
        raise UserError(problem, "name a set of longer texts")
    return scored


def _measure(
    config: EvaluateConfig,
    crew: Crew[EvaluationWorker],
    prepared: InferenceRun,
    texts: Sequence[Sample],
) -> Mapping[str, Any]:
    reporter, encoder = crew.worker.reporter, prepared.prompts

    def score(sequences: Sequences) -> list[Scores]:
        return crew.all(EvaluationWorker.score, sequences, config.batch_size)[0]

    def answer(questions: Sequence[Question]) -> list[str]:
        with crew.others(InferenceWorker.follow):
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
