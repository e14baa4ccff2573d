"""Tasks of lm-evaluation-harness, answered through the pipeline as in ``mlx_lm.evaluate``."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardmlx.config.inference import EvaluateConfig
from shardmlx.errors import UserError
from shardmlx.evaluation.scoring import Scores, Sequences
from shardmlx.inference.prompts import PromptEncoder

Score = Callable[[Sequences], list[Scores]]
"""Scores sequences on all ranks."""

Question = tuple[Sequence[int], int, tuple[str, ...]]
"""Tokens of a prompt, those of its answer at most, and strings before which the answer ends."""

Answer = Callable[[Sequence[Question]], list[str]]
"""Generates greedy answers on all ranks."""

SEED = 123
"""Seed of the choice of examples, as in mlx_lm.evaluate."""

MOST_TOKENS = 256
"""Tokens of an answer if the task sets no number."""


def check_tasks(config: EvaluateConfig) -> None:
    """Raise ``UserError`` if lm-evaluation-harness is missing, or does not know a task."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "--tasks needs lm-evaluation-harness, which is not installed", "pip install lm-eval"
        )
    _manager(config)


def _manager(config: EvaluateConfig) -> Any:
    """Return the manager that finds the tasks. Raises ``UserError`` for a missing one."""
    from lm_eval.tasks import TaskManager

    if config.include_path is not None:
        # The package's own tasks are in thousands of files.
        own = TaskManager(include_path=config.include_path, include_defaults=False)
        if set(config.tasks) <= set(own.all_tasks):
            return own
    every = TaskManager(include_path=config.include_path)
    if unknown := set(config.tasks).difference(every.all_tasks):
        raise UserError(
            f"--tasks {min(unknown)} is not known to lm-evaluation-harness",
            "lm_eval ls tasks shows all; name a directory with your own by --include-path",
        )
    return every


def run_tasks(
    config: EvaluateConfig, encoder: PromptEncoder, score: Score, answer: Answer
) -> Mapping[str, Any]:
    """Return the results of each task, in lm-evaluation-harness's form."""
    # Its child processes, which it ends by signals, would end this job: they inherit its handlers.
    os.environ["DISABLE_MULTIPROC"] = "1"
    import lm_eval

    results: Mapping[str, Any] = lm_eval.simple_evaluate(
        model=_model(config, encoder, score, answer),
        tasks=list(config.tasks),
        task_manager=_manager(config),
        num_fewshot=config.num_shots,
        limit=config.limit,
        apply_chat_template=encoder.has_template,
        random_seed=SEED,
        numpy_random_seed=SEED,
        torch_random_seed=SEED,
        fewshot_random_seed=SEED,
        log_samples=False,
    )["results"]
    return results


def rows_of(results: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return task, metric, value and standard error of each result."""
    rows = []
    for task, values in results.items():
        for name, value in values.items():
            metric, comma, filtered = name.partition(",")
            if comma and not metric.endswith("_stderr"):
                error = values.get(f"{metric}_stderr,{filtered}")
                shown = f"{error:.4f}" if isinstance(error, float) else ""
                number = f"{value:.4f}" if isinstance(value, float) else str(value)
                rows.append((task, metric, number, shown))
    return rows


def continuation(
    encode: Callable[[str], Sequence[int]], context: str, answer: str, most: int
) -> tuple[list[int], int] | None:
    """Return a context and answer, cut in front, and the answer's length; None without context."""
    whole = list(encode(context + answer))
    count = len(whole) - len(encode(context))
    kept = whole[-(most + 1) :]
    return None if count < 1 or len(kept) <= count else (kept, count)


def _model(config: EvaluateConfig, encoder: PromptEncoder, score: Score, answer: Answer) -> Any:
    from lm_eval.api.model import LM

    def encode(text: str) -> list[int]:
        tokens = encoder.tokenizer.encode(text, add_special_tokens=not encoder.has_template)
        return [*encoder.checked(tokens)]

    class Pipeline(LM):
        tokenizer_name = config.source.model.replace("/", "__")

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            text: str = encoder.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **config.template_arguments,
            )
            return text

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            asked = [
                continuation(encode, context, answer, config.max_seq_length)
                for context, answer in (request.args for request in requests)
            ]
            found = iter(score([tokens for tokens, _ in filter(None, asked)]))
            results = [(-float("inf"), False)] * len(asked)
            for i, each in enumerate(asked):
                if each is not None:
                    scores, (_, count) = next(found), each
                    is_likeliest = bool(scores.is_likeliest[-count:].all())
                    results[i] = float(scores.logprobs[-count:].sum()), is_likeliest
            return results

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            texts = [encode(request.args[0]) for request in requests]
            found = iter(score([tokens for tokens in texts if len(tokens) > 1]))
            return [
                float(next(found).logprobs.sum()) if len(tokens) > 1 else 0.0 for tokens in texts
            ]

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            questions = []
            for context, how in (request.args for request in requests):
                until = how.get("until") or ()
                stops = (until,) if isinstance(until, str) else tuple(filter(None, until))
                most = how.get("max_gen_toks", MOST_TOKENS)
                questions.append((encode(context), most, stops))
            return answer(questions)

    return Pipeline()
