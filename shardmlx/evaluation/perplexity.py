"""The perplexity of a data set."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardmlx.config.data import DataOptions
from shardmlx.config.inference import EvaluateConfig
from shardmlx.engine.batches import Sample
from shardmlx.errors import UserError
from shardmlx.evaluation.scoring import Scores
from shardmlx.inference.prompts import PromptEncoder
from shardmlx.training.datasets import read_data


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The perplexity of texts of ``tokens``: e to ``loss``, their mean negative log-probability."""

    perplexity: float
    standard_error: float
    loss: float
    tokens: int


def read_texts(
    config: EvaluateConfig, encoder: PromptEncoder, warn: Callable[[str], None]
) -> list[Sample]:
    """Read and tokenise ``--data``; ``warn`` of cut texts. Raises ``UserError``."""
    options = DataOptions(
        train=False,
        test=True,
        data=str(config.data),
        hf_dataset=None,
        max_seq_length=config.max_seq_length,
        long_sequences="cut",
        mask_prompt=config.mask_prompt,
        trust_remote_code=config.trust_remote_code,
        batch_size=1,
    )
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


def perplexity_of(samples: Sequence[Sample], scores: Sequence[Scores]) -> Perplexity:
    """Return the perplexity of samples: all tokens after the first, from their start on."""
    pairs = zip(samples, scores, strict=True)
    counted = [score.logprobs[max(start, 1) - 1 :] for (_, start), score in pairs]
    losses = -np.concatenate(counted).astype(np.float64)
    loss = float(losses.mean())
    spread = float(losses.std(ddof=1)) if losses.size > 1 else 0.0
    error = math.exp(loss) * spread / math.sqrt(losses.size)
    return Perplexity(math.exp(loss), error, loss, losses.size)
