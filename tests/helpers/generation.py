"""Texts of a model through the pipeline's stages, and by mlx-lm alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step

from shardmlx.config.inference import HEAD
from shardmlx.distributed.transport import Transport
from shardmlx.inference.drafts import DraftCounts, Drafting
from shardmlx.inference.kv_caches import KVCaches
from shardmlx.inference.later_stage import LaterStage
from shardmlx.inference.pipeline import FirstStage
from shardmlx.inference.prefix_cache import PrefixCache
from shardmlx.inference.prefix_files import PrefixFiles, content_of, place_of
from shardmlx.inference.route import TokenRoute
from shardmlx.inference.sampler import BatchSampler
from shardmlx.inference.sampling_params import SampledToken, SamplingParams
from shardmlx.inference.scheduler import Scheduler
from shardmlx.inference.stage import StageWorker
from shardmlx.loading.build import build_draft_head
from shardmlx.models.runtime.slice import Slice
from shardmlx.models.sizes.kv_cache import CacheQuantisation
from shardmlx.pipeline.mesh import Mesh
from tests.helpers.local_transport import LocalNetwork

Texts = dict[int, list[int]]

CHUNK = 8
"""Tokens of a prompt that are computed at a time."""


def by_mlx_lm(
    model: nn.Module, prompt: Sequence[int], count: int, *, chunk: int = CHUNK, **how: Any
) -> list[int]:
    text = mx.array(list(prompt))
    steps = generate_step(text, model, max_tokens=count, prefill_step_size=chunk, **how)
    return [token for token, _ in steps]


def add_all(first_stage: FirstStage, prompts: Mapping[int, Sequence[int]], context: int) -> None:
    """Add sequences that will have ``context`` tokens at most, and be sampled greedily."""
    for number, tokens in prompts.items():
        first_stage.add(number, tokens, SamplingParams(), context=context)


def on_ranks(
    models: Sequence[nn.Module],
    ranges: Sequence[tuple[int, int]],
    work: Callable[[FirstStage], Any],
    *,
    chunk: int = CHUNK,
    most: int = 8,
    groups: int | None = None,
    patience: int | None = None,
    capacity: int | None = 4096,
    prefix_cache: PrefixCache | None = None,
    max_kv_size: int | None = None,
    quantisation: CacheQuantisation | None = None,
    directory: Path | None = None,
    said: list[str] | None = None,
    drafting: Drafting | None = None,
    head: Path | None = None,
    shares: int = 1,
    worker: Callable[..., StageWorker] = StageWorker,
) -> Any:
    """Return what ``work`` makes of the first stage, with a rank and a model for each range of
    layers, or as many as ``shares``, each of which has it whole. The model in the directory
    ``head`` has the head that drafts. Another ``directory`` has what earlier ranks kept;
    ``said`` gets its faults. ``worker`` makes that of each rank."""
    mesh = Mesh(1, len(ranges), shares)

    def run(transport: Transport) -> Any:
        rank = transport.rank
        part = Slice(models[rank], *ranges[mesh.coordinates(rank)[1]])
        of_head = None
        if head is not None and part.is_last:
            of_head = build_draft_head(head, None)
            of_head.beside(part)
        holder = of_head or part
        caches = KVCaches(lambda: holder.new_caches(max_kv_size), quantisation)
        files, prefixes = None, []
        if directory is not None:
            layers = part.cache_names if of_head is None else (*part.cache_names, HEAD)
            weights = transport.all_gather(content_of(part), "weights")
            files = PrefixFiles.opened(place_of(str(directory), weights, ()), layers)
            keys = [each.key for each in files.read_index()]
            faults = transport.all_gather(files.faults(keys), "faults")
            found = {key: fault for mine in faults for key, fault in mine.items()}
            prefixes = [each for each in files.read_index() if each.key not in found]
            if said is not None and rank == 0:
                said.extend(found.values())
        own = worker(
            transport, part, caches, BatchSampler(7), files, of_head, route=TokenRoute.of(mesh)
        )
        if rank > 0:
            return LaterStage(own).run()
        quantised = 0 if quantisation is None else quantisation.border
        scheduler = Scheduler(groups or len(ranges), most, chunk, patience, capacity, quantised)
        first_stage = FirstStage(own, scheduler, prefix_cache, drafting)
        if prefixes:
            first_stage.restore(prefixes)
        result = work(first_stage)
        first_stage.stop()
        return result

    return LocalNetwork(mesh.size).run(run)[0]


def finish_all(
    first_stage: FirstStage, counts: Mapping[int, int], cached: dict[int, int] | None = None
) -> dict[int, list[SampledToken]]:
    """Return the tokens of sequences that end after so many. ``cached`` gets how many tokens of
    their prompts came from the prefix cache."""
    tokens: dict[int, list[SampledToken]] = {number: [] for number in counts}
    while not first_stage.is_idle:
        for number, sampled in first_stage.step():
            if cached is not None:
                cached[number] = first_stage.cached(number)
            tokens[number].append(sampled)
            if len(tokens[number]) == counts[number]:
                first_stage.finish(number)
    return tokens


def counted(work: Callable[[FirstStage], Any]) -> Callable[[FirstStage], tuple[Any, DraftCounts]]:
    """Return work that returns what was drafted, too."""
    return lambda first_stage: (work(first_stage), first_stage.drafted)


def texts_of(
    first_stage: FirstStage, counts: Mapping[int, int], cached: dict[int, int] | None = None
) -> Texts:
    found = finish_all(first_stage, counts, cached)
    return {number: [each.token for each in tokens] for number, tokens in found.items()}


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

    def work(first_stage: FirstStage) -> tuple[Texts, dict[int, int]]:
        texts: Texts = {}
        cached: dict[int, int] = {}
        for prompts in conversations:
            for number, prompt in prompts.items():
                first_stage.add(number, prompt, SamplingParams(), context=len(prompt) + count)
            texts |= texts_of(first_stage, dict.fromkeys(prompts, count), cached)
        return texts, cached

    found: tuple[Texts, dict[int, int]] = on_ranks(
        models, ranges, work, groups=groups, prefix_cache=kept
    )
    return found
