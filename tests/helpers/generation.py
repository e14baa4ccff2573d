"""Texts of a model through the pipeline's stages, and by mlx-lm alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step

from shardmlx.distributed.local_transport import LocalNetwork
from shardmlx.distributed.transport import Transport
from shardmlx.inference.pipeline import FirstStage, LaterStage
from shardmlx.inference.prefix_cache import PrefixCache
from shardmlx.inference.sampling_params import SamplingParams
from shardmlx.inference.scheduler import Scheduler
from shardmlx.inference.stage import StageWorker
from shardmlx.models.slice import Slice

Texts = dict[int, list[int]]

CHUNK = 8
"""Tokens of a prompt that are computed at a time."""


def by_mlx_lm(model: nn.Module, prompt: Sequence[int], count: int) -> list[int]:
    """Return the tokens that mlx-lm generates in one process."""
    steps = generate_step(mx.array(list(prompt)), model, max_tokens=count, prefill_step_size=CHUNK)
    return [token for token, _ in steps]


class Pipeline:
    """A running pipeline, a rank for each model of ``models``, which keeps what has ended."""

    def __init__(self, first_stage: FirstStage) -> None:
        self._stage = first_stage
        self.cached: dict[int, int] = {}
        """Tokens of each prompt that came from the prefix cache."""

    def texts(self, prompts: Mapping[int, Sequence[int]], count: int) -> Texts:
        """Return ``count`` tokens after each prompt; all are under way at once."""
        texts: Texts = {number: [] for number in prompts}
        for number, prompt in prompts.items():
            self._stage.add(number, prompt, SamplingParams(), context=len(prompt) + count)
        while not self._stage.is_idle:
            for number, sampled in self._stage.step():
                self.cached[number] = self._stage.cached(number)
                texts[number].append(sampled.token)
                if len(texts[number]) == count:
                    self._stage.finish(number)
        return texts


def run_pipeline(
    models: Sequence[nn.Module],
    ranges: Sequence[tuple[int, int]],
    groups: int,
    conversations: Sequence[Mapping[int, Sequence[int]]],
    count: int,
    kept: PrefixCache,
) -> tuple[Texts, dict[int, int]]:
    """Return the texts of the prompts, one mapping of them after the other, and what of each came
    from the prefix cache ``kept``. Each rank has a model of its own."""

    def work(transport: Transport) -> tuple[Texts, dict[int, int]]:
        rank = transport.rank
        worker = StageWorker(transport, Slice(models[rank], *ranges[rank]))
        if rank > 0:
            LaterStage(worker).run()
            return {}, {}
        scheduler = Scheduler(groups, 8, CHUNK, None, 4096)
        first_stage = FirstStage(worker, scheduler, prefix_cache=kept)
        pipeline = Pipeline(first_stage)
        texts: Texts = {}
        for prompts in conversations:
            texts |= pipeline.texts(prompts, count)
        first_stage.stop()
        return texts, pipeline.cached

    found: tuple[Texts, dict[int, int]] = LocalNetwork(len(ranges)).run(work)[0]
    return found
