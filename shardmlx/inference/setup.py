"""Set up a run that generates, for all commands alike: plan it on rank 0, and load it on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from shardmlx.common.formatting import gibibytes, numbers_of, percent, plural
from shardmlx.common.reporter import Reporter
from shardmlx.config.inference import HEAD, NO_DRAFT, InferenceConfig
from shardmlx.distributed.crew import Crew, lead
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError
from shardmlx.inference.draft_model import ModelDrafter, find_draft_model
from shardmlx.inference.prompts import PromptEncoder
from shardmlx.inference.run import InferenceRun
from shardmlx.inference.worker import InferenceWorker
from shardmlx.loading.rank_setup import (
    ModelWorker,
    OpenedModel,
    bring_weights,
    gather_facts,
    join_groups,
    open_everywhere,
)
from shardmlx.loading.tokenizer import read_tokenizer
from shardmlx.loading.transfer import Needs
from shardmlx.modelfiles.model_files import open_model
from shardmlx.planning.facts.job_facts import GenerationFacts, GenerationLoad
from shardmlx.planning.facts.workload import model_sizes
from shardmlx.planning.job import Job
from shardmlx.planning.memory.limits import exceeded
from shardmlx.planning.think import JobOptions, think

Read = Callable[[PromptEncoder], GenerationLoad]
"""Function that says on rank 0 how much is to be generated. Raises ``UserError``."""


def run_inference(
    transport: Transport, reporter: Reporter, work: Callable[[Crew[InferenceWorker]], None]
) -> None:
    """Do ``work`` on rank 0, with the workers of all ranks. On all ranks; raises as ``lead``."""
    with closing(InferenceWorker(transport, reporter)) as worker:
        lead(transport, worker, work)


def prepare(config: InferenceConfig, crew: Crew[InferenceWorker], read: Read) -> InferenceRun:
    """Check everything, then load each rank's layers; return rank 0's run. Raises ``UserError`` for
    what the user can fix, before weights are read."""
    reporter = crew.worker.reporter
    opened = open_everywhere(crew, config.source, config.adapter_path, reporter)
    shape = opened.shape
    encoder = encoder_of(config, opened)
    load = read(encoder)
    draft = None
    if config.draft_model is not None:
        draft = find_draft_model(config, encoder.tokenizer)
    of_head = 0
    if config.draft == HEAD:
        of_head = crew.all(InferenceWorker.build_head, config.draft, config.dtype)[0]
    facts = gather_facts(
        crew,
        model_sizes(open_model(str(opened.path)), config.dtype),
        config.machines,
        config.stage_map,
        config.bytes_for_requests,
    )
    asked = GenerationFacts(load, None if draft is None else draft.sizes, of_head)
    job = think(JobOptions(generation=config), replace(facts, generation=asked))
    for warning in job.warnings:
        reporter.warn(warning)
    join_groups(crew, job.mesh)
    crew.all(InferenceWorker.build, config, job)
    drafter = None
    if draft is not None:
        drafter = ModelDrafter.of(draft, config.dtype, shape.vocab_size, job.generated.setup.chunk)
    _announce(config, job, reporter)
    crew.all(ModelWorker.set_limits, job.limits)
    bring_weights(crew, Needs.of(job, shape), reporter)
    crew.all(InferenceWorker.load)
    if drafter is not None:
        drafter.read_weights()
        mx.reset_peak_memory()
    return crew.worker.lead_with(encoder, drafter)


@contextmanager
def later_stages(crew: Crew[InferenceWorker]) -> Iterator[None]:
    """Let the other ranks follow rank 0's first stage, which must stop at the end of the block;
    then show what each rank took."""
    with crew.others(InferenceWorker.follow):
        yield
    report_memory(crew)


def encoder_of(config: InferenceConfig, opened: OpenedModel) -> PromptEncoder:
    """Return the encoder of prompts for a model. Raises ``UserError``."""
    return PromptEncoder(
        tokenizer=_tokenizer(config, opened),
        template_arguments=config.template_arguments,
        vocabulary=opened.shape.vocab_size,
        positions=opened.max_positions,
    )


def _tokenizer(config: InferenceConfig, opened: OpenedModel) -> TokenizerWrapper:
    tokenizer = read_tokenizer(opened.path, config.trust_remote_code, opened.config)
    for token in config.extra_eos_token:
        try:
            tokenizer.add_eos_token(token)
        except ValueError:
            raise UserError(
                f"--extra-eos-token {token}: the tokenizer knows no such token",
                "name one of its own",
            ) from None
    return tokenizer


def _announce(config: InferenceConfig, job: Job, reporter: Reporter) -> None:
    model = config.source.model
    part = job.generated
    setup = part.setup
    sizes = " + ".join(map(str, job.stage_map.partition.sizes))
    across = job.shares.size
    on = ""
    if across > 1:
        shares = ":".join(map(str, job.shares.weights))
        on = f", each on {across} ranks with tensor shares {shares}"
    reporter.say(
        f"{model}: {plural(job.stage_map.num_stages, 'stage')} of {sizes} layers{on}, "
        f"prompts in chunks of {setup.chunk} tokens"
    )
    if (how := setup.quantisation) is not None:
        plain = replace(part, setup=replace(setup, quantisation=None))
        packed = " + ".join(map(gibibytes, job.caches))
        whole = " + ".join(map(gibibytes, replace(job, generation=plain).caches))
        reporter.say(
            f"KV caches of sequences from {how.start} tokens on in {how.bits} bits: at most "
            f"{packed}, not {whole}"
        )
    for nbytes, rank in ((setup.beside, 0), (setup.head, job.mesh.pp - 1)):
        if nbytes:
            reporter.say(f"--draft {config.draft}: {gibibytes(nbytes)} on rank {rank}")
    if config.draft != NO_DRAFT and part.load.context > part.cuttable:
        reporter.say(
            f"--draft {config.draft}: texts of {part.cuttable} tokens and more get no drafts, "
            "since their sliding windows cannot give back what is rejected"
        )
    if config.max_kv_size is not None and setup.model.shape.chooses_caches:
        reporter.warn(
            f"--max-kv-size {config.max_kv_size} changes nothing: models of type "
            f"{setup.model.shape.model_type} choose their caches themselves, in mlx-lm too"
        )


def typical_load(
    config: InferenceConfig,
    sequences: int,
    capacity: int,
    encoder: PromptEncoder,
    *,
    keeps_prefixes: bool = False,
) -> GenerationLoad:
    """Return the load before any prompt is known, with KV caches of ``capacity`` tokens, and with a
    prefix cache if it ``keeps_prefixes``."""
    context = min(capacity, encoder.positions or capacity)
    return GenerationLoad.typical(
        sequences, capacity, context, config.max_tokens, keeps_prefixes=keeps_prefixes
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The layers of a rank, from ``layers[0]`` to before ``layers[1]``, and the bytes it held."""

    host: str
    layers: tuple[int, int]
    weights_bytes: int
    peak_memory_bytes: int
    predicted_bytes: float


def report_memory(crew: Crew[InferenceWorker]) -> list[RankMemory]:
    """Print a table of the layers and the memory of each rank; return what it shows."""
    run, reporter, hosts = crew.worker.run, crew.worker.reporter, crew.transport.hosts
    everyone = crew.all(InferenceWorker.memory)
    peaks = [peak for _, peak in everyone]
    reporter.say(f"Peak memory: {gibibytes(max(peaks))}")
    ranks = [
        RankMemory(
            host=hosts[rank],
            layers=run.job.layers(rank)[0],
            weights_bytes=weights,
            peak_memory_bytes=peak,
            predicted_bytes=run.job.limits[rank].planned.peak,
        )
        for rank, (weights, peak) in enumerate(everyone)
    ]
    rows = [
        (
            str(rank),
            each.host,
            numbers_of(*each.layers),
            gibibytes(each.weights_bytes),
            gibibytes(each.peak_memory_bytes),
            gibibytes(each.predicted_bytes),
            percent(each.peak_memory_bytes, each.predicted_bytes),
        )
        for rank, each in enumerate(ranks)
    ]
    reporter.table(("rank", "host", "layers", "weights", "peak memory", "predicted", ""), rows)
    for warning in exceeded(run.job.limits, hosts, peaks):
        reporter.warn(warning)
    return ranks
